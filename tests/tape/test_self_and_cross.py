"""Attention to its own tokens or to others: called alike in every layer, whatever is added to the tokens and in
whatever order inputs are given.

Shapes: B sequence, N token, D width.
"""

import pytest
import torch
from networks_of_others import Attention, D, by_kernel, drawn, states, written_out
from torch import nn

from rankbench.tape import record

T = 16  # tokens


class OfTwo(nn.Module):
    """Two layers of attention to what `read` makes of a state and a second input, by the number of the layer."""

    def __init__(self, read, is_first):
        super().__init__()
        self.layers = nn.ModuleList(Attention(by_kernel) for _ in range(2))
        self.read, self.is_first = read, is_first

    def forward(self, *inputs):
        x, other = inputs if self.is_first else inputs[::-1]
        for number, layer in enumerate(self.layers):
            x = x + layer(*self.read(x, other, number))
        return x


# what queries and keys are made of: x alone, other alone, or both; whether that is attention to other tokens
READ = {
    "keys of a sum": (lambda x, other, _: (x, x + other), T, False),
    "queries of a sum": (lambda x, other, _: (x + other, x), T, False),
    "keys of a sum in the first layer": (lambda x, other, number: (x, x if number else x + other), T, False),
    "keys of both": (lambda x, other, _: (x, torch.cat([x, other], 1)), T, False),
    "keys of both, the other in front": (lambda x, other, _: (x, torch.cat([other, x], 1)), T, False),
    "keys of both, the other shorter": (lambda x, other, _: (x, torch.cat([x, other], 1)), 9, False),
    "keys of the other": (lambda x, other, _: (x, other), T, True),
    "keys of the other, shorter": (lambda x, other, _: (x, other), 9, True),
}


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", READ)
def test_tokens_to_which_another_input_is_added_are_their_own(name, is_first):
    read, tokens, is_cross = READ[name]
    inputs = states("state", T), states("other", tokens)
    reading = record(drawn(OfTwo(read, is_first)), *(inputs if is_first else inputs[::-1])).reading
    assert [call.is_cross for call in reading.calls] == [is_cross] * 2
    assert not reading.mixing


class OfFewer(nn.Module):
    """States that read themselves, then the half as many that something else makes of a second input."""

    def __init__(self, halved):
        super().__init__()
        self.own, self.cross = (nn.ModuleList(Attention(by_kernel) for _ in range(2)) for _ in range(2))
        self.parts = nn.ModuleList([halved])

    def forward(self, x, other):
        memory = self.parts[0](other)
        for own, cross in zip(self.own, self.cross, strict=True):
            x = x + own(x)
            x = x + cross(x, memory)
        return x


class Halved(nn.Module):
    """Half as many states: by a convolution, by means, or side by side."""

    def __init__(self, name):
        super().__init__()
        self.convolution, self.map, self.name = nn.Conv1d(D, D, 3, 2, 1), nn.Linear(2 * D, D), name

    def forward(self, x):
        if self.name == "side by side":
            return self.map(x.unflatten(1, (-1, 2)).flatten(2))
        return (self.convolution(x.mT) if self.name == "convolution" else nn.functional.avg_pool1d(x.mT, 2)).mT


@pytest.mark.parametrize("name", ["convolution", "means", "side by side"])
@pytest.mark.parametrize("tokens", [8, 10, 12, 14, 16, 18, 20])
def test_other_tokens_that_are_touched_at_the_same_index_are_others(name, tokens):
    """As in encoders of sound."""
    reading = record(drawn(OfFewer(Halved(name))), states("state", 9), states("other", tokens)).reading
    assert [call.is_cross for call in reading.calls] == [False, True] * 2


class Learned(nn.Module):
    """Learned tokens that read themselves and a memory: in one call, as in Flamingo, or in two, as in DETR."""

    def __init__(self, number, together, mix):
        super().__init__()
        self.tokens, self.together = nn.Parameter(torch.zeros(number, D)), together
        self.own, self.cross = (nn.ModuleList(Attention(mix) for _ in range(2)) for _ in range(2))

    def forward(self, memory):
        x = self.tokens.expand(len(memory), -1, -1)
        for own, cross in zip(self.own, self.cross, strict=True):
            if self.together:
                x = x + own(x, torch.cat([memory, x], 1))
            else:
                x = x + own(x)
                x = x + cross(x, memory)
        return x


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("together", [False, True])
def test_learned_tokens_are_named_alike_in_the_first_layer_and_the_next(number, together):
    """No input reaches them before they have read the memory."""
    calls = record(drawn(Learned(number, together, by_kernel)), states("memory", T)).reading.calls
    names = [(call.call.module.split(".")[0], bool(call.is_cross)) for call in calls]
    assert names == ([("own", False)] if together else [("own", False), ("cross", True)]) * 2


class Latent(Learned):
    """Learned tokens that read a memory, then themselves, as in Perceiver."""

    def forward(self, memory):
        x = self.tokens.expand(len(memory), -1, -1)
        for own, cross in zip(self.own, self.cross, strict=True):
            x = x + cross(x, memory)
            x = x + own(x)
        return x


@pytest.mark.parametrize("mix", [by_kernel, written_out])
@pytest.mark.parametrize("number", [9, T])
def test_learned_tokens_that_read_as_many_others_mix_none(number, mix):
    assert record(drawn(Latent(number, False, mix)), states("memory", T)).reading.mixing == ()
