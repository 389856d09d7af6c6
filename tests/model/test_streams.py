"""Peri-norm, value residuals, embedding skips and hyper-connections, against plain torch and against every path.

Shapes: B batch, N token, D width, H head, L layer, S stream, P path.
"""

import copy

import pytest
import torch
from breadth import some
from drawn import generator, initialised, randomised, transformer
from written_out import assert_sums_are_those_of_all_paths, close

from rankbench.config.keys import ConfigError
from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.norms import composite_norm, residual_matrix
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.measures.residual_coordinates import log_residual
from rankbench.measures.residual_propagation import propagate
from rankbench.model.network import run, without
from rankbench.model.transformer import doubly_stochastic
from rankbench.tape import record

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


@every_kind
def test_the_network_and_its_sums_of_paths_are_those_written_out(keys):
    model = network(**keys)
    for mlp in ("gate", "source"):
        assert_sums_are_those_of_all_paths(model, TOKENS, mlp)


@pytest.mark.parametrize("kind", some(KINDS, 3))
def test_sums_of_paths_are_those_of_the_tape(kind):
    model = network(**{**KINDS[kind], "bias": False, "norm_kind": "rmsnorm"})
    by_tape, ours = record(model.state, TOKENS).sums(), sums_by_length(model, TOKENS)
    close(by_tape.by_length_KBND, ours.by_length_KBND, ours.by_length_KBND)


def test_noise_of_fresh_streams_has_its_deviation():
    model = initialised(norm="pre", hyper_connections="free", streams=40, stream_deviation=0.1)
    noise_SS = model.blocks[0].attention_streams.mix - torch.eye(40)
    assert noise_SS.std().item() == pytest.approx(0.1, rel=5 / (2 * noise_SS.numel()) ** 0.5)  # five standard errors


@pytest.mark.parametrize("kind", ["free", "doubly_stochastic"])
def test_fresh_hyper_connections_are_plain_skips(kind):
    outputs = []
    for keys in ({"hyper_connections": kind}, {}, {"hyper_connections": kind, "stream_deviation": 0.1}):
        outputs.append(initialised(layers=LAYERS, norm="pre", streams=STREAMS, **keys)(TOKENS).detach())
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


@pytest.mark.parametrize("name", ["value residual", "embedding skip", "doubly stochastic"])
def test_paths_with_streams_are_not_recomputed(name):
    with pytest.raises(ConfigError, match=r"[23] states side by side"):
        RecomputedNetwork(network(**KINDS[name]), TOKENS)
