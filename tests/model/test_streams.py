"""Peri-norm, value residuals, embedding skips and hyper-connections, against plain torch and against every path.

Shapes: B batch, N token, D width, H head, L layer, S stream, P path.
"""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from breadth import some
from drawn import generator, randomised, transformer

from rankbench.commands.compose import compose
from rankbench.config.compatibility import check
from rankbench.config.keys import ConfigError
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_last_head, sums_by_length, sums_through_heads
from rankbench.measures.norms import composite_norm, residual_matrix
from rankbench.measures.paths import sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.measures.residual_coordinates import log_residual
from rankbench.measures.residual_propagation import propagate
from rankbench.model.initialise import initialise
from rankbench.model.network import run, without
from rankbench.model.transformer import doubly_stochastic
from rankbench.tape import record

ROUNDING = 1e-12  # float64, a few hundred additions
LAYERS, HEADS, WIDTH, STREAMS = 3, 2, 6, 3
KINDS = {
    "peri": {"norm": "peri"},
    "peri rmsnorm": {"norm": "peri", "norm_kind": "rmsnorm", "branch_scale": 0.7},
    "ngpt": {"norm": "ngpt"},
    "ngpt rmsnorm": {"norm": "ngpt", "norm_kind": "rmsnorm", "skip_scale": 0.7, "branch_scale": 0.3},
    "pre, scaled by depth": {"norm": "pre", "norm_scale": "depth"},
    "post rmsnorm, scaled by depth": {"norm": "post", "norm_scale": "depth", "norm_kind": "rmsnorm"},
    "peri, scaled by depth": {"norm": "peri", "norm_scale": "depth", "bias": False},
    "peri without skips": {"norm": "peri", "skip": False, "mlp_skip": False},
    "value residual": {"value_residual": 0.3, "norm": "pre"},
    "value residual, post": {"value_residual": 0.5, "norm": "post", "skip_scale": 0.8},
    "value residual without skips": {"value_residual": 0.5, "norm": "none", "skip": False, "mlp_skip": False},
    "value residual, peri": {"value_residual": 0.5, "norm": "peri", "bias": False},
    "embedding skip": {"embedding_skip": 0.4, "norm": "pre"},
    "embedding skip, post": {"embedding_skip": -0.7, "norm": "post", "branch_scale": 0.5},
    "hyper-connections": {"hyper_connections": "free", "streams": STREAMS, "norm": "pre"},
    "hyper-connections, peri": {"hyper_connections": "free", "streams": 2, "norm": "peri", "skip_scale": 0.9},
    "doubly stochastic": {"hyper_connections": "doubly_stochastic", "streams": STREAMS, "norm": "pre"},
    "without MLPs": {"hyper_connections": "free", "streams": STREAMS, "norm": "none", "mlp": False, "mlp_skip": False},
}
every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)


def network(**keys):
    """A small Transformer of tokens, all its parameters random."""
    model = transformer(**{"layers": LAYERS, "heads": HEADS, "width": WIDTH, "mask": "causal", "length": 4, **keys})
    return randomised(model, generator()).requires_grad_(False)


TOKENS = torch.tensor([[0, 3, 3, 6], [5, 1, 2, 4]])


