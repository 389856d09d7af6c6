"""Tokens that the module's own forward mixes, or a stem in front of its attention, and read-outs, which are no mixing.

Shapes: B sequence, N token, D width.
"""

import pytest
import torch
import torch.nn.functional as F
from networks_of_others import Attention, B, D, Sequence, by_kernel, drawn, letters, random, states, written_out
from torch import nn

from rankbench.tape import record

ITSELF = ("the module itself",)


class Outermost(nn.Module):
    """Layers, with a function of the states of the module in front of them, or behind."""

    def __init__(self, function, before=True, read_out=None):
        super().__init__()
        self.table, self.convolution, self.map = nn.Embedding(50, D), nn.Conv1d(D, D, 3, padding=1), nn.Linear(D, D)
        self.one_token, self.layers = nn.Conv1d(D, D, 1), nn.ModuleList(Sequence(Attention(by_kernel)) for _ in "ab")
        self.function, self.before, self.read_out = function, before, read_out

    def forward(self, x, *others):
        x = x if x.is_floating_point() else self.table(x)
        x = self.function(self, x, *others) if self.before else x
        for layer in self.layers:
            x = layer(x)
        x = x if self.before else self.function(self, x, *others)
        return x if self.read_out is None else self.map(self.read_out(x))


def convolved(m, x):
    return F.gelu(m.convolution(x.mT).mT)


LOCAL = {
    "a convolution": convolved,
    "a convolution and what it reads": lambda m, x: x + convolved(m, x),
    "the token before": lambda m, x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
}
OF_ALL = {
    "mean": lambda m, x: x + m.map(x).mean(1, keepdim=True),
    "less the mean": lambda m, x: x - x.mean(1, keepdim=True),
    "a gate of the mean": lambda m, x: x * x.mean(1, keepdim=True).sigmoid(),
    "Fourier": lambda m, x: x + torch.fft.fft(x, dim=1).real,
    "sums so far": lambda m, x: x + x.cumsum(1),
    "a norm of all": lambda m, x: F.group_norm(x.mT, 1).mT,
}
NONE = {
    "a convolution of one token": lambda m, x: x + m.one_token(x.mT).mT,
    "the sequences turned": lambda m, x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("tokens", [7, 16])
@pytest.mark.parametrize("x", [states, letters])
@pytest.mark.parametrize("name", [*LOCAL, *OF_ALL, *NONE])
def test_what_mixes_tokens_in_front_of_layers_is_the_module_itself(name, x, tokens):
    given = states("apart", tokens) if x is states else letters(tokens)
    tape = record(drawn(Outermost((LOCAL | OF_ALL | NONE)[name])), given)
    assert tape.reading.mixing == (() if name in NONE else ITSELF)
    assert tape.paths().by_length == [1, 4, 4]


@pytest.mark.parametrize("name", [*LOCAL, *OF_ALL, *NONE])
def test_what_mixes_tokens_behind_layers_is_the_module_itself(name):
    module = drawn(Outermost((LOCAL | OF_ALL | NONE)[name], before=False))
    assert record(module, states("apart", 9)).reading.mixing == (() if name in NONE else ITSELF)


class Pool(nn.Module):
    """A sum of all tokens, weighted by a softmax over them that a submodule makes."""

    def __init__(self):
        super().__init__()
        self.layer, self.scores, self.softmax = Sequence(Attention(by_kernel)), nn.Linear(D, 1), nn.Softmax(1)

    def forward(self, x):
        x = self.layer(x)
        return (self.softmax(self.scores(x)).mT @ x).squeeze(1)


def test_a_softmax_over_tokens_that_pools_them_is_no_mixing():
    assert record(drawn(Pool()), states("apart", 9)).reading.mixing == ()


READ_OUT = {
    "mean": lambda x: x.mean(1),
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
    "largest": lambda x: x.amax(1),
    "all tokens": lambda x: x,
}


@pytest.mark.parametrize("read_out", READ_OUT)
@pytest.mark.parametrize("name", [None, "a convolution"])
def test_a_read_out_of_tokens_is_no_mixing_and_a_convolution_before_it_is(name, read_out):
    function = (lambda m, x: x) if name is None else LOCAL[name]
    module = drawn(Outermost(function, before=False, read_out=READ_OUT[read_out]))
    assert record(module, states("apart", 9)).reading.mixing == (() if name is None else ITSELF)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_tokens_mixed_by_a_graph_that_is_an_input_are_named(is_weighted):
    graph = (random("graph", B, 9, 9) > 0).double() * (random("weights", B, 9, 9).exp() if is_weighted else 1)
    module = drawn(Outermost(lambda m, x, graph: x + (graph @ m.map(x)).relu()))
    assert record(module, states("apart", 9), graph).reading.mixing == ITSELF


class Stem(nn.Module):
    """Patches, and positions that a convolution of them makes, as in CPVT."""

    def __init__(self, size):
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, D, 4, 4), nn.Conv2d(D, D, size, padding=size // 2, groups=D)

    def forward(self, x):
        x = self.patches(x)
        return (x + self.positions(x)).flatten(2).mT


@pytest.mark.parametrize("mix", [written_out, by_kernel])
@pytest.mark.parametrize("size", [1, 3])
def test_patches_that_a_stem_mixes_are_named(size, mix):
    images = random("images", B, 3, 32, 32)
    outer = nn.Sequential(Stem(size), Sequence(Attention(mix)))
    assert record(drawn(outer), images).reading.mixing == (() if size == 1 else ("0",))


def in_chunks(q, k, v, _, width=4):
    """Each block of tokens reads itself and both neighbours, as Longformer's chunks do."""

    def around(x):
        pad = F.pad(x, (0, 0, width, width))
        parts = [pad[:, :, start : start + x.shape[2]].unflatten(2, (-1, width)) for start in (0, width, 2 * width)]
        return torch.cat(parts, 3)

    return by_kernel(q.unflatten(2, (-1, width)), around(k), around(v), None).flatten(2, 3)


def dilated(q, k, v, _):
    """Each token reads itself and the tokens two places away."""
    keys, values = (F.pad(x, (0, 0, 2, 2)).unfold(2, 5, 1)[..., ::2] for x in (k, v))
    return torch.einsum("bhnm,bhnkm->bhnk", torch.einsum("bhnk,bhnkm->bhnm", q, keys).softmax(-1), values)


@pytest.mark.parametrize("mix", [in_chunks, dilated])
def test_windows_that_overlap_mix_no_tokens(mix):
    tape = record(drawn(Sequence(Attention(mix), Attention(mix))), states("apart", 16)[:2])
    assert tape.reading.mixing == ()
    assert tape.paths().by_length == [1, 4, 4]


def test_a_convolution_of_the_values_of_windows_is_named():
    """Which carries each token to several keys of one window."""
    parts = (Attention(lambda q, k, v, _: in_chunks(q, k, F.avg_pool2d(v, (3, 1), 1, (1, 0)), None)) for _ in "ab")
    assert record(drawn(Sequence(*parts)), states("apart", 16)).reading.mixing == ("parts.0", "parts.1")
