"""rankbench.measures.residual_coordinates and its analysis: residual coordinates against the plain network in hundreds
of digits.

Shapes: B batch, N token, D width.
"""

import dataclasses
import math
import re

import mpmath
import numpy as np
import pytest
import torch
from breadth import some
from by_hand import composite, is_seen, maps_by_hand
from drawn import generator, randomised, transformer
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from mpmath import mpf
from refusals import refusal
from rows import pick

from rankbench.analyses import ANALYSES, Subject
from rankbench.analyses.collapse import Options, digest, table
from rankbench.analysing.runner import measure
from rankbench.analysing.subjects import fresh_subjects
from rankbench.commands.compose import compose
from rankbench.measures import residual_propagation as module
from rankbench.measures.norms import composite_norm, own_rounding, residual_matrix
from rankbench.measures.residual_coordinates import log_residual, log_size, residual_coordinates, tokens
from rankbench.measures.residual_propagation import check, log_lemma_constant, mean_errors, propagate
from rankbench.measures.rounding import states_with_floors
from rankbench.model.network import run, without
from rankbench.plots.collapse import draw_collapse
from rankbench.runs.machine import Machine
from rankbench.runs.tables import with_who
from rankbench.seeds import generator_for
from rankbench.tasks import Batch

LN10 = math.log(10)
ALONE = {"skip": False, "mlp": False, "mlp_skip": False, "norm": "none"}


@pytest.fixture(scope="session")
def network():
    """network(seed, deviation=.5, padded=False, **model keys): random weights, biases and norms, float64; 4 tokens."""

    def make(seed=0, deviation=0.5, padded=False, **changes):
        keys = {"name": "small", "layers": 3, "width": 5, "head_width": 3, **changes}
        model = transformer(num_outputs=3, length=4, padded=padded, **keys)
        return randomised(model, generator(seed), deviation).requires_grad_(False)

    return make


# --- against the plain forward pass, in as many digits as it needs ----------------------------------------------------


def exact(tensor):
    """The numbers of a float64 tensor as an array of mpmath's: nothing is rounded."""
    return np.vectorize(mpf, otypes=[object])(tensor.numpy())


exp, root, erfc, tanh = (
    np.frompyfunc(function, 1, 1) for function in (mpmath.exp, mpmath.sqrt, mpmath.erfc, mpmath.tanh)
)


def linear(x, module):
    product = x @ exact(module.weight).T
    return product if module.bias is None else product + exact(module.bias)


def normed(x, module, cfg):
    x = x - x.mean(1, keepdims=True) if cfg.norm_kind == "layernorm" else x
    x = x / root((x**2).mean(1, keepdims=True) + mpf(1e-5))
    x = x if module.weight is None else x * exact(module.weight)
    return x if module.shift is None else x + exact(module.shift)


def attended(x, module, cfg):
    size, heads = root(mpf(module.head_width)), []
    seen = np.array([[is_seen(cfg.mask, cfg.window, i, j, len(x)) for j in range(len(x))] for i in range(len(x))])
    for head in range(module.heads):
        w_q, w_k, w_v, _, b_q, b_k, b_v = (exact(torch.from_numpy(w)) for w in maps_by_hand(module, head))
        q, k, read = x @ w_q + b_q, x @ w_k + b_k, x
        scores = q @ k.T
        if module.is_l2:  # values are read through A = W_Q W_Q^T / sqrt(K)
            scores, read = -((q[:, None] - k) ** 2).sum(-1), x @ w_q @ w_q.T / size
        powers = seen * exp(scores / size / mpf(cfg.temperature))
        heads.append(module.mix["attention"] * powers @ (read @ w_v + b_v) / powers.sum(1, keepdims=True))
    return linear(np.concatenate(heads, 1), module.out)


def activated(z, name):
    if name == "relu":
        return np.maximum(z, 0)
    if name == "gelu_new":
        return z * (1 + tanh(root(2 / mpmath.pi) * (z + mpf("0.044715") * z**3))) / 2
    return z * erfc(-z / root(mpf(2))) / 2


def sublayers(block, cfg):
    yield lambda y: attended(y, block.attention, cfg), block.attention_norm, cfg.skip
    if cfg.mlp:
        mlp = block.mlp
        yield lambda y: linear(activated(linear(y, mlp.up), cfg.activation), mlp.down), block.mlp_norm, cfg.mlp_skip


def forward(model, x):
    """The states after the embedding and each layer: the network as its docstring draws it."""
    cfg, states = model.cfg, [x]
    for block in model.blocks:
        for part, its_norm, its_skip in sublayers(block, cfg):
            y = mpf(cfg.branch_scale) * part(normed(x, its_norm, cfg) if cfg.norm == "pre" else x)
            y = mpf(cfg.skip_scale) * x + y if its_skip else y
            x = normed(y, its_norm, cfg) if cfg.norm == "post" else y
        states.append(x)
    return states


def exact_log_size(x):
    """ln ||X||_{1,inf} of the exact tokens."""
    return (mpmath.log(abs(x).sum(0).max()) + mpmath.log(abs(x).sum(1).max())) / 2


