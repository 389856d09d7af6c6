"""rankbench.tape against rankbench.measures.frozen_network, every path one by one, the same module written in another
way, and the modules' own results.

Shapes: K slot, B batch, H head, N query token, M key token, D width.
"""

import gc
import itertools
import math
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from drawn import generator, normal, randomised, transformer
from networks_of_others import (
    NETWORKS,
    Attention,
    B,
    D,
    H,
    N,
    Residual,
    by_kernel,
    encoder,
    heads_of,
    joined,
    states,
)
from path_checks import THREE, TWO, assert_every_path, assert_same_paths
from rewrites import written_out
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rankbench.config.keys import ConfigError
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length, sums_through_heads
from rankbench.tape import record, tap
from rankbench.tape.read import read
from rankbench.tape.rules import RULES
from rankbench.tape.tags import Kind, Tag, Tags

# Float64, a few hundred additions: eps = 2.2e-16, so 1e-12 of the largest part leaves a margin of ten to a hundred.
ROUNDING = 1e-12

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensor.*:UserWarning")


def drawn(module, seed=0, scale=0.4):
    """The module in float64 with every parameter drawn: no bias stays 0, no norm's scale 1."""
    return randomised(module.eval(), generator(seed), scale).requires_grad_(False)


def close(got, wanted, scale=None):
    assert got.shape == wanted.shape
    atol = ROUNDING * (wanted if scale is None else scale).abs().max().item()
    torch.testing.assert_close(got, wanted, rtol=0, atol=atol)


# --- our own Transformer ---------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """A Transformer between its embedding and its read-out, where rankbench.measures.frozen_network begins and ends."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        for sublayer in self.model.sublayers:
            x = sublayer(x, kernel="fused")
        return x if self.model.last_norm is None else self.model.last_norm(x)


def own_network(num_tokens=4, **changes):
    model = drawn(transformer(**{"layers": 3, "mlp_ratio": 1.5, "length": num_tokens, **changes}))
    return model, torch.randint(7, (2, num_tokens), generator=generator(2))


VARIANTS = [
    {},
    {"skip": False},
    {"mlp": False},
    {"mlp_skip": False},
    {"activation": "gelu", "skip_scale": 0.7, "branch_scale": 0.5},
    {"bias": False, "mask": "causal"},
    {"mask": "window", "window": 1},
    {"attention": "l2", "tied_qk": True},
    {"attention": "contractive_l2", "tied_qk": True, "contraction": 1.0},
    {"attention": "cosine"},
    {"mix_identity": 0.3, "mix_uniform": 0.2},
    {"shared_layers": True},
    {"kv_groups": 1},
    {"latent_width": 3},
    {"weight_norm": "sigma"},
]


KINDS = [("none", "layernorm"), *itertools.product(("pre", "post"), ("layernorm", "rmsnorm", "l2norm"))]
QUICK = {("none", "layernorm", 4), ("post", "layernorm", 4), ("pre", "rmsnorm", 97), ("post", "l2norm", 4)}
PLACES = [(*kind, num_tokens) for kind in KINDS for num_tokens in (4, 97)]  # 97 tokens take the fused kernel


@pytest.mark.further
@pytest.mark.parametrize(
    ("norm", "kind", "num_tokens"),
    [pytest.param(*place, marks=() if place in QUICK else pytest.mark.slow) for place in PLACES],
)
def test_agrees_with_the_path_sums_of_our_own_transformer(norm, kind, num_tokens):
    for changes in [*VARIANTS, {"attention": "gated"}]:
        layers = 3 if kind == "layernorm" else 2
        model, tokens = own_network(num_tokens, norm=norm, norm_kind=kind, layers=layers, **changes)
        wanted = sums_by_length(model, tokens)
        tape = record(Blocks(model), model.embed(tokens), begin="inputs")
        sums = tape.sums()
        # without skips nothing is shorter than the network, and the tape knows of no longer paths than there are
        assert len(sums.by_length_KBND) == len(wanted.by_length_KBND), changes
        close(sums.by_length_KBND, wanted.by_length_KBND, wanted.state_BND)
        close(sums.bias_BND, wanted.bias_BND, wanted.state_BND)
        assert sums.remainder < ROUNDING
        through = torch.stack([part.sums for part in tape.through_heads()])
        by_hand = sums_through_heads(FrozenNetwork(model, tokens))
        close(through, by_hand, wanted.state_BND)


def test_biases_of_rankbench_paths_are_paths_of_their_own_in_slot_0():
    """What `begin` sets apart as a bias is, without it, spread over the slots by the heads that it passes."""
    model, tokens = own_network(norm="post")
    x = model.embed(tokens)
    apart, together = record(Blocks(model), x, begin="inputs").sums(), record(Blocks(model), x).sums()
    spread = together.by_length_KBND - apart.by_length_KBND
    close(spread.sum(0), apart.bias_BND, together.state_BND)
    assert (spread.flatten(1).norm(dim=1) > 1e-3 * apart.bias_BND.norm()).all()


