"""Attention by learned queries in a row.

Shapes: B sequence, N query token, D width, H head, K head width.
"""

import pytest
import torch
from networks_of_others import Attention, D, by_einsum, by_kernel, drawn, states, written_out
from torch import nn

from rankbench.tape import record

class Learned(nn.Module):
    """Learned tokens read the states, and stand for them from here on."""

    def __init__(self, mix, number):
        super().__init__()
        self.tokens, self.attention = nn.Parameter(torch.zeros(number, D)), Attention(mix)

    def forward(self, x):
        tokens = self.tokens.expand(len(x), -1, -1)
        return tokens + self.attention(tokens, x)


@pytest.mark.parametrize("numbers", [(4, 1), (3, 3), (5, 3, 2)])
@pytest.mark.parametrize("mix", [written_out, by_einsum])
def test_learned_queries_in_a_row_are_read_as_the_kernel_is(mix, numbers):
    """A path begins at the states or at some of the learned tokens, so that there are 2^k of k heads."""
    tape, same = (
        record(drawn(nn.Sequential(*(Learned(mix, number) for number in numbers))), states())
        for mix in (mix, by_kernel)
    )
    assert tape.paths().by_length == same.paths().by_length == [2**length for length in range(len(numbers) + 1)]
    for got_BND, wanted_BND in zip(tape.sums().by_length_KBND, same.sums().by_length_KBND, strict=True):
        torch.testing.assert_close(got_BND, wanted_BND)