def logs_and_direction(x):
    """ln ||R||_{1,inf} and R over its largest entry, of the exact tokens."""
    r = x - x.mean(0)
    return float(exact_log_size(r)), (r / abs(r).max()).astype(float)


def assert_same_as_exact(model, inputs, digits, lowest):
    """Every layer's log residual and direction; the last residual is below 10^lowest and above what digits resolve."""
    states = propagate(model, inputs)
    present = model.present(inputs)
    for b in range(len(inputs)):
        count = inputs.shape[1] if present is None else int(present[b].sum())
        with mpmath.workdps(digits):
            wanted = [logs_and_direction(x) for x in forward(model, exact(model.embed(inputs)[b, :count]))]
        assert -(digits - 30) * LN10 < wanted[-1][0] < lowest * LN10
        for state, (log, direction) in zip(states, wanted, strict=True):
            # rounding of a layer is cubed by those behind it, as the residual is: relative to the logarithm it stays
            assert log_residual(state)[b].item() == pytest.approx(log, rel=1e-11, abs=1e-11)
            np.testing.assert_allclose(state.rows.matrix_BND[b, :count].numpy(), direction, rtol=0, atol=1e-9)
            assert (state.rows.matrix_BND[b, count:] == 0).all()


INPUTS = torch.tensor([[0, 3, 5, 6], [2, 2, 1, 4]])
CUBIC = [  # (keys, layers, digits, the last residual is below ten to this)
    ({}, 5, 300, -50),
    ({"heads": 1, "tied_qk": True, "temperature": 0.7}, 5, 400, -50),
    ({"heads": 3, "bias": False}, 5, 300, -30),
    ({"branch_scale": -0.6}, 5, 300, -50),
    ({"mix_attention": -0.7, "head_reduction": "mean"}, 5, 300, -50),
    ({"norm": "post"}, 4, 300, -20),
    ({"norm": "pre", "norm_kind": "rmsnorm", "norm_affine": False}, 5, 300, -20),
    ({"mlp": True}, 5, 400, -50),
    ({"mlp": True, "activation": "relu", "norm": "post", "norm_kind": "rmsnorm"}, 4, 300, -20),
    ({"mask": "window", "window": 3}, 5, 300, -50),  # a window that hides nothing
    ({"attention": "l2"}, 5, 400, -40),
    ({"attention": "l2", "tied_qk": True, "temperature": 0.7}, 6, 400, -40),
]


@pytest.mark.parametrize(("changes", "layers", "digits", "lowest"), CUBIC, ids=str)
def test_without_skips_and_masks_it_is_the_exact_residual(network, changes, layers, digits, lowest):
    assert_same_as_exact(network(seed=2, **{**ALONE, **changes}, layers=layers), INPUTS, digits, lowest)


LINEAR = [
    ({**ALONE, "mask": "causal"}, 12),
    ({**ALONE, "mask": "window", "window": 1, "mlp": True}, 12),
    ({**ALONE, "mask": "window", "window": 0}, 12),
    ({**ALONE, "mask": "causal", "norm": "post", "mlp": True, "activation": "relu"}, 12),
    ({"skip": True, "mlp": False, "mlp_skip": False, "norm": "none", "skip_scale": 0.5}, 12),
    ({"skip_scale": 0.3, "branch_scale": 0.1, "norm": "none"}, 12),
    ({"norm": "pre", "skip_scale": -0.2, "norm_kind": "rmsnorm"}, 8),
    ({"norm": "post", "mlp_skip": False, "activation": "relu"}, 8),
    ({"norm": "post", "mask": "causal", "skip_scale": 1e-3}, 6),
    ({}, 12),
    ({**ALONE, "attention": "l2", "tied_qk": True, "mask": "causal"}, 5),
    ({**ALONE, "attention": "l2", "mask": "window", "window": 1, "value_width": 2}, 5),
]


@pytest.mark.parametrize(("changes", "layers"), some(LINEAR, 2), ids=str)
def test_with_skips_or_masks_it_is_the_exact_residual(network, changes, layers):
    assert_same_as_exact(network(seed=2, **changes, layers=layers), INPUTS[:1], 250, 3)


# --- the mean: zero, tiny, ordinary -----------------------------------------------------------------------------------

# Multiples of 1/64 below 1: sums of four of them and their mean are exact in float64.
A, B, C = ([n / 64 for n in row] for row in ([24, -40, 8, 48, -16], [-56, 8, 32, 16, 40], [16, 48, -24, -8, 32]))
MIRRORED = torch.tensor([A, B, [-a for a in A], [-b for b in B]]).double()
BALANCED = torch.tensor([A, B, C, [-a - b - c for a, b, c in zip(A, B, C, strict=True)]]).double()
NO_BIAS = {**ALONE, "bias": False, "positions": "none", "norm_affine": False}


def relative_residual_and_doubt(model, inputs):
    """Each state's log ||R|| / ||X||, whether its mean counts as zero, and the mean's error relative to it."""
    states = propagate(model, inputs)
    errors = mean_errors(model, inputs, states, torch.Generator().manual_seed(0))
    for state, error_B in zip(states, errors, strict=True):
        is_zero_B = state.mean.log_B <= error_B
        doubt_B = (error_B - state.mean.log_B).exp()
        yield log_residual(state) - log_size(state, model.present(inputs), is_zero_B), is_zero_B, doubt_B


