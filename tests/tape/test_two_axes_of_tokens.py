"""Inputs with two axes of tokens, each with attention of its own, as tables, alignments and documents have.

Shapes: B sequence, R row, N token of a row, D width.
"""

import pytest
import torch
from networks_of_others import Attention, D, by_kernel, drawn, random, written_out
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


class Pooled(nn.Module):
    """The words of each sentence are pooled by learned queries, then sentences read each other: of ids (B, R, N), of
    numbers (B, R, 4 N), of states (B, R, N, D), or of ids (B, R N)."""

    def __init__(self, queries, of_words):
        super().__init__()
        self.table, self.map, self.queries = nn.Embedding(50, D), nn.Linear(4, D), nn.Parameter(torch.zeros(queries, D))
        self.words = Attention(by_kernel) if of_words else nn.Identity()
        self.pool, self.rows = Attention(written_out), Attention(by_kernel)

    def states_of(self, x):
        if x.dim() == 4:
            return x
        if x.is_floating_point():
            return self.map(x.unflatten(-1, (-1, 4)))
        return self.table(x) if x.dim() == 3 else self.table(x).unflatten(1, (ROWS, -1))

    def forward(self, x):
        words = self.states_of(x)
        pooled = self.words(words.flatten(0, 1))
        pooled = self.pool(self.queries.expand(len(pooled), -1, -1), pooled)
        return self.rows(pooled.view(len(x), -1, D))


def ids(*shape):
    return torch.randint(3, 50, shape, generator=torch.Generator().manual_seed(0))


TABLES = {
    "ids of two axes": (ids(2, ROWS, 7), True),
    "as many words as sentences": (ids(3, ROWS, ROWS), True),
    "one sequence": (ids(1, ROWS, 7), True),
    "numbers of several words": (random("words", 2, ROWS, 28), True),
    "states": (random("words", 2, ROWS, 7, D), False),
    "ids of one axis": (ids(2, ROWS * 7), False),
}


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("of_words", [False, True])
@pytest.mark.parametrize("name", TABLES)
def test_words_pooled_within_sentences_are_heads_or_refused(name, of_words, queries):
    x, is_refused = TABLES[name]
    module = drawn(Pooled(queries, of_words))
    if is_refused:
        assert "in pool: sums over one of two axes of tokens" in refusal(record, module, x)
    else:
        assert [call.lead.heads for call in record(module, x).reading.calls] == [2] * (2 + of_words)


class OfColumns(nn.Module):
    """Learned tokens that read the columns of ids (B, R, N), behind attention along the rows."""

    def __init__(self):
        super().__init__()
        self.table, self.learned = nn.Embedding(50, D), nn.Parameter(torch.zeros(3, D))
        self.rows, self.pool, self.columns = (Attention(written_out) for _ in range(3))

    def forward(self, x):
        x = self.table(x)
        x = (x + self.rows(x.flatten(0, 1)).view(x.shape)).transpose(1, 2)
        columns = x.flatten(0, 1)
        return self.columns(columns, self.pool(self.learned.expand(len(columns), -1, -1), columns)).view(x.shape)


def test_learned_tokens_that_read_the_other_axis_are_refused():
    assert "in pool: sums over one of two axes of tokens" in refusal(record, drawn(OfColumns()), ids(2, ROWS, 6))


class OfPairs(nn.Module):
    """Attention along the rows of pairs of tokens (B, N, N, D), behind triangle multiplication."""

    def __init__(self):
        super().__init__()
        self.left, self.right, *maps = (nn.Linear(D, D) for _ in range(5))
        self.maps = nn.ModuleList(maps)

    def forward(self, x):
        x = x + torch.einsum("bikd,bjkd->bijd", self.left(x), self.right(x))
        q, k, v = (part(x) for part in self.maps)
        return x + (q @ k.mT).softmax(-1) @ v


def test_attention_behind_triangle_multiplication_is_refused_as_what_it_is():
    assert "as in triangle multiplication" in refusal(record, drawn(OfPairs()), random("pairs", 2, 7, 7, D))
