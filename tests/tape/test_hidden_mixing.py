"""Attention that was once let in and not seen, or whose heads were miscounted: right against every path, or refused.

Shapes: B sequence, N token, M key token, D width, H head, K head width.
"""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from every_path import NO_PATH
from networks_of_others import (
    MLP,
    Attention,
    B,
    D,
    H,
    N,
    Residual,
    Sequence,
    by_kernel,
    drawn,
    flattened,
    heads_of,
    joined,
    states,
    written_out,
)
from path_checks import THREE, TWO, assert_every_path, assert_same_paths
from refusals import refusal
from torch import nn

from rankbench.tape import record


def scores_of(q, k):
    return q @ k.mT / q.shape[-1] ** 0.5


def distances(q, k):
    return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


class Weighted(Attention):
    """Attention whose P is made of queries and keys."""

    def __init__(self, weights):
        super().__init__(lambda q, k, v, _: weights(q, k) @ v)


# --- weights that no softmax of a product made ------------------------------------------------------------------------

CAUSAL = torch.full((N, N), -torch.inf).triu(1)

TEMPERATURE = nn.Parameter(torch.tensor(0.3, dtype=torch.float64), requires_grad=False)


def by_logarithms(q, k):
    """A softmax less half of that of the negative scores, both from logarithms."""
    scores = scores_of(q, k)
    p = scores.log_softmax(-1).exp() - 0.5 * (-scores - (-scores).logsumexp(-1, keepdim=True)).exp()
    return p.clone()


def scaled_scores(q, k):
    """Scores times a temperature, which is kept as its logarithm, over their sum."""
    scores = scores_of(q, k) * TEMPERATURE.exp()
    return scores / scores.abs().sum(-1, keepdim=True)