def with_tokens(network, tokens_ND, deviation=0.3, **changes):
    model = network(seed=2, deviation=deviation, **{**NO_BIAS, **changes})
    model.read_in.weight[:4] = tokens_ND
    return model, torch.arange(4)[None]


MEANS = [
    # name, tokens, keys, whether the mean is a zero that rounding alone hides, by state
    ("mirrored", MIRRORED, {}, True),
    ("mirrored", MIRRORED, {"tied_qk": True, "temperature": 0.7}, True),
    ("mirrored", MIRRORED, {"norm": "post", "norm_kind": "rmsnorm"}, True),
    ("mirrored", MIRRORED, {"attention": "l2"}, True),
    ("balanced", BALANCED, {}, False),
    ("balanced", BALANCED, {"mask": "causal"}, False),
    ("balanced", BALANCED, {"mlp": True, "activation": "gelu"}, False),
    ("balanced", BALANCED, {"mlp": True, "activation": "relu", "heads": 1}, False),
    ("tiny", MIRRORED + 2.0**-40, {}, False),
    ("tiny", BALANCED - 2.0**-40, {"norm": "post", "norm_kind": "layernorm"}, False),
    ("ordinary", MIRRORED + 0.25, {"norm": "pre", "norm_kind": "rmsnorm"}, False),
    ("ordinary", MIRRORED + 0.25, {"skip": True}, False),
]


@pytest.mark.parametrize(("name", "tokens_ND", "changes", "hidden"), some(MEANS, 2), ids=str)
def test_the_relative_residual_is_exact_whatever_the_mean(network, name, tokens_ND, changes, hidden):
    model, inputs = with_tokens(network, tokens_ND, layers=5, **changes)
    got = list(relative_residual_and_doubt(model, inputs))
    with mpmath.workdps(600):
        states = forward(model, exact(model.embed(inputs)[0]))
        wanted = [float(logs_and_direction(x)[0] - exact_log_size(x)) for x in states]
    for number, ((log_B, is_zero_B, doubt_B), log) in enumerate(zip(got, wanted, strict=True)):
        # a mean that is small beside the tokens before it is known to fewer digits, and its error says how many
        doubt = 0 if hidden else doubt_B.nan_to_num(0).item()
        assert log_B.item() == pytest.approx(log, rel=1e-10, abs=1e-10 + doubt), number
        assert doubt < 1e-3, number
        assert is_zero_B.item() == (hidden or (name == "balanced" and number == 0)), number
    if hidden:
        assert wanted == pytest.approx([0] * 6, abs=1e-12)
    if name == "tiny":
        assert wanted[0] > -1e-9 and (changes or wanted[-1] < -20)  # at first nothing beside the residual


@pytest.mark.further
def test_a_mean_may_be_smaller_than_float64_can_hold(network):
    """W_V W_O = 1e-16: the mean is as much smaller behind each layer, and 1e-400 behind 25."""
    model = identity_network(network, 2, layers=25, positions="none")
    for block in model.blocks:
        block.attention.out.weight.mul_(1e-16)
    states, got = propagate(model, INPUTS), list(relative_residual_and_doubt(model, INPUTS))
    means = torch.stack([state.mean.log_B for state in states])
    # the residual behind the first layer is 1e-16, and what it adds to the mean 1e-32 of it and less
    torch.testing.assert_close(means[2:] - means[2], -16 * LN10 * torch.arange(24.0).double()[:, None].expand(-1, 2))
    assert (states[-1].mean.value_BND == 0).all() and (means[-1] < -390 * LN10).all()
    for state, (log_B, is_zero_B, _) in zip(states[2:], got[2:], strict=True):
        assert not is_zero_B.any()
        size_B = state.mean.log_B + composite_norm(state.mean.matrix_BND.expand(-1, 4, -1)).log()
        torch.testing.assert_close(log_B, log_residual(state) - size_B, rtol=1e-7, atol=1e-7)


def test_equal_tokens_of_zero_have_no_size(network):
    model, inputs = with_tokens(network, torch.zeros(4, 5), layers=3)
    for state in propagate(model, inputs):
        assert log_size(state) == log_residual(state) == state.mean.log_B == -math.inf


def test_an_ordinary_mean_costs_no_second_run(network, monkeypatch):
    model = network(seed=2, layers=4)
    states = propagate(model, INPUTS)
    monkeypatch.setattr(module, "_through_layers", None)
    assert all((error_B == -math.inf).all() for error_B in mean_errors(model, INPUTS, states, torch.Generator()))


def test_absent_tokens_are_no_part_of_the_size(network):
    inputs = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    padded, _ = with_tokens(network, MIRRORED + 0.25, layers=3, padded=True)
    alone, _ = with_tokens(network, MIRRORED + 0.25, layers=3)
    states = relative_residual_and_doubt(padded, inputs), relative_residual_and_doubt(alone, inputs[1:, :2])
    for whole, short in zip(*states, strict=True):
        assert whole[0][1].item() == pytest.approx(short[0].item(), rel=1e-11, abs=1e-11)