class Written:
    """The network written out from the papers, in plain torch. What a pass at `tokens` finds (P, scales of norms,
    gates) is kept, so that later passes are affine in the embedding and in the switches of the heads."""

    def __init__(self, model, tokens):
        self.model, self.cfg, self.kept = model, model.cfg, {}
        self.embedding = model.embed(tokens)
        self.state = self.run(self.embedding, torch.ones(LAYERS, HEADS))

    def run(self, embedding, switches_LH):
        cfg, blocks = self.cfg, self.model.blocks
        x, first_values = embedding, None
        streams = [x] * cfg.streams
        for layer, block in enumerate(blocks):
            for kind in ("attention", "mlp") if cfg.mlp else ("attention",):
                skip = cfg.skip_scale if (cfg.skip if kind == "attention" else cfg.mlp_skip) else 0.0
                hyper = getattr(block, f"{kind}_streams")
                if hyper is not None:
                    x = sum(weight * stream for weight, stream in zip(hyper.read, streams, strict=True))
                elif kind == "attention":
                    x = x + cfg.embedding_skip * embedding
                key = (layer, kind)
                read = self.norm(x, getattr(block, f"{kind}_norm"), (*key, 1)) if cfg.norm in ("pre", "peri") else x
                if kind == "attention":
                    own = self.values(block.attention, read)
                    first_values = own if first_values is None else first_values
                    share = cfg.value_residual if layer else 0.0
                    y = self.attend(block.attention, read, (1 - share) * own + share * first_values, key, switches_LH)
                else:
                    z = block.mlp.up(read)
                    gate = self.once((*key, "gate"), 0.5 * (1 + torch.erf(z / math.sqrt(2))))
                    y = block.mlp.down(gate * z)
                if cfg.norm in ("peri", "ngpt"):
                    y = self.norm(y, getattr(block, f"{kind}_branch_norm"), (*key, 2))
                if hyper is not None:
                    mix = doubly_by_hand(hyper.mix) if cfg.hyper_connections == "doubly_stochastic" else hyper.mix
                    streams = [
                        sum(skip * mix[i, j] * streams[j] for j in range(cfg.streams))
                        + hyper.write[i] * cfg.branch_scale * y
                        for i in range(cfg.streams)
                    ]
                    continue
                x = skip * x + cfg.branch_scale * y
                if cfg.norm in ("post", "ngpt"):
                    x = self.norm(x, getattr(block, f"{kind}_norm"), (*key, 1))
        if cfg.hyper_connections != "none":
            x = sum(streams) / cfg.streams
        return self.norm(x, self.model.last_norm, "last") if cfg.norm in ("pre", "peri") else x

    def values(self, attention, read):
        weight, bias = attention.qkv.weight[2 * WIDTH :], attention.qkv.bias
        return F.linear(read, weight, None if bias is None else bias[2 * WIDTH :])

    def attend(self, attention, read, values, key, switches_LH):
        head_width, outputs = WIDTH // HEADS, 0 if attention.out.bias is None else attention.out.bias
        q, k = attention.qkv(read)[..., : 2 * WIDTH].chunk(2, -1)
        for head in range(HEADS):
            columns = slice(head * head_width, (head + 1) * head_width)
            scores = q[..., columns] @ k[..., columns].mT / math.sqrt(head_width)
            hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
            p = self.once((*key, head), scores.masked_fill(hidden, -math.inf).softmax(-1))
            mixed = switches_LH[key[0], head] * p @ values[..., columns]
            outputs = outputs + mixed @ attention.out.weight[:, columns].T
        return outputs

    def norm(self, x, module, key):
        centred = x - x.mean(-1, keepdim=True) if self.cfg.norm_kind == "layernorm" else x
        scale = self.once((key, "scale"), (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
        normed = centred * scale * module.weight + (0 if module.shift is None else module.shift)
        is_scaled = self.cfg.norm_scale == "depth" and key[-1] == 1  # in front of a sub-layer or behind it
        return normed / math.sqrt(key[0] + 1) if is_scaled else normed

    def once(self, key, value):
        return self.kept.setdefault(key, value)

    @functools.cache  # noqa: B019, of an object that lives as long as its test
    def linear(self, on):
        """What comes from the embedding, with these heads switched on."""
        switches_LH = torch.zeros(LAYERS, HEADS, dtype=torch.float64)
        for head in on:
            switches_LH[head] = 1
        return self.run(self.embedding, switches_LH) - self.run(torch.zeros_like(self.embedding), switches_LH)

    def path(self, choices):
        """The path's own term: the part of the output in which each of its heads is a factor, and no other head is. By
        inclusion and exclusion over its heads."""
        heads = [(layer, choice - 1) for layer, choice in enumerate(choices) if choice]
        term = torch.zeros_like(self.state)
        for number in range(len(heads) + 1):
            for on in itertools.combinations(heads, number):
                term += (-1) ** (len(heads) - number) * self.linear(on)
        return term


def doubly_by_hand(mix):
    positive = mix.exp().clone()
    for _ in range(20):
        for column in range(len(mix)):
            positive[:, column] /= positive[:, column].sum()
        for row in range(len(mix)):
            positive[row] /= positive[row].sum()
    return positive


def close(got, wanted, scale):
    assert got.shape == wanted.shape
    assert (got - wanted).abs().max() <= ROUNDING * max(1.0, scale.abs().max().item())


@every_kind
def test_the_network_is_the_one_written_out(keys):
    model = network(**keys)
    state = Written(model, TOKENS).state
    close(model.state(TOKENS), state, state)
    close(model(TOKENS), model.read_out(state), state)
    *_, last = run(model, TOKENS)
    close(model.finish(last.output_BND), state, state)


@every_kind
def test_sums_of_paths_are_those_of_all_paths(keys):
    model = network(**keys)
    written, frozen = Written(model, TOKENS), FrozenNetwork(model, TOKENS)
    paths = [choices for choices in itertools.product(range(HEADS + 1), repeat=LAYERS)]
    terms = {choices: written.path(choices) for choices in paths}
    scale = torch.stack(list(terms.values())).abs().max()
    got_PBND = sums_of_groups(frozen, [np.array([choices]) for choices in paths])
    close(got_PBND, torch.stack([terms[choices] for choices in paths]), scale)
    sums = sums_by_length(model, TOKENS)
    for length, sum_BND in enumerate(sums.by_length_KBND):
        of_length = [term for choices, term in terms.items() if sum(c > 0 for c in choices) == length]
        close(sum_BND, torch.stack(of_length).sum(0), scale)
    bias = written.run(torch.zeros_like(written.embedding), torch.ones(LAYERS, HEADS))
    close(sums.bias_BND, bias, scale)
    assert sums.remainder().max() < ROUNDING * max(1.0, scale.item())
    source = sums_by_length(model, TOKENS, mlp="source")
    assert source.remainder().max() < ROUNDING * max(1.0, scale.item())
    through = sums_through_heads(frozen)
    for layer, head in itertools.product(range(LAYERS), range(HEADS)):
        of_head = [term for choices, term in terms.items() if choices[layer] == head + 1]
        close(through[layer, head], torch.stack(of_head).sum(0), scale)
    close(sums_by_last_head(frozen).sum(0), torch.stack(list(terms.values())).sum(0), scale)


@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_sums_of_paths_are_those_of_the_tape(kind):
    model = network(**{**KINDS[kind], "bias": False, "norm_kind": "rmsnorm"})
    by_tape, ours = record(model.state, TOKENS).sums(), sums_by_length(model, TOKENS)
    close(by_tape.by_length_KBND, ours.by_length_KBND, ours.by_length_KBND)


@pytest.mark.parametrize("kind", ["free", "doubly_stochastic"])
def test_fresh_hyper_connections_are_plain_skips(kind):
    outputs = []
    for keys in ({"hyper_connections": kind}, {}, {"hyper_connections": kind, "stream_deviation": 0.1}):
        model = transformer(layers=LAYERS, norm="pre", streams=STREAMS, **keys)
        initialise(model, generator())
        outputs.append(model(TOKENS).detach())
    fresh, plain, noisy = outputs
    close(fresh, plain, plain)
    assert (noisy - plain).abs().max() > 1e-3


def test_a_doubly_stochastic_matrix_has_sums_of_one():
    matrix_SS = doubly_stochastic(torch.randn(5, 5, generator=generator()).double().exp())
    assert (matrix_SS > 0).all()
    assert (matrix_SS.sum(1) - 1).abs().max() < 1e-15 * 5
    assert (matrix_SS.sum(0) - 1).abs().max() < 1e-6  # 20 steps contract the error of the columns by far more


@pytest.mark.parametrize("name", ["value residual", "embedding skip", "hyper-connections"])
def test_without_skips_there_are_no_streams(name):
    model = network(**KINDS[name])
    bare = without(model, skip=True)
    x_BND = model.embed(TOKENS)
    for block in model.blocks:
        attention = copy.copy(block.attention)
        attention.first = None
        x_BND = attention(block.attention_norm(x_BND))
        x_BND = block.mlp(block.mlp_norm(x_BND))
    close(bare.state(TOKENS), model.last_norm(x_BND), x_BND)
    assert not bare.has_skips and model.has_skips


@pytest.mark.parametrize(("norm", "scale"), [("peri", "none"), ("ngpt", "none"), ("pre", "depth"), ("post", "depth")])
def test_residual_coordinates_follow_norms(norm, scale):
    model = network(norm=norm, norm_scale=scale, mask="none", layers=4, skip_scale=0.5)
    states = propagate(model, TOKENS)
    measured = [step.output_BND for step in run(model, TOKENS) if step.sublayer.kind == "mlp"]
    for state, x_BND in zip(states[1:], measured, strict=True):
        wanted_B = composite_norm(residual_matrix(x_BND)).log()
        assert (log_residual(state) - wanted_B).abs().max() < 1e-9  # residuals of 1e-3 of the tokens and more


@every_kind
def test_masks_of_dropout_that_drop_nothing_leave_the_network_as_it_is(keys):
    model = network(**keys)
    ones = {name: torch.ones(shape, dtype=torch.float64) for name, shape in model.dropout_shapes(2, 4).items()}
    close(model(TOKENS, dropout=ones), model(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["model.value_residual=0.5", "model.embedding_skip=1"],
            "model.value_residual=0.5 model.embedding_skip=1.0: only one",
        ),
        (["model.hyper_connections=free"], "use model.norm=pre, peri or none"),
        (["model.hyper_connections=free", "model.norm=pre", "model.skip=false"], "set model.skip=true"),
        (["model.streams=1"], "model.streams=1: out of range"),
        (["model.norm_scale=depth", "model.norm=none"], "model.norm=none has no norm to scale; set model.norm=pre"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(words, says):
    with pytest.raises(ConfigError) as error:
        check(compose("train", *words))
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["value residual", "embedding skip", "doubly stochastic"])
def test_paths_with_streams_are_not_recomputed(name):
    with pytest.raises(ConfigError, match=r"[23] states side by side"):
        RecomputedNetwork(network(**KINDS[name]), TOKENS)