# P, and the function whose results `Held` holds
WEIGHTS = {
    "difference of softmaxes by logarithms": (by_logarithms, "clone"),
    "scores": (lambda q, k: scores_of(q, k).clone(), "clone"),
    "scaled scores": (scaled_scores, "div"),
    "the largest score": (lambda q, k: F.one_hot(scores_of(q, k).argmax(-1), N).to(q.dtype), "one_hot"),
    "scores above 0": (lambda q, k: (scores_of(q, k) > 0).to(q.dtype) / N, "gt"),
    "whole numbers": (lambda q, k: (127 * scores_of(q, k).sigmoid()).to(torch.int8).to(q.dtype) / N / 127, "sigmoid"),
    "sigmoid of distances": (lambda q, k: (1 - distances(q, k)).sigmoid() / N, "sigmoid"),
    "exponentials of distances": (lambda q, k: (-0.1 * distances(q, k)).exp() / N, "exp"),
    "softmax of distances": (lambda q, k: (-distances(q, k)).softmax(-1), "softmax"),
    "softmax that no change moves": (lambda q, k: (-1e4 * distances(q, k)).softmax(-1), "softmax"),
    "masked softmax of distances": (lambda q, k: (CAUSAL - 1e4 * distances(q, k)).softmax(-1), "softmax"),
    "the three nearest": (
        lambda q, k: (distances(q, k) <= distances(q, k).kthvalue(3, -1, keepdim=True).values).to(q.dtype) / 3,
        "le",
    ),
    "indices of the three nearest": (
        lambda q, k: torch.zeros_like(scores_of(q, k)).scatter(-1, (-torch.cdist(q, k)).topk(3).indices, 1 / 3),
        "scatter",
    ),
    "additive": (lambda q, k: (q[..., :, None, :] + k[..., None, :, :]).tanh().sum(-1).softmax(-1), "softmax"),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_no_softmax_of_a_product_made_are_weights(name):
    weights, p = WEIGHTS[name]
    assert_every_path(drawn(Sequence(Weighted(weights), MLP(), Weighted(weights))), {"x": states()}, TWO, p)


@pytest.mark.parametrize("weights", [WEIGHTS["the largest score"][0], WEIGHTS["sigmoid of distances"][0]])
def test_they_are_weights_between_layers_of_softmax_attention(weights):
    module = drawn(Sequence(Attention(written_out), Weighted(weights), Attention(by_kernel)))
    assert record(module, x=states()).paths().by_length == THREE


# --- heads that the touch hardly reaches ------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", [written_out, by_kernel, flattened])
@pytest.mark.parametrize("maps", ["v", "qk", "qkv"])
@pytest.mark.parametrize("pruned", [[0], [1, 3], [1, 2, 3]])
@pytest.mark.parametrize("factor", [0.0, 1e-3])
def test_pruned_and_weak_heads_are_heads(mix, maps, pruned, factor):
    module = drawn(Sequence(*(Attention(mix, heads=4) for _ in range(2))))
    for layer in module.parts:
        for name in maps:
            for parameter in getattr(layer, name).parameters():
                parameter.unflatten(0, (4, -1))[pruned] *= factor
    tape = record(module, x=states())
    assert tape.paths().by_length == [1, 8, 16]
    assert [call.lead.heads for call in tape.reading.calls] == [4, 4]


@pytest.mark.parametrize("sequences", [1, 4])
def test_flattened_heads_of_one_token_are_heads(sequences):
    module = drawn(Sequence(*(Attention(flattened) for _ in range(2))))
    assert record(module, x=states()[:sequences, :1]).paths().by_length == TWO


class OfSlices(nn.Module):
    """Each head reads its own slice of the state, without a norm in front."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(D // H, D // H) for _ in range(3))

    def forward(self, x):
        x = heads_of(x)
        return joined(written_out(self.q(x), self.k(x), self.v(x), None))


def with_shifted_values(mix):
    """The values of one head are those of the token before."""
    return lambda q, k, v, _: mix(q, k, torch.cat([v[:, :1], F.pad(v[:, 1:], (0, 0, 1, -1))], 1), None)


@pytest.mark.parametrize("mix", [None, written_out, by_kernel])
def test_heads_of_their_own_features_or_tokens_are_heads(mix):
    parts = (OfSlices() if mix is None else Attention(with_shifted_values(mix)) for _ in range(2))
    tape = record(drawn(Residual(*parts)), states())
    assert [call.lead.heads for call in tape.reading.calls] == [H, H]
    assert tape.paths().by_length == ([1, 4, 2] if mix is None else TWO)


class ByDistance(nn.Module):
    """A module for each head, whose P is that of distances while queries are zero."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleDict({x: nn.Linear(D, D // H) for x in "qkv"}) for _ in range(H))

    def forward(self, x):
        here = torch.arange(x.shape[1])
        bias = -0.5 * (here[:, None] - here).abs()
        each = ((part["q"](x), part["k"](x), part["v"](x)) for part in self.heads)
        return torch.cat([(q @ k.mT + bias).softmax(-1) @ v for q, k, v in each], -1)


def test_fresh_heads_of_equal_weights_are_apart():
    module = drawn(Residual(ByDistance(), ByDistance()))
    for layer in module:
        for part in layer.heads:
            part["q"].weight.zero_()
            part["q"].bias.zero_()
    assert record(module, states()).paths().by_length == TWO


# --- inputs that no small change reaches ------------------------------------------------------------------------------


class Read(nn.Module):
    """Attention behind a function of the inputs."""

    def __init__(self, read, mix):
        super().__init__()
        self.read, self.map, self.table = read, nn.Linear(4, D), nn.Embedding(20, D)
        self.body = Sequence(Attention(mix), MLP(), Attention(mix))

    def forward(self, x):
        return self.body(self.read(self, x))


def integers(*shape, most=20):
    return torch.randint(most, shape, generator=torch.Generator().manual_seed(0))


INPUTS = {
    "one-hot floats": (lambda m, x: m.map(x), F.one_hot(integers(B, N, most=4), 4).double()),
    "pixels": (lambda m, x: m.map(x.double() / 255), integers(B, N, 4, most=255).to(torch.uint8)),
    "truth values": (lambda m, x: m.map(x.double()), integers(B, N, 4, most=2).bool()),
    "four codes of a token": (lambda m, x: sum(m.table(codes) for codes in x.unbind(-1)), integers(B, N, 4)),
    "tokens as floats": (lambda m, x: m.table(x.long()), integers(B, N).double()),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_are_exchanged_where_no_touch_arrives(name):
    read, x = INPUTS[name]
    tape = record(drawn(Read(read, flattened)), x)
    assert tape.paths().by_length == TWO
    assert all(call.is_sure for call in tape.reading.calls)


class Decoder(nn.Module):
    """States that attend to themselves, then to a memory, which comes first."""

    def __init__(self, mix):
        super().__init__()
        self.own, self.cross = Attention(mix), Attention(mix)

    def forward(self, memory, x):
        x = x + self.own(x)
        return x + self.cross(x, memory)


class ShiftedTargets(nn.Module):
    """An encoder and a decoder, whose tokens are those of the encoder, shifted by one."""

    def __init__(self, mix):
        super().__init__()
        self.table, self.encoder, self.decoder = nn.Embedding(7, D), Attention(mix), Decoder(mix)

    def forward(self, tokens):
        shifted = tokens.new_zeros(tokens.shape)
        shifted[:, 1:] = tokens[:, :-1].clone()
        return self.decoder(self.encoder(self.table(tokens)), self.table(shifted))


@pytest.mark.parametrize("mix", [flattened, written_out])
def test_targets_that_are_put_together_inside_are_tokens(mix):
    reading = record(drawn(ShiftedTargets(mix)), integers(B, N, most=7)).reading
    assert [call.lead.heads for call in reading.calls] == [H] * 3
    assert [call.is_cross for call in reading.calls] == [False, False, True]
    assert not reading.mixing


# --- gates ------------------------------------------------------------------------------------------------------------


class LinearGate(Attention):
    """P v times a map of the state, number by number."""

    def __init__(self, times):
        super().__init__(by_kernel)
        self.gate, self.times = nn.Linear(D, D), times

    def forward(self, x):
        y, gate = joined(self.mix(*(heads_of(part(x)) for part in (self.q, self.k, self.v)), None)), self.gate(x)
        return self.out(self.times(y, gate))


TIMES = {
    "on the left": lambda y, gate: gate * y,
    "by an einsum": lambda y, gate: torch.einsum("bnd,bnd->bnd", y, gate),
    "by an einsum, on the left": lambda y, gate: torch.einsum("bnd,bnd->bnd", gate, y),
}


@pytest.mark.parametrize("name", TIMES)
def test_a_gate_is_frozen_on_either_side(name):
    one, other = (drawn(Sequence(*(LinearGate(times) for _ in range(2)))) for times in (torch.mul, TIMES[name]))
    assert_same_paths(one, other, states(), TWO)


# --- refused ----------------------------------------------------------------------------------------------------------


def by_a_script(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def scripted():
    function = torch.jit.script(by_a_script)
    return Attention(lambda q, k, v, _: function(q, k, v))


def by_numpy(q, k, v, _):
    q, k, v = (x.numpy() for x in (q, k, v))
    powers = np.exp(q @ k.swapaxes(-2, -1))
    return torch.from_numpy(powers / powers.sum(-1, keepdims=True) @ v)


def in_segments(q, k, v, _):
    parts = zip(*(x.split([2, N - 2], 2) for x in (q, k, v)), strict=True)
    return torch.cat([by_kernel(*part, None) for part in parts], 2)


def in_blocks_of_keys(q, k, v, _):
    p = scores_of(q, k).softmax(-1)
    return sum(some @ values for some, values in zip(p.split(3, -1), v.split(3, 2), strict=True))


class Folded(nn.Module):
    """Heads that share keys stand among the queries."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // H), nn.Linear(D, D // H)

    def forward(self, x):
        q = self.q(x).view(B, N * H, -1)
        return written_out(q, self.k(x), self.v(x), None).view(x.shape)


class WithABias(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True, add_bias_kv=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def by_tensordot(q, k, v, _):
    each = zip(*(x.flatten(0, 1) for x in (scores_of(q, k).softmax(-1), v)), strict=True)
    return torch.stack([torch.tensordot(p, values, dims=1) for p, values in each]).view_as(v)


def by_one_einsum(q, k, v, _):
    return torch.einsum("bhnd,bhmd,bhme->bhne", q, k, v) / N


@torch.library.custom_op("rankbench_tests::attention", mutates_args=())
def by_an_operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scores_of(q, k).softmax(-1) @ v


def by_a_private_kernel(q, k, v, _):
    return torch._scaled_dot_product_attention_math(q, k, v)[0]


def by_gather(q, k, v, _):
    largest = scores_of(q, k).argmax(-1)[..., None]
    return v.gather(-2, largest.expand(*largest.shape[:-1], v.shape[-1]))


def by_index(q, k, v, _):
    return torch.take_along_dim(v, scores_of(q, k).max(-1, keepdim=True).indices, -2)


def by_shifts(q, k, v, _):
    shifted = [[F.pad(x, (0, 0, shift, -shift)) for shift in range(3)] for x in (k, v)]
    p = torch.stack([(q * keys).sum(-1) for keys in shifted[0]], -1).softmax(-1)
    return sum(p[..., shift, None] * values for shift, values in enumerate(shifted[1]))


class MixtureOfLayers(nn.Module):
    """Each token reads the states that it had: with weights of its own alone, which is no attention."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(Attention(by_kernel) for _ in range(2))
        self.query = nn.Linear(D, D)

    def forward(self, x):
        states = [x]
        for part in self.parts:
            states.append(states[-1] + part(states[-1]))
        p = torch.stack([(self.query(states[-1]) * each).sum(-1) for each in states], -1).softmax(-1)
        return sum(p[..., layer, None] * each for layer, each in enumerate(states))


class Quantised(Attention):
    """Each state is replaced by a row of a table."""

    def __init__(self):
        super().__init__(by_kernel)
        self.table = nn.Embedding(12, D)

    def forward(self, x):
        x = x + super().forward(x)
        return self.table((x[..., None, :] - self.table.weight).square().sum(-1).argmin(-1))


REFUSED = {
    "tensordot": (lambda: Attention(by_tensordot), "tensordot .*is not covered, and may be attention"),
    "an einsum of three activations": (
        lambda: Attention(by_one_einsum),
        "einsum .*is not covered, and may be attention",
    ),
    "an operator": (
        lambda: Attention(lambda q, k, v, _: by_an_operator(q, k, v)),
        "is not covered, and may be attention",
    ),
    "torch's own kernel": (lambda: Attention(by_a_private_kernel), "is not covered, and may be attention"),
    "TorchScript": (scripted, "no recorded call made"),
    "numpy": (lambda: Attention(by_numpy), "no recorded call made"),
    "the value of the largest score": (lambda: Attention(by_gather), "gather .*the tokens of the largest scores"),
    "its index": (lambda: Attention(by_index), "take_along_dim .*the tokens of the largest scores"),
    "one shift after the other": (
        lambda: Attention(by_shifts),
        "mul .*weighs states with a softmax that depends",
    ),
    "segments of unequal length": (lambda: Attention(in_segments), "written as a loop"),
    "blocks of keys": (lambda: Attention(in_blocks_of_keys), "one softmax in blocks of keys"),
    "heads among the queries": (Folded, "2 queries for each token"),
    "a bias of keys": (WithABias, "bias_k, bias_v"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_hides_attention_in_the_first_layer_is_refused(name):
    build, message = REFUSED[name]
    assert re.search(message, refusal(record, drawn(Sequence(build(), MLP(), Attention(by_kernel))), states()))


def test_a_mixture_of_the_states_of_a_token_is_no_attention():
    tape = record(drawn(Sequence(MixtureOfLayers(), Attention(by_kernel))), states(), begin="inputs")
    assert [call.lead.heads for call in tape.reading.calls] == [H, H, H]
    assert tape.sums().remainder < NO_PATH


def test_codes_of_states_pass_no_paths():
    tape = record(drawn(Sequence(Quantised(), MLP(), Attention(by_kernel))), states())
    assert "argmin in parts.0: not covered" in refusal(tape.paths)