# a window of 2 hides nothing from three tokens and one from four
@pytest.mark.parametrize(
    "changes", [{}, {"mask": "causal"}, {"mask": "window", "window": 2}, {"norm": "post"}], ids=str
)
def test_absent_tokens_are_no_part_of_it(network, changes):
    inputs = torch.tensor([[0, 3, 5, 6], [2, 2, 1, -1], [4, 1, -1, -1]])
    model = network(seed=2, padded=True, **{**ALONE, **changes}, layers=5)
    assert_same_as_exact(model, inputs, 400, 0)


def test_beyond_a_thousand_orders_of_magnitude_it_is_the_exact_residual(network):
    """Two heads with biases, followed to 1e-1000 and below: the plain forward pass needs 1,700 digits to see it."""
    assert_same_as_exact(network(seed=5, **ALONE, layers=7), INPUTS[:1], 1700, -1000)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_attention_to_one_key_alone_loses_no_digits(network, mask):
    """Scores differ by up to hundreds: the weights of all other keys can be far below the rounding of 1."""
    for seed in range(3):
        model = network(seed, 1.5, **{**ALONE, "mask": mask, "norm": "pre", "norm_kind": "rmsnorm"})
        assert_same_as_exact(model, INPUTS, 500, 5)


@pytest.mark.parametrize(
    "changes", [changes for changes, *_ in CUBIC[::2]] + [changes for changes, _ in LINEAR[:8:2]], ids=str
)
def test_a_forward_pass_is_no_further_from_the_exact_residual_than_its_noise_floor(network, changes):
    model = network(seed=2, **{**ALONE, **changes}, layers=5)
    _, *floored_states = states_with_floors(model, INPUTS, torch.Generator().manual_seed(0))
    for b, embedding in enumerate(model.embed(INPUTS)):
        with mpmath.workdps(400):
            wanted = [mpmath.exp(logs_and_direction(x)[0]) for x in forward(model, exact(embedding))[1:]]
            for layer, (true, (x_BND, floor_B)) in enumerate(zip(wanted, floored_states, strict=True)):
                assert abs(composite_norm(residual_matrix(x_BND))[b].item() - true) <= floor_B[b].item(), (b, layer)


# --- closed forms -----------------------------------------------------------------------------------------------------


def identity_network(network, width, **changes):
    """One head whose W_V and W_O are the identity, and its queries and keys too if the head is as wide."""
    model = network(**{**ALONE, "heads": 1, "head_width": width, "width": width, "bias": False, **changes})
    for block in model.blocks:
        block.attention.qkv.weight.copy_(torch.eye(width).repeat(3, 1))
        block.attention.out.weight.copy_(torch.eye(width))
    return model


def test_two_tokens_on_a_line_follow_the_closed_form_to_the_48th_layer(network):
    """x + r and x - r with every weight 1: r' = r (tanh a - tanh b) / 2 with a, b = (x +- r) r, so ln r' ~ 3 ln r."""
    model = identity_network(network, 1, layers=48, positions="none")
    model.read_in.weight[:2] = torch.tensor([[1.1], [-0.3]], dtype=torch.float64)
    states = propagate(model, torch.tensor([[0, 1]]))
    x, log_r = 0.4, math.log(0.7)
    for state in states:
        # ||R||_1 = 2 r and ||R||_inf = r; a step rounds to 1e-16, three times as much of three times the logarithm
        assert log_residual(state).item() == pytest.approx(log_r + math.log(2) / 2, rel=1e-13)
        assert state.mean.value_BND.item() == pytest.approx(x, rel=1e-13)
        r = math.exp(log_r)
        a, b = (x + r) * r, (x - r) * r
        x += r * (math.tanh(a) + math.tanh(b)) / 2
        # tanh a - tanh b = sinh(a - b) / (cosh a cosh b), a - b = 2 r^2
        shape = math.sinh(2 * r * r) / (2 * r * r) if r > 1e-8 else 1.0
        log_r = 3 * log_r + math.log(shape) - math.log(math.cosh(a) * math.cosh(b))
    assert log_residual(states[-1]).item() < -(3**47) / 10


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "relu"])
@settings(deadline=None)
@given(
    z=st.one_of(st.floats(-8, 8), st.floats(-1e-9, 1e-9), st.just(0.0)),
    d=st.floats(-1, 1).filter(lambda d: abs(d) > 1e-3),
    log_scale=st.one_of(st.floats(-3, 4), st.floats(-300, 0), st.just(-2000.0)),
)
def test_the_change_of_an_activation_is_exact(name, z, d, log_scale):
    got = module.CHANGES[name](*(torch.tensor(number, dtype=torch.float64) for number in (z, log_scale, d))).item()
    with mpmath.workdps(1000):
        scale = mpmath.exp(mpf(log_scale))
        wanted = float((activated(z + scale * mpf(d), name) - activated(mpf(z), name)) / scale)
    # 1e-16 of gelu itself (up to 8, and up to 60 with the change) where it is the difference, else of its slope
    assert got == pytest.approx(wanted, rel=1e-13, abs=1e-14)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), log_scale=st.one_of(st.floats(-45, -2), st.floats(-400, -36)))
