"""Path sums through the residual designs of today, against every path of a tiny network, one by one.

tests/every_path.py holds the brute force.

Shapes: B sequence, N token, D width, H head, K head width, S stream, E expert, L layer.
"""

from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from networks_of_others import (
    MLP,
    OWN,
    Attention,
    B,
    D,
    Experts,
    H,
    N,
    Sequence,
    by_kernel,
    drawn,
    heads_of,
    joined,
    states,
    written_out,
)
from path_checks import THREE, TWO, assert_every_path, assert_same_paths
from refusals import refusal
from torch import nn

from rankbench.tape import record

# --- the designs -----------------------------------------------------------------------------------------------------

S = 3


class HyperConnection(nn.Module):
    """Streams around a part, which reads a weighted sum of them and writes to each; a matrix mixes them.

    kind: static (Zhu et al. 2024); dynamic, in which tanh of the normed streams is added to each of these numbers; or
    doubly_stochastic (Xie et al. 2025): all of them are read from the streams, the matrix by Sinkhorn's steps.
    streams_first: the products are written with the streams as the left factor.
    """

    def __init__(self, part, kind, streams_first=False):
        super().__init__()
        self.part, self.kind, self.streams_first = part, kind, streams_first
        self.static = nn.Parameter(torch.zeros(S + 2, S))
        self.dynamic, self.norm = nn.Linear(S * D, (S + 2) * S), nn.LayerNorm(S * D)

    def numbers(self, x_BNSD):
        if self.kind == "static":
            return self.static.expand(*x_BNSD.shape[:2], -1, -1)
        read = self.dynamic(self.norm(x_BNSD.flatten(-2))).unflatten(-1, (S + 2, S))
        if self.kind == "dynamic":
            return self.static + 0.5 * read.tanh()
        matrix = (self.static[:S] + read[..., :S, :]).exp()
        for _ in range(20):
            matrix = matrix / matrix.sum(-2, keepdim=True)
            matrix = matrix / matrix.sum(-1, keepdim=True)
        return torch.cat([matrix, (self.static[S:] + read[..., S:, :]).sigmoid()], -2)

    def forward(self, x_BNSD):
        mix, read, write = self.numbers(x_BNSD).split([S, 1, 1], -2)
        if self.streams_first:
            y = self.part(torch.einsum("bnsd,bnrs->bnrd", x_BNSD, read)[..., 0, :])
            return torch.einsum("bnsd,bnrs->bnrd", x_BNSD, mix) + y[..., None, :] * write.mT
        y = self.part((read @ x_BNSD)[..., 0, :])
        return mix @ x_BNSD + write.mT * y[..., None, :]


class Streams(nn.Module):
    """Attention and MLPs with hyper-connections instead of skips."""

    def __init__(self, layers=2, **how):
        super().__init__()
        parts = [part for _ in range(layers) for part in (Attention(by_kernel), MLP())]
        self.parts = nn.ModuleList(HyperConnection(nn.Sequential(nn.LayerNorm(D), part), **how) for part in parts)

    def forward(self, x):
        x_BNSD = x[:, :, None].expand(-1, -1, S, -1)
        for part in self.parts:
            x_BNSD = part(x_BNSD)
        return x_BNSD.mean(2)


class DepthAttention(nn.Module):
    """Residuals by attention over depth: the input of each part, and the output, is a sum of the embedding and of all
    parts before, weighted by a softmax of a learned query times their norms."""

    def __init__(self, layers=3):
        super().__init__()
        self.parts = nn.ModuleList(part for _ in range(layers) for part in (Attention(by_kernel), MLP()))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in self.parts)
        self.queries = nn.Parameter(torch.zeros(len(self.parts) + 1, D))

    def read(self, outputs, query):
        x_LBND = torch.stack(outputs)
        weights_LBN = (F.rms_norm(x_LBND, (D,)) @ query).softmax(0)
        return (weights_LBN[..., None] * x_LBND).sum(0)

    def forward(self, x):
        outputs = [x]
        for part, norm, query in zip(self.parts, self.norms, self.queries[:-1], strict=True):
            outputs.append(part(norm(self.read(outputs, query))))
        return self.read(outputs, self.queries[-1])


class GatedOutput(Attention):
    """Attention with a sigmoid gate of each number of P v."""

    def __init__(self):
        super().__init__(by_kernel)
        self.gate = nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        return self.out(joined(self.mix(q, k, v, None)) * self.gate(x).sigmoid())