# --- every path, one by one -------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Written out with rsqrt, as language models have it."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class StrangersLayer(nn.Module):
    """Attention by hand with causal weights, RMSNorm by hand, a gated MLP, biases, and a residual scaling."""

    def __init__(self, width, heads, hidden=7):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, hidden), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def attend(self, x):
        q, k, v = (heads_of(part, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        p = F.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return self.out((p @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attend(self.attention_norm(x))
        read = self.mlp_norm(x)
        return 0.5 * x + self.down(F.silu(self.gate(read)) * self.up(read))


def strangers(layers=3):
    return nn.Sequential(*(drawn(StrangersLayer(D, H), seed) for seed in range(layers)))


def test_a_strangers_module_has_the_sums_of_every_path():
    assert_every_path(strangers(), {"input": states()}, THREE)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_torchs_own_encoder_has_the_sums_of_every_path(activation, norm_first, is_causal):
    """For the brute force its attention is written out."""
    module, other = (drawn(encoder(activation=activation, norm_first=norm_first)) for _ in range(2))
    inputs = {"src": states(), "mask": HIDDEN if is_causal else None}
    assert_every_path(module, inputs, TWO, written=written_out(other))


# a module, and of one of its layers the biases of queries, keys and values, and the way out
VALUE_BIASES = {
    "written out": (strangers, lambda layer: (layer.qkv.bias, layer.out)),
    "torch's own": (
        lambda: drawn(nn.Sequential(*encoder().layers)),
        lambda layer: (layer.self_attn.in_proj_bias, layer.self_attn.out_proj),
    ),
}


@pytest.mark.parametrize("name", VALUE_BIASES)
def test_value_biases_of_the_source_are_those_of_the_way_out(name):
    """The rows of P sum to 1, so that P (x W + 1 b) W_O is P x W W_O + 1 b W_O."""
    make, parts = VALUE_BIASES[name]
    module, folded = make(), make()
    for layer in folded:
        bias, out = parts(layer)
        out.bias += out.weight @ bias[2 * D :]
        bias[2 * D :] = 0
    wanted = record(folded, states()).sums()
    close(record(module, states()).sums(value_biases="source").by_length_KBND, wanted.by_length_KBND)
    at_heads = record(module, states()).sums().by_length_KBND
    assert ((at_heads - wanted.by_length_KBND).flatten(1).norm(dim=1) > 1e-3).all()


def test_torchs_encoder_and_decoder_with_padding_and_without_a_batch():
    model = drawn(nn.Transformer(D, H, 2, 2, 11, batch_first=True))
    hidden = torch.zeros(B, N, dtype=torch.bool)
    hidden[0, 3:] = True
    causal = torch.full((N, N), -math.inf, dtype=torch.float64).triu(1)
    source, target = states("source"), states("target")
    masks = {"src_key_padding_mask": hidden, "memory_key_padding_mask": hidden, "tgt_mask": causal}
    tape = record(model, source, target, **masks)
    sums = tape.sums()
    assert (len(tape.reading.calls), sums.remainder < ROUNDING) == (6, True)
    # the longest path: two heads of the encoder, one of a cross-attention, one of the last self-attention
    assert len(sums.by_length_KBND) == 5
    close(sums.state_BND, model(source, target, **masks))
    alone = record(model, source[1], target[1], tgt_mask=causal).sums()
    close(alone.by_length_KBND, sums.by_length_KBND[:, 1], sums.state_BND)


# --- ways to write attention -----------------------------------------------------------------------------------------


def layers_of(mix, heads=H, groups=None):
    """Two layers of attention without norms."""
    return drawn(Residual(*(Attention(mix, heads, groups) for _ in range(2))))


def fused(**options):
    return lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, **options)


def plain(added=0.0, scale=(D // H) ** -0.5):
    """The formula: softmax of scores, times the values."""

    def mix(q, k, v, _):
        k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
        return (q @ k.mT * scale + added).softmax(-1) @ v

    return mix


HIDDEN = torch.zeros(N, N, dtype=torch.float64).masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -math.inf)
SLOPES = 0.3 * torch.arange(N, dtype=torch.float64).expand(H, N, N)
# options of torch's kernel, the formula, and the number of heads of keys
KERNELS = {
    "plain": ({}, plain(), H),
    "causal": ({"is_causal": True}, plain(HIDDEN), H),
    "bool mask": ({"attn_mask": HIDDEN == 0}, plain(HIDDEN), H),
    "float mask": ({"attn_mask": SLOPES}, plain(SLOPES), H),
    "scale": ({"scale": 0.9}, plain(scale=0.9), H),
    "shared keys": ({"enable_gqa": True}, plain(), 1),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_fused_kernel_has_the_paths_of_the_formula(name):
    options, formula, groups = KERNELS[name]
    assert_same_paths(*(layers_of(mix, groups=groups) for mix in (fused(**options), formula)), states(), TWO)


def by_einsum(q, k, v, _):
    p = torch.einsum("b h i d, b h j d -> b h i j", 0.5 * q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bhid", p, v)


def by_einsum_with_dots(q, k, v, _):
    p = torch.einsum("...hid,...hjd->...ijh", 0.5 * q, k).softmax(-2)
    return torch.einsum("...ijh,...hjd->...hid", p, v)


def by_einsums_of_three(q, k, v, _):
    """With tables that are known: a map in the middle of the scores, and one behind the values."""
    half, same = 0.5 * torch.eye(q.shape[-1], dtype=q.dtype), torch.eye(v.shape[-1], dtype=v.dtype)
    p = torch.einsum("bhid,de,bhje->bhij", q, half, k).softmax(-1)
    return torch.einsum("bhij,de,bhjd->bhie", p, same, v)


def by_baddbmm(q, k, v, _):
    shape, (q, k, v) = q.shape, (x.flatten(0, 1) for x in (q, k, v))
    p = torch.baddbmm(torch.zeros(1, dtype=q.dtype), q, k.mT, beta=0, alpha=0.5).softmax(-1)
    return torch.bmm(p, v).view(shape)


def by_keywords(q, k, v, _):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    p = (torch.bmm(q, mat2=k.mT) / 2).softmax(-1)
    return torch.bmm(p, mat2=v).unflatten(0, (-1, H))


def by_names_of_numpy(q, k, v, _):
    p = (q @ k.mT / 2).softmax(-1)
    return (p[..., None] * v[..., None, :, :]).sum(axis=-2, keepdims=True).squeeze(-2)


def divided_last(q, k, v, _):
    powers = torch.exp(q @ k.mT / 2)
    return powers @ v / powers.sum(-1, keepdim=True)


def with_changes_in_place(q, k, v, _):
    scores = torch.matmul(q, k.mT)
    scores /= 2
    p = F.dropout(scores.softmax(-1), 0.5, training=False)
    mixed = torch.zeros_like(v)
    mixed += p @ v
    return mixed.contiguous()


@pytest.mark.parametrize(
    "mix",
    [
        by_einsum, by_einsum_with_dots, by_einsums_of_three, by_baddbmm, by_keywords, by_names_of_numpy, divided_last,
        with_changes_in_place,
    ],
)  # fmt: skip
def test_attention_may_be_written_in_other_ways(mix):
    """tests/tape/test_rewrites.py has more of them."""
    assert_same_paths(layers_of(mix), layers_of(plain(scale=0.5)), states(), TWO)


def along_two_axes(q, k, v, _):
    q, k, v = (x.unflatten(1, (2, 2)) for x in (q, k, v))
    return ((q @ k.mT).softmax(-1) @ v).flatten(1, 2)


@pytest.mark.parametrize("mix", [by_baddbmm, by_einsum_with_dots, fused(), along_two_axes])
def test_heads_are_told_apart(mix):
    """by_baddbmm has them beside sequences."""
    module = layers_of(mix, heads=4)
    tape = record(module, states())
    sums = tape.sums()
    parts = [part.sums for part in tape.through_heads()]
    assert [len(part) for part in parts] == [4, 4]
    # each path of length k passes k heads
    _, once, twice = sums.by_length_KBND
    close(sum(part.sum(0) for part in parts), once + 2 * twice, sums.state_BND)
    # without a head's way out, its paths are gone
    module[1].out.weight[:, D // 4 : D // 2] = 0
    close(sums.state_BND - parts[1][1], module(states()), sums.state_BND)


# --- what else is covered --------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Attention, then a function of the state with a map of weights, then attention."""

    def __init__(self, function):
        super().__init__()
        self.function, self.attention = function, Residual(Attention(by_kernel), Attention(by_kernel))
        self.wide, self.narrow = nn.Linear(D, 2 * D), nn.Linear(D, D)
        self.kernel = nn.Conv1d(D, D, 3, padding=1)
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x):
        x = self.attention(x)
        return self.attention(x + self.function(self, x))


def standardised(x, power):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred**2).mean(-1, keepdim=True).add(1e-5) ** power


FUNCTIONS = {
    "relu in place": lambda m, x: m.narrow(F.relu(m.narrow(x), inplace=True)),
    "gelu": lambda m, x: m.narrow(F.gelu(m.narrow(x))),
    "gelu tanh": lambda m, x: m.narrow(F.gelu(m.narrow(x), approximate="tanh")),
    "gelu by hand": lambda m, x: m.narrow(0.5 * m.narrow(x) * (1 + torch.erf(m.narrow(x) / math.sqrt(2)))),
    "new gelu": lambda m, x: x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0)))),
    "quick gelu": lambda m, x: x * torch.sigmoid(1.702 * x),
    "silu": lambda m, x: F.silu(x),
    "tanh": lambda m, x: torch.tanh(x),
    "sigmoid": lambda m, x: m.narrow(torch.sigmoid(m.narrow(x))),
    "softplus": lambda m, x: F.softplus(x),
    "hardswish": lambda m, x: F.hardswish(x),
    "leaky relu": lambda m, x: F.leaky_relu(x, 0.1),
    "squared relu": lambda m, x: F.relu(x).square(),
    "swiglu": lambda m, x: F.silu(m.narrow(x)) * m.narrow(x),
    "geglu": lambda m, x: F.gelu(m.wide(x)[..., :D]) * m.wide(x)[..., D:],
    "glu": lambda m, x: F.glu(m.wide(x)),
    "keys and values first": lambda m, x: x @ (x.mT @ x),  # a product whose factors are frozen, not a head
    "bilinear": lambda m, x: m.narrow(x) * x,
    "layer_norm": lambda m, x: F.layer_norm(x, (D,), m.narrow.bias, m.narrow.weight[0]),
    "layer_norm without weights": lambda m, x: F.layer_norm(x, (N, D)),
    "rms_norm": lambda m, x: F.rms_norm(x, (D,), m.narrow.bias),
    "normalize": lambda m, x: F.normalize(x, dim=-1),
    "norm with a power": lambda m, x: standardised(x, 0.5),
    "norm with sqrt and var": lambda m, x: (x - x.mean(-1, True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
    "norm with var_mean": lambda m, x: (
        (x - torch.var_mean(x, dim=-1, keepdim=True)[1])
        * torch.rsqrt(torch.var_mean(x, dim=-1, keepdim=True)[0] + 1e-5)
    ),
    "norm with std": lambda m, x: m.narrow.bias * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6),
    "batch norm": lambda m, x: m.norm(x.transpose(1, 2)).transpose(1, 2),
    "conv1d": lambda m, x: m.kernel(x.mT).mT,
    "matmul": lambda m, x: x @ m.narrow.weight,
    "matmul from the left": lambda m, x: torch.eye(N, dtype=x.dtype).flip(0) @ x,
    "addmm": lambda m, x: torch.addmm(m.narrow.bias, x.flatten(0, 1), m.narrow.weight, alpha=0.3).view_as(x),
    "addmm by keywords": lambda m, x: torch.addmm(m.narrow.bias, mat1=x.flatten(0, 1), mat2=m.narrow.weight).view_as(x),
    "einsum": lambda m, x: torch.einsum("bnd,de->bne", x, m.narrow.weight),
    "cat and split": lambda m, x: torch.cat([*reversed(x.split([2, D - 2], dim=-1))], dim=-1),
    "class token": lambda m, x: torch.cat([m.narrow.bias.expand(B, 1, D), x], dim=1)[:, :-1],
    "where": lambda m, x: torch.where(torch.arange(D) < 3, x, m.narrow.bias),
    "masked_fill": lambda m, x: x.masked_fill(torch.arange(D) < 3, 0.7),
    "setitem": lambda m, x: put(x.clone()),
    "changes of a view put back": lambda m, x: add_to_first(x.clone()),
    "pool and unpool": lambda m, x: x.mean(1, keepdim=True).expand(B, N, D).cumsum(1),
    "roll": lambda m, x: torch.roll(x, 1, dims=1) - 2 + 3 / 4 - x / 3,
    "narrow from where a tensor says": lambda m, x: (
        x.narrow(1, torch.tensor(1), 1) + torch.tensor_split(x, torch.tensor([1, 2]), dim=1)[1]
    ),
    "index": lambda m, x: x[:, torch.arange(N).flip(0)],
    "pad": lambda m, x: F.pad(x, (1, 0))[..., :-1],
    "rsub": lambda m, x: 1 - torch.sub(x / 2, m.narrow.bias, alpha=0.5),
    "clamp": lambda m, x: x.clamp(min=-0.2, max=0.3),
    "clamp between tensors": lambda m, x: torch.clamp(x, -m.narrow.bias.abs(), m.narrow.bias.abs()),
    "prelu": lambda m, x: F.prelu(x.mT, m.narrow.bias).mT,
    "log of a sigmoid": lambda m, x: F.logsigmoid(x),
    "threshold": lambda m, x: F.threshold(x, 0.1, 0.5),
    "soft threshold": lambda m, x: F.softshrink(x, 0.1) + F.hardshrink(x, 0.1),
    "randomised relu": lambda m, x: F.rrelu(x),
    "sine and cosine": lambda m, x: torch.sin(x) ** 2 + torch.cos(2 * x) + x.atan(),
    "rounded": lambda m, x: torch.round(4 * x) / 4,
    "log(1 + relu)": lambda m, x: torch.log1p(F.relu(x)),
    "xielu": lambda m, x: torch.where(
        x > 0, 0.3 * x * x + 0.5 * x, 0.7 * (torch.expm1(torch.min(x, m.narrow.bias[0])) - x) + 0.5 * x
    ),
    "larger than a constant": lambda m, x: torch.maximum(m.narrow.bias, x),
    "larger of one number and constants": lambda m, x: torch.max(x.mean(-1, keepdim=True), m.narrow.bias),
    "larger of two": lambda m, x: torch.maximum(m.narrow(x), x),
    "group norm": lambda m, x: F.group_norm(x.flatten(0, 1), 4, m.narrow.bias, m.narrow.weight[0]).view_as(x),
    "group norm of tokens": lambda m, x: F.group_norm(x.mT, 4, m.narrow.bias).mT,
    "instance norm": lambda m, x: F.instance_norm(x.mT, weight=m.narrow.bias, bias=m.narrow.weight[0]).mT,
    "instance norm of a training": lambda m, x: (
        F.instance_norm(x.mT, m.narrow.bias, m.narrow.bias.exp(), use_input_stats=False).mT
    ),
    "GRU cell": lambda m, x: torch.gru_cell(
        m.narrow(x).flatten(0, 1), x.flatten(0, 1), *[m.narrow.weight.repeat(3, 1)] * 2, *[m.narrow.bias.repeat(3)] * 2
    ).view_as(x),
    "softmin of a gate": lambda m, x: F.softmin(m.narrow(x), -1) * x,
    "einsum of three": lambda m, x: torch.einsum("bnd,d,de->bne", x, m.narrow.bias, m.narrow.weight),
    "tensordot": lambda m, x: torch.tensordot(x, m.narrow.weight, dims=1),
    "mask of the state": lambda m, x: x * (x > 0),
    "gate of one number": lambda m, x: m.narrow.bias * torch.tanh(x.mean()),
    "scaled by the largest": lambda m, x: x / x.abs().amax(-1, keepdim=True),
    "experts": lambda m, x: sum(w * m.narrow(x) for w in m.wide(x).softmax(-1)[..., :2].unsqueeze(-2).unbind(-1)),
}


def put(x):
    x[:, 1] = 2 * x[:, 0]
    x[:, 2] = 3.0
    return x


def add_to_first(x):
    x[:, 0] += x[:, 1]
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_slots_of_covered_functions_sum_to_the_output(name):
    module = drawn(Between(FUNCTIONS[name]), scale=0.3)
    sums = record(module, states()).sums()
    assert torch.equal(sums.state_BND, module(states())) and sums.remainder < ROUNDING
    assert len(sums.by_length_KBND) == 5
    assert (sums.by_length_KBND.flatten(1).norm(dim=1) > 0).all()


SAME = {
    "clamp": (lambda m, x: x.clamp(max=0.2), lambda m, x: torch.minimum(x, torch.full_like(x, 0.2))),
    "relu": (lambda m, x: F.relu(x), lambda m, x: torch.maximum(x, torch.zeros_like(x))),
    "prelu": (lambda m, x: F.leaky_relu(x, 0.3), lambda m, x: F.prelu(x, torch.full_like(m.narrow.bias[:1], 0.3))),
    "layer norm": (lambda m, x: F.layer_norm(x, (D,)), lambda m, x: F.group_norm(x.flatten(0, 1), 1).view_as(x)),
}


@pytest.mark.parametrize("name", SAME)
def test_a_function_by_another_name_has_the_same_sums(name):
    assert_same_paths(*(drawn(Between(function), scale=0.3) for function in SAME[name]), states())


def test_what_is_frozen_and_on_which_side_is_listed():
    module = drawn(Between(FUNCTIONS["swiglu"]))
    frozen = record(module, states()).sums().frozen
    parts = [(each.call.function, each.call.module, each.part) for each in frozen]
    assert len(parts) == 5
    # the layers are called once before and once after the gate
    kernel = "torch.nn.functional.scaled_dot_product_attention"
    attention = [(kernel, f"attention.{layer}", "attention weights") for layer in range(2)]
    assert [*parts[:2], *parts[3:]] == 2 * attention
    function, where, part = parts[2]
    assert (function, where) == ("torch.Tensor.mul", "")
    assert part.startswith("left factor, of call") and part.endswith("torch.nn.functional.silu in the module itself")
    assert frozen[2].kind == "left factor, of torch.nn.functional.silu"


def test_the_gate_is_the_derivative_where_its_argument_is_zero():
    """relu and gelu at 0 as rankbench.measures.frozen_network has them: 0 and 1/2."""
    for activation in ("relu", "gelu"):
        model, tokens = own_network(norm="none", activation=activation)
        for block in model.blocks:
            block.mlp.up.weight[0], block.mlp.up.bias[0] = 0, 0
        sums = record(Blocks(model), model.embed(tokens), begin="inputs").sums()
        close(sums.by_length_KBND, sums_by_length(model, tokens).by_length_KBND, sums.state_BND)


# --- parts of a module -----------------------------------------------------------------------------------------------


def test_sums_of_the_part_up_to_a_submodule():
    layers = strangers()
    tape = record(layers, states())
    for index in range(3):
        wanted = record(layers[: index + 1], states()).sums()
        close(tape.sums(upto=str(index)).by_length_KBND, wanted.by_length_KBND)
    close(tape.sums(upto="0.attention_norm").by_length_KBND, layers[0].attention_norm(states())[None])


def test_sums_of_several_parts_are_those_of_each_part_alone():
    """In whatever order they are asked for, and twice if asked twice."""
    layers = strangers()
    tape = record(layers, states())
    places = ["1", lambda output: output, "0.attention_norm", ("0", 0), "1"]
    alone = [tape.sums() if callable(place) else tape.sums(upto=place) for place in places]
    order = []
    for number, sums in tape.sums_of_each(places):
        order.append(number)
        close(sums.by_length_KBND, alone[number].by_length_KBND)
        assert torch.equal(sums.state_BND, alone[number].state_BND) and sums.frozen == alone[number].frozen
        assert sums.remainder < ROUNDING
    assert order == [2, 3, 0, 4, 1]  # of the calls; what no head leads to comes first
    with pytest.raises(ConfigError, match="upto=head: no such result"):
        list(tape.sums_of_each(["0", "head"]))


def test_sums_of_all_layers_cost_one_replay():
    """Counted in products of matrices: as many as for the last layer alone."""
    layers = strangers(4)
    tape = record(layers, states())

    def cost(places):
        with FlopCounterMode(display=False) as counter:
            for _ in tape.sums_of_each(places):
                pass
        return counter.get_total_flops()

    assert cost([str(index) for index in range(4)]) == cost(["3"]) > 0


def test_a_submodule_that_runs_several_times_is_named_with_its_time():
    layer = drawn(StrangersLayer(D, H))
    tape = record(lambda x: layer(layer(x)), states())
    assert len(tape.reading.calls) == 2
    module = nn.Sequential(layer, layer)  # torch names it once, as it is one module
    tape = record(module, states())
    close(tape.sums(upto=("0", 0)).by_length_KBND, record(layer, states()).sums().by_length_KBND)
    close(tape.sums(upto="0").by_length_KBND, tape.sums().by_length_KBND)


def test_paths_can_begin_at_a_submodule():
    module = nn.Sequential(nn.Embedding(7, D), StrangersLayer(D, H), StrangersLayer(D, H))
    module, tokens = drawn(module), torch.randint(7, (B, N), generator=generator(0))
    from_embedding = record(module, tokens, begin="0").sums()
    from_inputs = record(module[1:], module[0](tokens), begin="inputs").sums()
    close(from_embedding.by_length_KBND, from_inputs.by_length_KBND)
    close(from_embedding.bias_BND, from_inputs.bias_BND)


def test_texts_in_one_batch_have_the_sums_that_they_have_alone():
    module = layers_of(fused(is_causal=True))
    together = record(module, states()).sums().by_length_KBND
    for index, text in enumerate(states().split(1)):
        close(record(module, text).sums().by_length_KBND, together[:, index : index + 1])


# --- cost ------------------------------------------------------------------------------------------------------------


class FusedProjection(nn.Module):
    """Pre-norm layers with one map for queries, keys and values, cut in one of several ways."""

    def __init__(self, cut, layers=3):
        super().__init__()
        self.cut = cut
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(D, D) for _ in range(layers))

    def forward(self, x):
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = self.cut(qkv(F.layer_norm(x, (D,))))
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x


CUTS = {
    "split": lambda x: [part.view(B, N, H, -1).transpose(1, 2) for part in x.split(D, dim=-1)],
    "unbind": lambda x: x.reshape(B, N, 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0),
    "index": lambda x: [x[..., i * D : (i + 1) * D].unflatten(-1, (H, -1)).transpose(1, 2) for i in range(3)],
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_replay_computes_no_queries_and_keys_and_no_empty_slots(cut):
    layers = 3
    tape = record(drawn(FusedProjection(CUTS[cut], layers)), states())
    with FlopCounterMode(display=False) as counter:
        tape.sums()
    # in front of layer l = 0, 1, ... slots 0 .. l are there; P is computed once more, from queries and keys
    rows = sum(layer + 1 for layer in range(layers))
    values = 2 * B * N * D * D * (rows - 1)  # in the first layer the values have no paths yet, and are recorded
    way_out = 2 * B * N * D * D * rows
    attention = 2 * B * N * N * D * rows + 2 * B * N * N * D * layers
    assert counter.get_total_flops() == values + way_out + attention


def test_a_tape_keeps_no_activations_in_between():
    kept = []
    layer = drawn(StrangersLayer(D, H))

    def module(x):
        x = layer(x)
        for _ in range(2):
            x = layer(x)
            kept.append(weakref.ref(x))
        return x

    tape = record(module, states(), reading=read(module, (states(),)))
    gc.collect()
    # the last is the output; those before are of the passes that read the module
    assert [each() is not None for each in kept] == [False] * (len(kept) - 1) + [True]
    assert tape.sums().remainder < ROUNDING


class Looks(TorchDispatchMode):
    """How many tensors were looked through for a number that is not zero."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += function is torch.ops.aten.any.default and args[0].numel() > 1
        return function(*args, **(kwargs or {}))


def test_a_recorded_pass_looks_through_no_states():
    layer, x = drawn(StrangersLayer(D, H)), states()
    reading = read(layer, (x,))
    with Looks() as looks:
        record(layer, x, reading=reading)
    assert looks.number == 0


def test_a_tag_lives_as_long_as_its_tensor():
    tags, x = Tags(), torch.zeros(3)
    tags[x] = tag = Tag(Kind.WEIGHT)
    view = x.view(3)
    assert tags.get(view) is None
    del x  # for Python; the view holds it
    gc.collect()
    assert tags.get(view._base) is tag
    kept, tag = weakref.ref(tag), None
    del view
    gc.collect()
    assert kept() is None


def test_number_types_may_change_on_the_way():
    module = drawn(Between(lambda m, x: m.narrow.bias * x.float() + x.float()))
    sums = record(module, states()).sums()
    assert sums.by_length_KBND.dtype == torch.float64
    assert 1e-12 < sums.remainder < 1e-6  # float32 in between


def test_recorded_and_replayed_in_inference_mode():
    module = drawn(Between(FUNCTIONS["gelu"]))
    wanted = record(module, states()).sums().by_length_KBND
    with torch.inference_mode():
        close(record(module, states()).sums().by_length_KBND, wanted)


def test_the_module_is_left_as_it_was():
    module = drawn(Between(FUNCTIONS["swiglu"]))
    before = {name: dict(vars(part)) for name, part in module.named_modules()}
    values = {name: value.clone() for name, value in module.state_dict().items()}
    record(module, states()).sums()
    assert {name: dict(vars(part)) for name, part in module.named_modules()} == before
    assert all(torch.equal(values[name], value) for name, value in module.state_dict().items())
    assert not torch.nn.modules.module._global_forward_hooks


# --- the tap ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", [fused(is_causal=True), by_einsum, by_baddbmm, plain(HIDDEN)])
def test_the_tap_shows_weights_queries_keys_and_values(mix):
    module, x, seen = layers_of(mix), states(), []
    out = tap(module, seen.append, x)
    assert torch.equal(out, module(x))
    assert [call.index for call in seen] == [1, 2]
    for call, layer in zip(seen, module, strict=True):
        assert call.weights.shape[-2:] == (N, N)
        torch.testing.assert_close(call.weights.sum(-1), torch.ones_like(call.weights[..., 0]))
        q, k, v = (heads_of(part(x)) for part in (layer.q, layer.k, layer.v))
        close(call.values.reshape(v.shape), v)
        if mix is not by_baddbmm:  # which adds the scores to a table: their two factors are not looked for
            scale = call.queries.norm() / q.norm()  # by_einsum scales them before the product
            close(call.queries, scale * q)
            close(call.keys, k)
        x = x + layer.out(joined((call.weights @ call.values).reshape(v.shape)))
    close(x, out)


def exponentials(scores):
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


@pytest.mark.parametrize("softmax", [exponentials, lambda scores: scores.log_softmax(-1).exp()])
def test_logits_are_those_from_which_the_largest_is_not_yet_taken(softmax):
    found = []
    for mix in (plain(), lambda q, k, v, _: softmax(q @ k.mT * (D // H) ** -0.5) @ v):
        tap(layers_of(mix), lambda call: found.append(call.logits()), states())
    for logits, wanted in zip(found[2:], found[:2], strict=True):
        close(logits, wanted)


def test_the_tap_of_torchs_own_attention():
    attention = drawn(nn.MultiheadAttention(D, H, batch_first=True))
    seen, x = [], states()
    tap(attention, seen.append, x, x, x)
    _, wanted = attention(x, x, x, average_attn_weights=False)
    close(seen[0].weights, wanted)
    _, _, w_v = attention.in_proj_weight.chunk(3)
    v = F.linear(x, w_v, attention.in_proj_bias[2 * D :])
    close(seen[0].values, heads_of(v))


@pytest.mark.parametrize("mix", [fused(), by_einsum])
def test_the_tap_holds_the_weights_of_one_call_at_a_time(mix):
    alive = []

    def watch(call):
        gc.collect()
        assert not any(each() is not None for each in alive)
        alive.append(weakref.ref(call.weights))

    tap(layers_of(mix), watch, states())
    assert len(alive) == 2


# --- refusals --------------------------------------------------------------------------------------------------------


CONSTANT = torch.ones(D, dtype=torch.float64)


def through_a_view(x):
    x = x.clone()
    x.transpose(0, 1).add_(1)
    return x


def set_data(x):
    y = torch.zeros_like(x)
    y.data = x
    return y


REFUSED = {
    "softmax": lambda m, x: m.narrow(x).softmax(-1),
    "cumprod": lambda m, x: x.cumprod(-1),
    "sort": lambda m, x: x.sort(-1).values,
    "max": lambda m, x: x + x.max(1, keepdim=True).values,
    "exp": lambda m, x: m.narrow(torch.exp(x)),
    "addmm": lambda m, x: torch.addmm(0.5, m.narrow.bias, 2, x.flatten(0, 1), m.narrow.weight).view_as(x),
    "logsumexp": lambda m, x: x - x.logsumexp(-1, keepdim=True),
    "cosine_similarity": lambda m, x: F.cosine_similarity(x, m.narrow(x), dim=-1)[..., None],
    "held outside of the module": lambda m, x: x + CONSTANT,
    "dropout is on": lambda m, x: F.dropout(x, 0.1),
    "changed in place through a view": lambda m, x: through_a_view(x),
    "numpy in .*: passes an activation on": lambda m, x: torch.from_numpy(x.numpy()),
    "data.__set__ in .*: passes an activation on": lambda m, x: set_data(x),
    "item in .*: passes an activation on": lambda m, x: x + x.mean().item(),
}


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_covered_is_refused_by_name(name):
    module = drawn(Between(REFUSED[name]), scale=0.2)
    with pytest.raises(ConfigError, match=name):
        record(module, states()).sums()


def test_a_refused_call_leaves_the_part_in_front_of_it():
    module = drawn(Between(REFUSED["cumprod"]))
    tape = record(module, states())
    with pytest.raises(ConfigError, match=r"torch\.Tensor\.cumprod in the module itself: not covered.*upto="):
        tape.sums()
    wanted = record(module.attention, states()).sums().by_length_KBND
    close(tape.sums(upto=("attention", 0)).by_length_KBND, wanted)


def test_the_first_call_where_the_sums_go_wrong_is_named(monkeypatch):
    """A rule that is wrong about its call: the certificate finds it."""
    monkeypatch.setitem(RULES, "roll", RULES["reshape"])
    module = drawn(Between(FUNCTIONS["roll"]))
    with pytest.raises(ConfigError, match=r"torch\.roll in the module itself: from here on .* miss the recorded value"):
        record(module, states()).sums()


def test_values_that_are_not_finite_are_refused_where_they_come_from():
    module = drawn(Between(lambda m, x: x / torch.zeros(1, dtype=x.dtype)))
    with pytest.raises(ConfigError, match=r"div in the module itself: its value is not finite"):
        record(module, states()).sums()


def test_a_call_that_the_second_pass_alone_makes_is_named():
    """The first call of all was named once."""
    layer, runs = drawn(StrangersLayer(D, H)), []

    def module(x):
        runs.append(x)
        return layer(x) if len(runs) == 1 else layer(x) + 1

    with pytest.raises(ConfigError, match=r"torch\.Tensor\.add in the module itself gives other numbers"):
        read(module, (states(),))


def test_a_frozen_tensor_that_is_changed_later_is_refused():
    def change(module, x):
        gate = F.silu(module.narrow(x))
        out = gate * x
        gate.zero_()
        return out

    with pytest.raises(ConfigError, match="was later changed in place"):
        record(drawn(Between(change)), states()).sums()


@dataclass
class Returned:
    """What a module may return: numbers of each sequence, and the states."""

    sizes: torch.Tensor
    last_hidden_state: torch.Tensor


@pytest.mark.parametrize("kind", [dict, lambda **named: Returned(**named), lambda **named: tuple(named.values())[::-1]])
def test_the_states_of_what_a_module_returns_are_summed(kind):
    module = drawn(Between(FUNCTIONS["swiglu"]))
    wanted = record(module, states()).sums()
    whole = nn.Sequential(module, Returning(kind))
    close(record(whole, states()).sums().by_length_KBND, wanted.by_length_KBND)


class Returning(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(sizes=x.flatten(1).norm(dim=1), last_hidden_state=x)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda m, x: record(m, x[:0]), r"attention without numbers, of \(0, 2, 7, 8\) and .*; give tokens"),
        (lambda m, x: record(m, x.to_sparse()), "inputs: a sparse tensor"),
        (lambda m, x: record(m.narrow, x), "Linear: made no attention call"),
        (lambda m, x: record(m, x, begin="head"), "begin=head: no such submodule; allowed: inputs"),
        (lambda m, x: record(m, x, begin="kernel").sums(), "begin=kernel: no path leads from there"),
        (lambda m, x: record(m, x).sums(upto="head"), "upto=head: no such result; submodules that ran: attention.0"),
        (lambda m, x: record(m, x).sums(output=lambda y: y + 1), "output: made a new tensor"),
        (lambda m, x: record(m, x).sums(value_biases="none"), "value_biases=none: must be head or source"),
        (lambda m, x: record(m, x, begin="inputs").sums(value_biases="source"), "no bias is a path; use head"),
        (lambda m, x: record(torch.jit.trace(m.narrow, x), x), "TorchScript runs unseen by the tape"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_wrong_arguments_are_refused_in_one_line(attempt, message):
    with pytest.raises(ConfigError, match=message):
        attempt(drawn(Between(FUNCTIONS["swiglu"])), states())


def test_dropout_of_torchs_own_attention_is_refused():
    layer = nn.TransformerEncoderLayer(D, H, 11, batch_first=True).double().train()
    with pytest.raises(ConfigError, match="dropout is on"):
        record(layer, states())
    module = layers_of(fused(dropout_p=0.1))
    with pytest.raises(ConfigError, match="dropout is on"):
        record(module, states())


# --- public families, tiny and random --------------------------------------------------------------------------------

FAMILIES = ["BertModel", "T5EncoderModel", "DistilBertModel", "AlbertModel", "DebertaV2Model", "GPT2Model", "OPTModel"]
FAMILIES += ["BloomModel", "LlamaModel", "MistralModel", "Gemma2Model", "ViTModel", "CLIPTextModel", "XLNetModel"]


@pytest.mark.further
@pytest.mark.parametrize("family", FAMILIES)
def test_public_families(family):
    """Fused and eager, of padded texts: the sums are complete, and P is the library's own."""
    pytest.importorskip("transformers", reason="needs the extra: pip install 'rankbench[pretrained]'")
    network, inputs = NETWORKS[family], NETWORKS[family].inputs()
    eager = network.forms.get("other implementation", network.module)()
    attentions = eager(**inputs, output_attentions=True).attentions
    for module in (network.module(), eager):
        tape, calls = record(module, **inputs), []
        assert torch.equal(tape.output.last_hidden_state, module(**inputs).last_hidden_state)
        apart, sums = (tape.sums(value_biases=value_biases) for value_biases in ("source", "head"))
        assert max(apart.remainder, sums.remainder) < ROUNDING
        assert len(apart.by_length_KBND) == len(sums.by_length_KBND) == 3
        tap(module, calls.append, **inputs)
        for call, wanted in zip(calls, attentions, strict=True):
            torch.testing.assert_close(call.weights.reshape(wanted.shape), wanted, rtol=0, atol=ROUNDING)
        through_BND = sum(part.sums.sum(0) for part in tape.through_heads())  # each path of length k passes k heads
        close(through_BND, sums.by_length_KBND[1] + 2 * sums.by_length_KBND[2], 10 * sums.by_length_KBND)


def test_parts_may_be_changed_where_they_are():
    """Written into one by one, added to, and through a part of a part; the same as joined."""

    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

        def joined(self, a, b, c):
            return torch.cat([a + c, b], -1)

        def forward(self, x):
            q, k, v = self.maps(x).chunk(3, -1)
            k = self.joined(k[..., :3], x[..., :1], v[..., :3])
            y = (q @ k.mT).softmax(-1) @ self.joined(v[..., :3], x[..., 1:2], k[..., :3])
            return x + self.out(y)

    class InParts(Joined):
        def joined(self, a, b, c):
            whole = torch.empty(*a.shape[:-1], 4, dtype=a.dtype)
            whole[..., :3].copy_(a)
            whole[..., 3:].copy_(b)
            whole[..., :3][..., :2] += c[..., :2]
            whole[..., 2].add_(c[..., 2])
            return whole

    assert_same_paths(drawn(InParts()), drawn(Joined()), normal(0, 2, 5, 4), [1, 1])


def in_chunks(q, k, v, _):
    """Chunks of two tokens, beside an axis of sequences and heads."""
    shape, (q, k, v) = q.shape, (x.flatten(0, 1).unflatten(1, (-1, 2)) for x in (q, k, v))
    p = torch.einsum("bcnk,bcmk->bcnm", q, k).softmax(-1)
    return torch.einsum("bcnm,bcmk->bcnk", p, v).reshape(shape)


def test_heads_that_stand_beside_sequences_and_windows():
    module, x, seen = drawn(Attention(in_chunks, heads=4)), states(tokens=6), []
    reading = read(module, (x,))
    (call,) = reading.calls
    assert call.lead.heads == 4
    tap(module, lambda attention: seen.append(call.lead.split(attention.weights)), x, reading=reading)
    q_BCHNK, k_BCHMK = (heads_of(part(x), 4).unflatten(2, (3, 2)).transpose(1, 2) for part in (module.q, module.k))
    torch.testing.assert_close(seen[0], (q_BCHNK @ k_BCHMK.mT).softmax(-1).flatten(0, 1))