def test_the_change_of_a_softmax_is_exact(seed, log_scale):
    """On both sides of the switch to the limit."""
    generator = torch.Generator().manual_seed(seed)
    r, e = (torch.randn(1, 2, rows, 4, generator=generator, dtype=torch.float64) for rows in (1, 3))
    e[0, 0] *= 1e-6  # a head whose rows take another formula than the other's
    log_B, change = module._change_of_softmax(r.softmax(-1), torch.tensor([log_scale], dtype=torch.float64), e)
    assert log_B.item() == pytest.approx(log_scale + e.abs().max().log().item(), rel=1e-14)
    with mpmath.workdps(420):
        before, after = exp(exact(r)), exp(exact(r) + mpmath.exp(mpf(log_scale)) * exact(e))
        wanted = after / after.sum(-1, keepdims=True) - before / before.sum(-1, keepdims=True)
        wanted = torch.from_numpy((wanted / mpmath.exp(mpf(log_B.item()))).astype(float))
    error = 1e-14 + 4e-16 * abs(log_scale)  # of the entries, and of the logarithm that scales them
    largest = e.abs().amax(-1, keepdim=True) / e.abs().max()
    assert ((change - wanted).abs() <= error * largest).all()


# --- against the plain forward pass in float64, wherever that can see -------------------------------------------------

KEYS = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 3),
        "tied_qk": st.booleans(),
        "bias": st.booleans(),
        "attention": st.sampled_from(["dot", "l2"]),
        "temperature": st.sampled_from([0.5, 1.0]),
        "skip": st.booleans(),
        "skip_scale": st.sampled_from([1.0, -0.5]),
        "branch_scale": st.sampled_from([1.0, 0.3]),
        "mlp": st.booleans(),
        "activation": st.sampled_from(["relu", "gelu"]),
        "norm": st.sampled_from(["none", "pre", "post"]),
        "norm_kind": st.sampled_from(["layernorm", "rmsnorm"]),
        "norm_affine": st.booleans(),
        "mask": st.sampled_from(["none", "causal", "window"]),
        "positions": st.sampled_from(["none", "learned", "sinusoidal"]),
        "weight_norm": st.sampled_from(["none", "sigma"]),
    }
)


def largest_score(step):
    """The largest absolute score of an attention layer, before a mask."""
    attention = step.sublayer.part
    q_BHNK, k_BHMK, _ = attention.queries_keys_values(step.sublayer.before(step.input_BND, step.sublayer.norm))
    left, right, scale = attention.factors(q_BHNK, k_BHMK)
    return (left @ right.mT).abs().max().item() * scale / attention.temperature


@settings(max_examples=20, deadline=None)
@given(keys=KEYS, seed=st.integers(0, 10**6), deviation=st.sampled_from([0.1, 0.5, 2.0]), padded=st.booleans())
# without norms, scores grow to 5e10 in three layers
@pytest.mark.further
@example(
    keys={
        **{"heads": 2, "tied_qk": False, "bias": False, "temperature": 0.5, "skip": False, "skip_scale": 1.0},
        **{"branch_scale": 1.0, "mlp": True, "activation": "relu", "norm": "none", "norm_kind": "layernorm"},
        **{"norm_affine": False, "mask": "none", "positions": "none", "weight_norm": "none", "attention": "dot"},
    },
    seed=107,
    deviation=2.0,
    padded=False,
)
def test_it_is_what_a_forward_pass_gives_above_its_floor(network, states_by_layer, keys, seed, deviation, padded):
    keys |= {"mlp_skip": keys["mlp"] and keys["skip"], "window": 1 if keys["mask"] == "window" else None}
    model = network(seed, deviation, padded, **keys)
    inputs = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(seed))
    if padded:
        inputs[1, 3:] = inputs[2, 1:] = -1
    states = propagate(model, inputs)
    steps = list(run(model, inputs))
    # a norm blows the rounding of a token that ReLU has set to zero up 316 times: such a network is ill-conditioned
    assume(all(step.scale_BN1.max() < 100 for step in steps if step.scale_BN1 is not None))
    score = 1e5  # the largest so far; a softmax multiplies the rounding of its scores by them
    attentions = [None, *(step for step in steps if step.sublayer.kind == "attention")]
    for state, x_BND, step in zip(states, states_by_layer(model, inputs), attentions, strict=True):
        score = score if step is None else max(score, largest_score(step))
        error = 1e-15 * score  # of a few operations, each at most eps = 2.2e-16
        for b, count in enumerate([4, 3, 1] if padded else [4] * 3):
            x_1ND = x_BND[b : b + 1, :count]
            size = x_1ND.abs().max().item()
            tokens_BND = tokens(state)
            torch.testing.assert_close(tokens_BND[b, :count], x_1ND[0], rtol=0, atol=error * size)
            assert state.rows.matrix_BND[b].sum(0).abs().max() < 1e-13
            differ = state.rows.log_B[b] > -math.inf
            assert state.rows.matrix_BND[b].abs().max() == pytest.approx(1.0 if differ else 0.0, abs=1e-13)
            measured, floor = composite_norm(residual_matrix(x_1ND)).item(), own_rounding(x_1ND).item()
            if measured > 1e9 * floor:
                # known to 1e-9, with a margin for what the layers before have added
                assert log_residual(state)[b].item() == pytest.approx(math.log(measured), abs=max(1e-5, error))


