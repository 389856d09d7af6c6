"""Inputs with two axes of tokens, each with attention of its own, as tables, alignments and documents have.

Shapes: B sequence, R row, N token of a row, D width.
"""

import pytest
from networks_of_others import Attention, D, drawn, random, written_out
from refusals import refusal
from torch import nn

from rankbench.measures.module_reading import read_module
from rankbench.model.modules import Example
from rankbench.tape import record

ROWS = 5


class Both(nn.Module):
    """Attention along the columns of (B, R, N, D), then along the rows, behind what mixes the rows."""

    def __init__(self, mix):
        super().__init__()
        self.mix, self.map, self.columns, self.rows = mix, nn.Linear(D, D), *(Attention(written_out) for _ in range(2))

    def forward(self, x):
        x = self.mix(self, x)
        columns = x.transpose(1, 2)
        x = x + self.columns(columns.flatten(0, 1)).view(columns.shape).transpose(1, 2)
        return x + self.rows(x.flatten(0, 1)).view(x.shape)


MIXES = {
    "nothing": lambda m, x: x,
    "mean": lambda m, x: x + m.map(x).mean(1, keepdim=True),
    "sums so far": lambda m, x: x + m.map(x).cumsum(1),
    "a gate of the mean": lambda m, x: x * m.map(x).mean(1, keepdim=True).sigmoid(),
}


@pytest.mark.parametrize("name", MIXES)
def test_one_sequence_of_which_the_touch_fills_an_axis_is_refused(name):
    x = random("table", 2, ROWS, 7, D)
    module = drawn(Both(MIXES[name]))
    assert [call.lead.heads for call in record(module, x).reading.calls] == [2, 2]
    if name == "nothing":
        assert [call.lead.heads for call in record(module, x[:1]).reading.calls] == [2, 2]
    else:
        message = "with one sequence nothing shows whether the keys of P of shape (7, 2, 5, 5) are tokens"
        assert message in refusal(record, module, x[:1])
    # rankbench.analyze gives the sequence twice
    assert [call.lead.heads for call in read_module(module, Example((x[:1],))).reading.calls] == [2, 2]
