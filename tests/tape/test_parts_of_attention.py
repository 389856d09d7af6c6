"""Attention by learned queries in a row, and one softmax in parts.

Shapes: B sequence, N query token, D width, H head, K head width.
"""

import pytest
import torch
from networks_of_others import MLP, Attention, D, H, N, Sequence, by_einsum, by_kernel, drawn, states, written_out
from path_checks import assert_same_paths
from refusals import refusal
from torch import nn

from rankbench.tape import record

# --- learned queries that read what learned queries have read ---------------------------------------------------------


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
    one, other = (drawn(nn.Sequential(*(Learned(each, number) for number in numbers))) for each in (mix, by_kernel))
    assert_same_paths(one, other, states(), [2**length for length in range(len(numbers) + 1)])


# --- one softmax in parts ---------------------------------------------------------------------------------------------


def merged(merge, keys):
    """Attention of parts of so many keys, whose results are merged."""

    def mix(q, k, v, _):
        scores = [q @ part.mT / q.shape[-1] ** 0.5 for part in k.split(keys, 2)]
        read = [each.softmax(-1) @ part for each, part in zip(scores, v.split(keys, 2), strict=True)]
        return merge(torch.stack([each.logsumexp(-1) for each in scores], -1), torch.stack(read, -2))

    return mix


# sums of exponentials (B, H, N, parts) and what was read (B, H, N, parts, K)
MERGES = {
    "a softmax and matrices": lambda sums, read: (sums.softmax(-1)[..., None, :] @ read).squeeze(-2),
    "a softmax, product and sum": lambda sums, read: (sums.softmax(-1)[..., None] * read).sum(-2),
    "exponentials": lambda sums, read: ((sums - sums.logsumexp(-1, True)).exp()[..., None] * read).sum(-2),
    "einsum": lambda sums, read: torch.einsum("bhnp,bhnpk->bhnk", sums.softmax(-1), read),
}


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("keys", [2, 3, 4, 6])
def test_a_softmax_in_parts_is_refused(name, keys):
    module = drawn(Sequence(Attention(merged(MERGES[name], keys)), MLP(), Attention(written_out)))
    assert "weights of the same scores" in refusal(record, module, states())


def test_parts_that_are_merged_one_by_one_are_refused_where_they_are_merged():
    def one_by_one(sums, read):
        weights = (sums - sums.logsumexp(-1, True)).exp()
        return sum(w[..., None] * x for w, x in zip(weights.unbind(-1), read.unbind(-2), strict=True))

    module = drawn(Sequence(Attention(merged(one_by_one, 4)), MLP(), Attention(written_out)))
    assert "mul in parts.0: weighs states with a softmax" in refusal(record, module, states())


# --- one softmax in parts that are divided by their sum ---------------------------------------------------------------

BELOW = torch.ones(N, N, dtype=torch.bool).tril()


def over_their_sum(divide, has_sum_first=False):
    """Attention to the past and to the future, as sums that the sum of all exponentials divides."""

    def mix(q, k, v, _):
        read = total = 0
        for seen in (BELOW, ~BELOW):
            p = (q @ k.mT / q.shape[-1] ** 0.5).exp() * seen
            total = total + p.sum(-1, keepdim=True) if has_sum_first else total
            read = read + p @ v
            total = total if has_sum_first else total + p.sum(-1, keepdim=True)
        return divide(read, total)

    return mix


def heads_over_their_sums(q, k, v, _):
    """Head by head, and then one division of all heads by their own sums."""
    parts = [(x @ y.mT).exp() for x, y in zip(q.unbind(1), k.unbind(1), strict=True)]
    read = torch.stack([p @ z for p, z in zip(parts, v.unbind(1), strict=True)], 1)
    return read / torch.stack([p.sum(-1, keepdim=True) for p in parts], 1)


DIVISIONS = {
    "a quotient": over_their_sum(lambda read, total: read / total),
    "a quotient, the sum first": over_their_sum(lambda read, total: read / total, has_sum_first=True),
    "in place": over_their_sum(lambda read, total: read.div_(total)),
    "a product": over_their_sum(lambda read, total: total.reciprocal() * read),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_parts_over_their_sum_are_refused(name):
    module = drawn(Sequence(Attention(DIVISIONS[name]), MLP(), Attention(written_out)))
    assert "divided by the sum of all weights" in refusal(record, module, states())


def test_heads_over_sums_of_their_own_are_heads():
    module = drawn(Sequence(*(Attention(heads_over_their_sums) for _ in range(2))))
    assert [call.kind for call in record(module, states()).reading.calls] == ["exp"] * 2 * H