# --- its limits -------------------------------------------------------------------------------------------------------


@pytest.mark.further
def test_a_logarithm_beyond_float64_is_minus_infinity(network):
    model = identity_network(network, 2, layers=700)
    logs = torch.stack([log_residual(state) for state in propagate(model, INPUTS)])
    assert not logs.isnan().any() and (logs[-1] == -math.inf).all() and (logs[500] > -math.inf).all()


def test_tokens_that_overflow_are_refused(network):
    line = refusal(propagate, network(deviation=1e60, **{**ALONE, "layers": 9}), INPUTS)
    assert re.match(r"model.layers=9: the tokens overflow float64 in layer \d; use fewer layers", line)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention", "cosine"), ("attention", "contractive_l2"), ("mix_identity", 0.5), ("mix_uniform", -1.0)],
)
def test_what_no_rule_follows_is_refused_in_one_line(network, make_subject, key, value):
    check(network())
    line = refusal(check, network(**{key: value}))
    assert line.startswith(f"model.{key}={value}: residual coordinates follow ") and "analysis=[residual]" in line
    assert refusal(table, make_subject(**{key: value}), options("full", "no_mlp")) == line


def test_an_activation_matters_only_where_there_is_an_mlp(network, monkeypatch):
    monkeypatch.delitem(module.CHANGES, "gelu")
    check(network(activation="gelu", mlp=False, mlp_skip=False))
    line = refusal(check, network(activation="gelu"))
    assert line.startswith("model.activation=gelu: residual coordinates follow gelu_new, relu alone; measure")


def test_coordinates_of_given_tokens():
    x_BND = torch.tensor([[[1.0, 5.0], [3.0, 1.0], [100.0, 100.0]]], dtype=torch.float64)
    state = residual_coordinates(x_BND, torch.tensor([[True, True, False]]))
    assert state.mean.value_BND[0, 0].tolist() == pytest.approx([2, 3], rel=1e-15)
    assert state.rows.log_B.item() == pytest.approx(math.log(2))
    assert state.rows.matrix_BND.tolist() == [[[-0.5, 1], [0.5, -1], [0, 0]]]
    # column sums 2 and 4, row sums 3 and 3
    assert log_residual(state).item() == pytest.approx(math.log(4 * 3) / 2)


@pytest.mark.parametrize(("changes", "slope"), [({}, 1), ({"attention": "l2", "tied_qk": True}, 2)], ids=str)
def test_the_constant_of_the_lemma_by_hand(network, changes, slope):
    model = network(seed=5, **ALONE, temperature=0.7, branch_scale=-0.3, **changes)
    betas = []
    for head in range(2):
        w_q, w_k, w_v, w_o, *_ = maps_by_hand(model.attentions[0], head)
        read = w_q @ w_q.T / math.sqrt(3) if changes else np.eye(5)
        norms = [np.linalg.norm(-0.3 * read @ w_v @ w_o, ord) for ord in (1, np.inf)]
        betas.append(np.linalg.norm(slope * w_q @ w_k.T / 0.7, 1) * math.sqrt(norms[0] * norms[1]))
    wanted = math.log(4 * max(betas) * 2 / math.sqrt(3))
    assert log_lemma_constant(model.sublayers[0]) == pytest.approx(wanted, rel=1e-13)


# --- the analysis -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def make_subject(network, sorting_task):
    def make(seed=3, kinds=("trained", "initialised"), **changes):
        task = sorting_task(length=4, alphabet=7, train_size=10, test_size=6)
        models = {kind: network(10 * seed + number, **changes) for number, kind in enumerate(kinds)}
        batch = task.sample(6, torch.Generator().manual_seed(seed))
        batch = Batch(batch.inputs, batch.targets % 3)  # the networks' three classes
        return Subject("a run", seed, task, batch, batch, models)

    return make


def options(*variants, sequences=5):
    return Options(list(variants), sequences)


