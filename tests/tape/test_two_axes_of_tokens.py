"""Inputs with two axes of tokens, each with attention of its own, as tables, alignments and documents have.

Shapes: B sequence, R row, N token of a row, D width.
"""

import pytest
import torch
from networks_of_others import Attention, D, H, by_kernel, drawn, random, written_out
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


def mixed_by(q, k, v, in_one_axis=False):
    """Attention to (*lead, N, D). in_one_axis: heads and *lead are one, as for torch.bmm."""
    q, k, v = (x.unflatten(-1, (H, -1)).transpose(-3, -2) for x in (q, k, v))
    lead = q.shape[:-2]
    q, k, v = (x.reshape(-1, *x.shape[-2:]) if in_one_axis else x for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).view(*lead, *v.shape[-2:]).transpose(-3, -2).flatten(-2)


class InOneModule(nn.Module):
    """Layers without submodules of their own, of one map to queries, keys and values each."""

    def __init__(self):
        super().__init__()
        self.table, self.patch, self.learned = nn.Embedding(50, D), nn.Linear(3 * D, D), nn.Parameter(torch.zeros(D))
        self.maps = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))

    def packed(self, layer, x):
        return self.maps[layer](x).chunk(3, -1)


class OfPatches(InOneModule):
    """Attention among patches of three tokens, then, with its result, among the tokens of each patch (MEGABYTE)."""

    def forward(self, x):
        tokens = self.table(x).unflatten(1, (-1, 3))
        patches = mixed_by(*self.packed(0, self.patch(tokens.flatten(2))))
        return mixed_by(*self.packed(1, tokens + patches.unsqueeze(2))).flatten(1, 2)


def test_a_touch_that_fills_a_window_is_refused():
    assert "so nothing shows which axis counts tokens" in refusal(record, drawn(OfPatches()), ids(2, 12))


class OfSentences(InOneModule):
    """Attention among the words of each sentence (B, R, N) and a learned token, and among those of all sentences.
    is_told: whether it can be told into how many heads queries are split."""

    def __init__(self, is_told):
        super().__init__()
        self.is_told = is_told

    def forward(self, x):
        words = torch.cat([self.learned.expand(*x.shape[:2], 1, D), self.table(x)], dim=2)
        learned = (words + mixed_by(*self.packed(0, words)))[:, :, 0]
        by_part = self.maps[1].weight.unflatten(0, (3, D))
        parts = self.packed(1, learned) if self.is_told else torch.einsum("brd,ced->cbre", learned, by_part)
        return mixed_by(*parts, in_one_axis=True)


def test_heads_that_no_touch_shows_are_those_into_which_queries_are_split():
    calls = record(drawn(OfSentences(is_told=True)), ids(2, 4, 7)).reading.calls
    assert [(call.lead.heads, call.num_rows) for call in calls] == [(2, 8), (2, 2)]
    message = "one axis of P holds sequences and heads: no touch arrives, and nothing shows into how many"
    assert message in refusal(record, drawn(OfSentences(is_told=False)), ids(2, 4, 7))


class OfVariables(InOneModule):
    """Attention among variables (B, R, 3 D), for each of their three patches by itself, with heads beside sequences."""

    def forward(self, x):
        patches = x.unflatten(-1, (3, D)).transpose(1, 2)
        return mixed_by(*self.packed(0, patches), in_one_axis=True)


def test_rows_that_the_touch_shows_as_heads_are_refused():
    message = "one axis of P holds sequences and heads: the touch shows 6, and the queries were split into 2"
    assert message in refusal(record, drawn(OfVariables()), random("variables", 2, ROWS, 3 * D))


class CrissCross(nn.Module):
    """Two layers in which each token of (B, R, N, D) reads its row and its column, with one softmax over both."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))

    def forward(self, x):
        for to_packed in self.maps:
            q, k, v = to_packed(x).chunk(3, -1)
            q_of_column, k_of_column, v_of_column = (part.transpose(1, 2) for part in (q, k, v))
            columns = (q_of_column @ k_of_column.mT).transpose(1, 2)
            p, p_of_column = torch.cat([q @ k.mT, columns], -1).softmax(-1).split([x.shape[2], x.shape[1]], -1)
            x = x + p @ v + (p_of_column.transpose(1, 2) @ v_of_column).transpose(1, 2)
        return x


def test_two_equal_sums_in_one_module_of_which_one_is_no_attention_are_refused():
    message = "sums of the same shape in one submodule, and by the touch attention in the second alone"
    assert message in refusal(record, drawn(CrissCross()), random("table", 2, 4, ROWS, D))