class GatedCell(nn.Module):
    """Attention whose result updates the state as in a GRU (Parisotto et al. 2020), with relu for tanh. last: whether
    the gates are the right factors of their products."""

    def __init__(self, last):
        super().__init__()
        self.attention, self.last = Attention(by_kernel), last
        self.of_result, self.of_state, self.of_reset = nn.Linear(D, 3 * D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def gated(self, x, gate):
        return x * gate if self.last else gate * x

    def forward(self, x):
        reset, update, new = self.of_result(self.attention(x)).chunk(3, -1)
        reset, update = (torch.cat([reset, update], -1) + self.of_state(x)).sigmoid().chunk(2, -1)
        new = F.relu(new + self.of_reset(self.gated(x, reset)))
        return self.gated(x, 1 - update) + self.gated(new, update)


class Cells(nn.Module):
    """Two gated cells, without norms."""

    def __init__(self, last):
        super().__init__()
        self.cells = nn.ModuleList(GatedCell(last) for _ in range(2))

    def forward(self, x):
        for cell in self.cells:
            x = cell(x)
        return x


class ValueResidual(nn.Module):
    """Layers whose values are mixed with those of the first (Zhou et al. 2024)."""

    def __init__(self, layers=3):
        super().__init__()
        self.attentions = nn.ModuleList(Attention(by_kernel) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(layers))
        self.shares = nn.Parameter(torch.zeros(layers))

    def forward(self, x):
        first = None
        for attention, norm, share in zip(self.attentions, self.norms, self.shares, strict=True):
            q, k, v = (heads_of(part(norm(x))) for part in (attention.q, attention.k, attention.v))
            first = v if first is None else first
            v = (1 - share) * v + share * first
            x = x + attention.out(joined(attention.mix(q, k, v, None)))
        return x


class WithLearnedSinks(Attention):
    """Attention with a learned logit of each head that takes a share of its rows."""

    def __init__(self):
        super().__init__(written_out)
        self.sinks = nn.Parameter(torch.zeros(H, 1, 1))

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        scores = torch.cat([q @ k.mT / q.shape[-1] ** 0.5, self.sinks.expand(B, -1, N, -1)], -1)
        return self.out(joined(scores.softmax(-1)[..., :-1] @ v))


class NormedQueries(Attention):
    """Attention whose queries and keys are normed."""

    def __init__(self):
        super().__init__(written_out)
        self.norms = nn.ModuleList(nn.LayerNorm(D // H) for _ in range(2))

    def forward(self, x):
        q, k, v = (heads_of(part(x)) for part in (self.q, self.k, self.v))
        return self.out(joined(self.mix(self.norms[0](q), self.norms[1](k), v, None)))


class RoutedExperts(Experts):
    """The two best of four experts of each token, which run for their own tokens alone."""

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        weights, out = weights / weights.sum(-1, keepdim=True), torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, token, place = (chosen == number).nonzero(as_tuple=True)
            out[row, token] += weights[row, token, place][:, None] * (F.gelu(x[row, token] @ up) @ down)
        return out


class StateSpace(nn.Module):
    """A selective scan, as in Mamba: h <- exp(-delta rate) h + delta b u for each token, y = c h, gated by silu(z)."""

    def __init__(self, by_einsum=True, size=4):
        super().__init__()
        self.by_einsum = by_einsum
        self.u, self.z, self.delta, self.out = (nn.Linear(D, D) for _ in range(4))
        self.b, self.c = nn.Linear(D, size), nn.Linear(D, size)
        self.rate = nn.Parameter(torch.zeros(D, size))

    def forward(self, x):
        u, z = self.u(x), self.z(x)
        delta, b, c = F.softplus(self.delta(u)), self.b(u), self.c(u)
        h, y = u.new_zeros(len(x), *self.rate.shape), []
        for t in range(x.shape[1]):
            step = delta[:, t, :, None]
            h = torch.exp(-step * self.rate.square()) * h + step * b[:, t, None] * u[:, t, :, None]
            y.append(torch.einsum("bds,bs->bd", h, c[:, t]) if self.by_einsum else (h * c[:, t, None]).sum(-1))
        return self.out(torch.stack(y, 1) * F.silu(z))


class Recurrence(Attention):
    """Linear attention as a recurrence: a state of each head adds k v^T of each token, which the query reads."""

    def __init__(self):
        super().__init__(self.token_by_token)

    @staticmethod
    def token_by_token(q, k, v, _):
        state, y = 0, []
        for t in range(q.shape[2]):
            state = state + k[:, :, t, :, None] * v[:, :, t, None, :]
            y.append(torch.einsum("bhkj,bhk->bhj", state, q[:, :, t]))
        return torch.stack(y, 2)


def stack(*parts):
    return drawn(Sequence(*parts))


def with_experts(kind):
    return stack(*(part for _ in range(2) for part in (Attention(by_kernel), kind())))


def hybrid(kind):
    return stack(Attention(by_kernel), kind(), Attention(by_kernel), kind(), Attention(written_out))


class Design(NamedTuple):
    """module(), its numbers of paths by length, and how `Held` reads it. maps: names of the maps in its scans."""

    module: object
    num_paths: list
    p: str = "softmax"
    maps: tuple = ()


AS_IN_REWRITES = ("residual streams", "gated heads", "sinks", "soft-capped logits", "router of experts")
AS_IN_REWRITES += ("attention beside the MLP",)
DESIGNS = {
    "hyper-connections": Design(lambda: drawn(Streams(3, kind="static")), THREE),
    "hyper-connections, dynamic": Design(lambda: drawn(Streams(kind="dynamic")), TWO),
    "hyper-connections, dynamic, streams first": Design(
        lambda: drawn(Streams(kind="dynamic", streams_first=True)), TWO
    ),
    "doubly stochastic": Design(lambda: drawn(Streams(kind="doubly_stochastic")), TWO),
    "doubly stochastic, streams first": Design(
        lambda: drawn(Streams(kind="doubly_stochastic", streams_first=True)), TWO
    ),
    "attention over depth": Design(lambda: drawn(DepthAttention()), THREE),
    "gated output": Design(lambda: stack(*(GatedOutput() for _ in range(3))), THREE),
    "gated cell": Design(lambda: drawn(Cells(last=False)), TWO),
    "gated cell, gates last": Design(lambda: drawn(Cells(last=True)), TWO),
    "value residual": Design(lambda: drawn(ValueResidual()), THREE),
    "learned sinks": Design(lambda: stack(WithLearnedSinks(), MLP(), WithLearnedSinks()), TWO),
    "normed queries": Design(lambda: stack(NormedQueries(), MLP(), NormedQueries()), TWO),
    "routed experts": Design(lambda: with_experts(RoutedExperts), TWO),
    "state space": Design(lambda: hybrid(StateSpace), THREE, maps=("b", "c")),
    "state space, product and sum": Design(lambda: hybrid(partial(StateSpace, False)), THREE, maps=("b", "c")),
    "recurrence": Design(lambda: hybrid(Recurrence), THREE, maps=("q", "k")),
    **{name: Design(OWN[name].module, TWO) for name in AS_IN_REWRITES},
    "values of an earlier layer": Design(OWN["values of an earlier layer"].module, [1, 4]),
    "linear attention": Design(OWN["linear attention"].module, TWO, "div"),
}


@pytest.mark.parametrize("name", DESIGNS)
def test_the_sums_of_each_length_are_those_of_every_path(name):
    design = DESIGNS[name]
    module = design.module()
    inputs = {"x": states()} if name not in OWN else OWN[name].inputs()
    scans = [layer for layer in module.modules() if isinstance(layer, (StateSpace, Recurrence))]
    maps = [getattr(scan, name) for scan in scans for name in design.maps]
    assert_every_path(module, inputs, design.num_paths, design.p, maps)


class Added(nn.Module):
    """A branch that is added by this function of the state, the branch and a vector."""

    def __init__(self, add):
        super().__init__()
        self.branch, self.share, self.add = Attention(written_out), nn.Parameter(torch.ones(D)), add

    def forward(self, x):
        return self.add(x, self.branch(x), self.share)


MIXED = lambda x, y, share: x + share * (y - x)  # noqa: E731
SCALED = lambda x, y, share: x + 2 * share * y  # noqa: E731
ADDED = {
    "lerp": (torch.lerp, MIXED),
    "lerp in place": (lambda x, y, share: x.clone().lerp_(end=y, weight=share), MIXED),
    "lerp by a gate": (
        lambda x, y, share: x.lerp(y, (share * x).sigmoid()),
        lambda x, y, share: MIXED(x, y, (share * x).sigmoid()),
    ),
    "addcmul": (lambda x, y, share: torch.addcmul(x, share, y, value=2), SCALED),
    "addcdiv": (lambda x, y, share: x.addcdiv(y, 1 / share, value=2), SCALED),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_call_that_is_several_others_is_read_as_these(name):
    networks = [drawn(nn.Sequential(*(Added(add) for _ in range(2)))) for add in ADDED[name]]
    assert_same_paths(*networks, states(), TWO)


class Normed(nn.Module):
    """Attention without a skip, and a norm with weight and bias."""

    def __init__(self, normed):
        super().__init__()
        self.attention, self.normed = Attention(by_kernel), normed
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))

    def forward(self, x):
        return self.normed(self.attention(x), self.weight, self.bias)


NORMS = (
    lambda x, weight, bias: F.layer_norm(x, (D,), weight, bias),
    lambda x, weight, bias: F.layer_norm(x, (D,)) * weight + bias,
    lambda x, weight, bias: F.group_norm(x.flatten(0, 1), 1, weight, bias).view_as(x),
)


def test_a_bias_begins_no_path_however_its_norm_is_written():
    first, *others = (drawn(nn.Sequential(*(Normed(normed) for _ in range(2)))) for normed in NORMS)
    for other in others:
        assert_same_paths(other, first, states(), [0, 0, 4])


def test_positions_begin_a_path():
    module = drawn(Normed(lambda x, weight, bias: x + torch.outer(weight[:N], bias)))
    assert record(module, states()).paths().by_length == [1, H]


def test_a_scan_alone_is_refused():
    message = refusal(record, stack(StateSpace(), Recurrence()), x=states())
    assert "Sequence: made no attention call that the tape knows" in message