def test_rows_of_the_table_by_hand(make_subject):
    subject = make_subject(norm="none", layers=4, deviation=0.3)
    rows_of_all = table(subject, options("attention_only_no_norm", "full"))
    assert rows_of_all.groupby(["weights", "variant"], sort=False).layer.apply(list).to_dict() == {
        (kind, variant): [0, 1, 2, 3, 4] for kind in subject.networks for variant in ("attention_only_no_norm", "full")
    }
    inputs = subject.test.inputs[:5]
    for kind, model in subject.networks.items():
        reduced = without(model.requires_grad_(False), skip=True, mlp=True, norm=True)
        floored_states = states_with_floors(reduced, inputs, generator_for(subject.seed, "rounding"))
        rows = pick(rows_of_all, weights=kind, variant="attention_only_no_norm").set_index("layer")
        before, entered_B, bound_B, started, first_B = math.nan, None, None, False, None
        for layer, state in enumerate(propagate(reduced, inputs)):
            row, log_B = rows.loc[layer], log_residual(state).numpy() / LN10
            assert row.log10_residual == pytest.approx(log_B.mean(), rel=1e-12)
            assert row.log10_residual_sd == pytest.approx(log_B.std(ddof=1), rel=1e-9)
            x_BND, floor = floored_states[layer]
            sizes = [composite(x_ND) for x_ND in x_BND.numpy()]
            relative_B = log_B - np.log10(sizes)
            relative, first_B = relative_B.mean(), relative_B if first_B is None else first_B
            assert row.log10_relative_residual == pytest.approx(relative, rel=1e-9)
            assert row.share_collapsed == pytest.approx((10**relative_B < 0.1 * 10**first_B).mean())
            assert row.growth_exponent == pytest.approx(relative / before if before < 0 else math.nan, nan_ok=True)
            before = relative
            residual_B = composite_norm(residual_matrix(x_BND))
            wanted = residual_B.log10().mean().item() if (residual_B > floor).all() else math.nan
            assert row.log10_measured == pytest.approx(wanted, nan_ok=True)
            assert row.noise_floor == pytest.approx(floor.mean().item())
            assert row.below_floor == pytest.approx((residual_B <= floor).double().mean().item())
            assert row.num_sequences == 5
            if layer:
                constant = log_lemma_constant(reduced.sublayers[layer - 1]) / LN10
                if bound_B is None and (constant + 2 * entered_B < 0).all():
                    bound_B = entered_B
                if bound_B is not None:
                    bound_B, started = constant + 3 * bound_B, True
                    assert row.log10_bound == pytest.approx(bound_B.mean())
                    assert log_B.mean() < bound_B.mean()
            assert math.isnan(row.log10_bound) != started
            entered_B = log_B
        assert started
        assert rows.log10_measured.isna().any() and rows.log10_measured.notna().any()
        assert rows.log10_residual[4] < -15
    assert rows_of_all[rows_of_all.variant == "full"].log10_bound.isna().all()
    # measured residuals are 1e4 floors and more
    assert rows_of_all.disagreement.max() < 4e-5 and rows_of_all.disagreement.notna().any()


def test_sequences_that_collapse_are_counted_one_by_one(make_subject):
    """Hard attention keeps the tokens of some sequences apart and makes those of others alike."""
    subject = make_subject(kinds=("trained",), norm="none", layers=2, deviation=1.0, temperature=0.05)
    rows = table(subject, options("attention_only_no_norm", sequences=6)).set_index("layer")
    network = without(subject.network.requires_grad_(False), skip=True, mlp=True, norm=True)
    states = [x_BND for x_BND, _ in states_with_floors(network, subject.test.inputs, generator_for(0, "rounding"))]
    left_LB = torch.stack([composite_norm(residual_matrix(x_BND)) / composite_norm(x_BND) for x_BND in states])
    shares = (left_LB < 0.1 * left_LB[0]).double().mean(1)
    assert rows.share_collapsed.to_list() == pytest.approx(shares.tolist())
    assert 0 < rows.share_collapsed.iloc[-1] < 1


@pytest.mark.further
def test_two_opposite_tokens_have_a_relative_residual_of_one_at_every_depth():
    words = "model=san task=circle_arcs model.init=glorot model.bias=false model.positions=none model.layers=8"
    cfg = compose("analyze", *words.split())
    (subject,) = fresh_subjects(cfg, Machine.prepare(cfg))
    measured = table(subject, options("full", sequences=32))
    assert (measured.log10_relative_residual == 0).all() and (measured.mean_below_rounding == 1).all()
    assert measured.growth_exponent.isna().all() and measured.log10_residual.iloc[-1] < -8000
    assert measured.log10_measured.notna().tolist() == [True] * 3 + [False] * 6
    close = measured.dropna(subset="log10_measured")
    assert close.log10_measured.to_numpy() == pytest.approx(close.log10_residual.to_numpy(), abs=1e-6)


def test_rounding_does_not_stand_as_a_measurement(fresh_subject):
    """Without skips, behind an MLP of ratio 4: the residual is 1e-53 and less, and rounding leaves 1e-13 of it."""
    subject = fresh_subject(0, sequences=8, length=16, layers=8, width=96, mlp_ratio=4)
    measured = table(subject, options("no_skip", sequences=8)).set_index("layer")
    assert (measured.log10_residual[5:] < -50).all()
    assert (measured.below_floor[5:] == 1).all() and measured.log10_measured[5:].isna().all()
    assert (measured.below_floor[:3] == 0).all()
    assert measured.log10_measured[:3].to_numpy() == pytest.approx(measured.log10_residual[:3].to_numpy(), abs=1e-6)
    of_residual = ANALYSES["residual"]
    states = of_residual.table(subject, of_residual.options(["no_skip"], 8, None, 10.0))
    assert (states[(states.layer >= 5) & (states.sublayer != "weights")].below_floor == 1).all()
    lines = draw_collapse(with_who(measured.reset_index(), **subject.who)).axes[0].lines
    assert [max(line.get_xdata()) for line in lines if is_ring(line)] == [3]
    assert "rounding error of a forward pass" in {line.get_label() for line in lines}


def is_ring(line):
    return line.get_marker() == "o" and line.get_markerfacecolor() == "none" and len(line.get_xdata())


def test_equal_tokens_are_counted_out(make_subject):
    subject = make_subject(kinds=["initialised"], positions="none", **ALONE)
    subject.test.inputs[1] = 2
    measured = table(subject, options("full"))
    assert (measured.num_sequences == 4).all() and np.isfinite(measured.log10_residual).all()
    others = dataclasses.replace(subject, test=subject.test[[0, 2, 3, 4]])
    wanted = table(others, options("full", sequences=4))
    assert measured.log10_measured.notna().sum() > 1
    assert measured.log10_measured.to_numpy() == pytest.approx(wanted.log10_measured.to_numpy(), nan_ok=True, rel=1e-9)
    subject.test.inputs[:] = 2
    measured = table(subject, options("full"))
    assert (measured.num_sequences == 0).all() and (measured.log10_residual == -np.inf).all()
    assert draw_collapse(with_who(measured, **subject.who)) and digest(with_who(measured, **subject.who))


def test_a_disagreement_is_told(make_subject, monkeypatch, caplog):
    subject = make_subject(kinds=["initialised"])
    with caplog.at_level("INFO", "rankbench"):
        table(subject, options("full"))
        assert "a run seed 3: propagated and measured" in caplog.text and "more than rounding" not in caplog.text
        wrong = lambda *given: log_residual(*given) * (1 + 1e-2)  # noqa: E731
        monkeypatch.setattr("rankbench.analyses.collapse.coordinates.log_residual", wrong)
        table(subject, options("full"))
    assert [record.levelname for record in caplog.records if "more than rounding" in record.message] == ["WARNING"]


def several(make_subject, **changes):
    return measure("collapse", options("full", "no_mlp"), [make_subject(seed, **changes) for seed in (3, 4)])


def test_the_digest_shows_residuals_and_the_last_exponent(make_subject):
    both = several(make_subject)
    lines = digest(both).splitlines()
    assert "2 seeds" in lines[0]
    trained = pick(both, weights="trained", variant="full")
    words = next(line for line in lines if line.startswith("trained")).split()
    means = trained.groupby("layer").log10_residual.mean().tolist()
    assert [float(word) for word in words[2:-1]] == pytest.approx(means, rel=1e-3, abs=1e-4)
    assert float(words[-1]) == pytest.approx(trained[trained.layer == 3].growth_exponent.mean(), abs=5e-4)
    assert f"{both.disagreement.max():.1e}" in lines[-1]


def test_without_attention_alone_there_is_no_bound(make_subject):
    causal = make_subject(**ALONE, mask="causal")
    for subject, variant in ((causal, "attention_only_no_norm"), (make_subject(), "full")):
        measured = table(subject, options(variant))
        assert "log10_bound" not in measured and not measured.isna().all().any()
        (axes, _) = draw_collapse(with_who(measured, **subject.who)).axes
        assert "Theorem 2.3: slope log 3" not in {line.get_label() for line in axes.lines}
    assert "log10_bound" in table(make_subject(**ALONE, deviation=0.3), options("full", "no_mlp"))


def test_the_figure_draws_what_the_table_holds(make_subject):
    both = several(make_subject, **ALONE, deviation=0.3, layers=5)
    both["model.heads"] = both.seed.map({3: "1", 4: "4"})
    figure = draw_collapse(both, None, "model.heads")
    panels = figure.axes
    assert [axes.get_title() for axes in panels] == [
        f"{kind} weights · {heads}" for heads in ("1 head", "4 heads") for kind in ("trained", "initialised")
    ]
    drawn = {line.get_label(): line for line in panels[0].lines}
    trained = both[(both.seed == 3) & (both.weights == "trained")]
    for variant in ("full", "no_mlp"):
        wanted = trained[trained.variant == variant].log10_residual
        assert drawn[variant.replace("no_mlp", "no MLP")].get_ydata() == pytest.approx(wanted.to_numpy())
    bound = trained[trained.variant == "full"].log10_bound.dropna()
    assert drawn["Theorem 2.3: slope log 3"].get_ydata() == pytest.approx(bound.to_numpy()) and len(bound)
    low, high = panels[0].get_ylim()
    assert low <= both.log10_residual.min() and high >= both.log10_residual.max()
    ticks = {tick.get_text() for tick in panels[0].get_yticklabels()}
    assert {"$1$", "$10^{-1}$", "$10^{-10}$"} <= ticks


@pytest.mark.further
def test_the_figure_holds_for_any_depth(make_subject):
    measured = with_who(table(make_subject(**ALONE, layers=60), options("full")), **make_subject().who)
    (axes, _) = draw_collapse(measured).axes
    labels = [tick.get_text() for tick in axes.get_yticklabels()]
    assert len(labels) <= 10 and "$10^{-10^{23}}$" in labels
    assert axes.get_ylim()[0] <= measured.log10_residual.min() < -1e23
