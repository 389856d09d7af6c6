"""rankbench.measures.dong_theory: bounds against brute force in big-number arithmetic, path counts against
enumerations, and concrete inputs for which the paper's bounds fail.

Shapes: N token, D width.
"""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.special
import scipy.stats
from by_hand import composite
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import sparse

from rankbench.measures import dong_theory

every = settings(max_examples=15, deadline=None)
logs = st.floats(-30, 30)
sizes = st.integers(1, 6)


def big(log10):
    return mpmath.mpf(10) ** mpmath.mpf(log10)


def log10_of(number):
    return float(mpmath.log10(number))


# Sums of a few hundred terms of size 3^6 * 30: float64 keeps 12 digits.
CLOSE = {"rel": 1e-11, "abs": 1e-9}


# --- bounds against the recursions they come from ---------------------------------------------------------------------


@every
@given(logs, logs, sizes, sizes, st.integers(1, 6))
def test_theorems_2_2_and_2_3_are_the_lemma_again_and_again(beta, residual, heads, width, layers):
    with mpmath.workdps(60):
        coefficient, bound = 4 * big(beta) * heads / mpmath.sqrt(width), big(residual)
        for _ in range(layers):
            bound = coefficient * bound**3
        assert dong_theory.thm_2_3(beta, heads, width, layers, residual) == pytest.approx(log10_of(bound), **CLOSE)
        printed = coefficient ** ((3**layers - 1) // 2) * big(residual) ** (3**layers)
        assert mpmath.almosteq(printed, bound, 1e-40)


@every
@given(logs, st.floats(-5, 5), sizes, sizes, st.integers(1, 5))
def test_corollary_3_1_is_the_largest_of_all_orders_of_cubing_and_doubling(beta, residual, heads, width, layers):
    with mpmath.workdps(60):
        leaves = []
        for order in itertools.product([True, False], repeat=layers):
            bound = big(residual)
            for cubes in order:
                bound = 8 * big(beta) * heads / mpmath.sqrt(width) * bound**3 if cubes else 2 * heads * bound
            leaves.append(bound)
        got = dong_theory.cor_3_1(beta, heads, width, layers, residual)
        assert got == pytest.approx(log10_of(max(leaves)), **CLOSE)


@every
@given(logs, logs, logs, st.floats(-3, 3))
def test_a_layer_is_lambda_times_skip_and_cube(residual, coefficient, lam, skip):
    with mpmath.workdps(60):
        wanted = big(lam) * (abs(skip) * big(residual) + big(coefficient) * big(residual) ** 3)
        got = dong_theory.layer_bound(residual, coefficient, skip, lam)
        assert got == pytest.approx(log10_of(wanted), **CLOSE)


def test_bounds_of_deep_networks_end_at_infinity_and_not_at_nan():
    for layers in (500, 1024):
        assert dong_theory.thm_2_3(1.0, 2, 16, layers, -9.0) < -1e200
        assert dong_theory.thm_2_3(1.0, 2, 16, layers, 9.0) > 1e200
        assert dong_theory.thm_2_3(-math.log10(4), 1, 1, layers, 0.0) == 0  # the fixed point
        assert dong_theory.cor_3_1(1.0, 2, 16, layers, 9.0) > 1e200


def test_arrays_are_bounded_one_by_one():
    residuals = np.array([-3.0, 0.0, 2.0])
    for bound in (dong_theory.thm_2_3, dong_theory.cor_3_1):
        one_by_one = [bound(0.5, 2, 9, 3, residual) for residual in residuals]
        assert bound(0.5, 2, 9, 3, residuals) == pytest.approx(one_by_one)
    values = ([0.1, -0.4], [0.3, 0.2], 4, 1.0, 0.2)
    one_by_one = [dong_theory.diameter_layer(residual, *values) for residual in residuals]
    assert dong_theory.diameter_layer(residuals, *values) == pytest.approx(one_by_one)


SLOPED = {
    "relu": lambda z: max(z, 0.0),
    "gelu": lambda z: z * scipy.special.ndtr(z),
    "gelu_new": lambda z: z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))),
    "silu": lambda z: z * scipy.special.expit(z),
    "quick_gelu": lambda z: z * scipy.special.expit(1.702 * z),
}


@pytest.mark.parametrize("name", SLOPED)
def test_activation_constants_are_the_largest_slopes(name):
    act = SLOPED[name]
    z = np.linspace(-6, 6, 12001)
    slopes = np.diff([act(number) for number in z]) / np.diff(z)
    # a difference quotient is a mean slope over 1e-3, short of the largest by |f'''| 1e-6 / 24 at the most
    assert slopes.max() == pytest.approx(dong_theory.ACTIVATION_LIPSCHITZ[name], abs=2e-7)
    assert slopes.max() <= dong_theory.ACTIVATION_LIPSCHITZ[name] * (1 + 1e-12)  # rounding of a quotient over 1e-3


# --- one layer of attention against its bounds ------------------------------------------------------------------------


one_norm, inf_norm = (functools.partial(np.linalg.norm, ord=order) for order in (1, np.inf))


def attend(x_ND, w_qk_HDD, w_HDD, bias_HD, d_qk):
    """sum_h softmax(X W_QK X^T / sqrt d + 1 (X b)^T / sqrt d) X W_h, of the paper's eq. 5."""
    heads = zip(w_qk_HDD, w_HDD, bias_HD, strict=True)
    return sum(
        scipy.special.softmax((x_ND @ w_qk @ x_ND.T + bias @ x_ND.T) / math.sqrt(d_qk), -1) @ x_ND @ w
        for w_qk, w, bias in heads
    )


def drawn(seed, spread):
    """A random layer and input; spread: how far from collapse and how sharp."""
    rng = np.random.default_rng(seed)
    tokens, width, heads = rng.integers(2, 9), rng.integers(1, 7), rng.integers(1, 4)
    x = rng.standard_normal(width) + spread * rng.standard_normal((tokens, width)) ** 3
    w_qk, w = rng.standard_normal((2, heads, width, width)) ** 3
    return x, w_qk, w, 3 * rng.standard_normal((heads, width)), int(rng.integers(1, 9))


def diameter(x):
    return np.abs(x[:, None] - x[None]).sum(-1).max()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1e-4, 1e-2, 0.1, 0.3, 1.0, 3.0, 10.0]), st.booleans())
def test_the_diameter_bound_holds_for_every_input(seed, spread, skip):
    x, w_qk, w, bias, d_qk = drawn(seed, spread)
    got = attend(x, w_qk, w, bias, d_qk) + skip * x
    scores, values = np.log10(np.abs(w_qk).max((1, 2))), np.log10([inf_norm(w_DD) for w_DD in w])
    bound = dong_theory.diameter_layer(np.log10(diameter(x)), scores, values, d_qk, float(skip))
    # rounding: a few eps of the states' size, not of their diameter
    assert diameter(got) <= 10 ** float(bound) * (1 + 1e-9) + 1e-13 * sum(map(inf_norm, w)) * np.abs(x).sum(1).max()


def test_the_diameter_bound_is_attained():
    """Two tokens +-a of width 1: x -> x tanh(a^2), so delta' = delta tanh(delta^2 / 4)."""
    for a in (1e-3, 0.5, 2.0, 5.0):
        x, unit_111 = np.array([[a], [-a]]), np.ones((1, 1, 1))
        got = diameter(attend(x, unit_111, unit_111, np.zeros((1, 1)), 1))
        bound = 10 ** dong_theory.diameter_layer(np.log10(2 * a), [0.0], [0.0], 1)
        assert got == pytest.approx(bound, rel=1e-9)  # tanh(1e-6) in float64, from differences of e^1e-6


def test_tiny_diameters_are_cubed_far_below_float64():
    assert dong_theory.diameter_layer(-400.0, [0.0], [0.0], 1) == pytest.approx(-1200 - math.log10(4))
    assert dong_theory.diameter_layer(50.0, [0.0], [0.0], 1) == pytest.approx(50)  # tanh is 1
    assert dong_theory.diameter_layer(-400.0, [0.0], [0.0], 1, masked=True) == pytest.approx(-400)


# --- inputs for which the paper's bounds fail -------------------------------------------------------------------------


def hub_layer(followers, hub_share, tilt):
    """One head of width D = followers + 1 and N = 4 followers + 1 tokens. Token 0, the hub, holds `hub_share` of q; as
    many followers as `followers` hold the rest and see themselves by `tilt` more than others do; 3 followers stand at
    the centre and see everyone by q. Values read the hub's coordinate alone. d_qk = 1, R = the unit vectors and 0."""
    width = followers + 1
    r = np.vstack([np.eye(width), np.zeros((3 * followers, width))])
    w_qk = np.diag([0.0] + [tilt] * followers)
    values = np.zeros((width, width))
    values[0, 0] = 1
    # tokens at the centre have the bias 0; a shift of 50 leaves them e^-50 of q
    bias = 50 + np.log([hub_share] + [(1 - hub_share) / followers] * followers)
    return r, w_qk, values, bias


def hub_output(followers, hub_share, tilt):
    """What the layer above gives in coordinate 0: (followers, everyone else), by symmetry, without the matrices."""
    own = (1 - hub_share) / followers
    return hub_share / (1 + own * math.expm1(tilt)), hub_share


def test_the_hub_layers_symmetry():
    r, w_qk, values, bias = hub_layer(20, 0.9, 8.0)
    got = attend(r, [w_qk], [values], [bias], 1)
    followers, others = hub_output(20, 0.9, 8.0)
    wanted = np.array([others] + [followers] * 20 + [others] * 60)
    assert got[:, 0] == pytest.approx(wanted, rel=1e-12) and not got[:, 1:].any()
    assert one_norm(r) == inf_norm(r) == 1 and one_norm(w_qk) == 8 and composite(values) == 1


@pytest.mark.parametrize(("followers", "tilt", "ratio"), [(10**4, 14.5, 1.4), (10**6, 20.0, 9.0)])
def test_theorem_2_2_fails_for_one_head_and_one_layer(followers, tilt, ratio):
    """The followers' shift of P adds up over tokens in the 1-norm, sqrt(N); the bound grows with the tilt, log N."""
    followers_at, others_at = hub_output(followers, 0.93, tilt)
    apart = others_at - followers_at
    # no centre x leaves less: c of the way, best by brute force; both norms have 1 column
    c = np.linspace(0, apart, 10001)
    sums, largest = followers * np.abs(apart - c) + (3 * followers + 1) * c, np.maximum(apart - c, c)
    measured = np.sqrt((sums * largest).min())
    bound = 10 ** dong_theory.thm_2_3(math.log10(tilt), 1, 1, 1, 0.0)
    assert bound == pytest.approx(4 * tilt)
    assert measured > ratio * bound


def test_theorem_2_3_fails_for_two_heads():
    """Two tokens +-u, u = a (1, ..., 1), W_1 = I and W_2 = 1 e_1^T / sqrt D: each head has composite norm 1, but one
    fills the 1-norm's bound and the other the inf-norm's; the residual is D^(1/4) / 16 of the bound."""
    width, tilt = 2**20, 1e-3
    u = sparse.csr_array(np.full((1, width), math.sqrt(tilt / width)))
    at = np.arange(width), np.zeros(width, dtype=int)
    spread = sparse.csr_array((np.full(width, width**-0.5), at), shape=(width, width))
    w = [sparse.eye_array(width, format="csr"), spread]
    sums = [(abs(w_DD).sum(0).max(), abs(w_DD).sum(1).max()) for w_DD in w]
    assert [math.sqrt(a * b) for a, b in sums] == pytest.approx([1, 1])
    # W_QK = I and d_qk = 1: E = +-tilt, P X = +-tanh(tilt) u
    assert (u @ u.T).toarray() == pytest.approx(tilt)
    row = math.tanh(tilt) * sum((u @ w_DD).toarray()[0] for w_DD in w)
    measured = composite(np.stack([row, -row]))  # the mean of two tokens is the best centre for both norms
    residual = composite(np.stack([u.toarray()[0], -u.toarray()[0]]))
    bound = 10 ** dong_theory.thm_2_3(0.0, 2, 1, 1, math.log10(residual))
    assert measured == pytest.approx(2 * bound, rel=0.02)


def test_corollary_3_1_fails_for_one_head():
    """The (1,inf) norm has no triangle inequality: two tokens +-u and W = 1 e_1^T / sqrt D."""
    width = 2000
    a = 1 / math.sqrt(8 * width)  # u W_QK u^T = 1/8
    x = np.stack([np.full(width, a), np.full(width, -a)])
    w = np.zeros((width, width))
    w[:, 0] = width**-0.5
    got = x + attend(x, [np.eye(width)], [w], [np.zeros(width)], 1)
    bound = 10 ** dong_theory.cor_3_1(math.log10(composite(w)), 1, 1, 1, math.log10(composite(x)))
    assert composite(got - got.mean(0)) > 1.2 * bound
    proved = 10 ** dong_theory.diameter_layer(np.log10(diameter(x)), [0.0], [math.log10(inf_norm(w))], 1, skip=1.0)
    assert diameter(got) <= proved


# --- paths ------------------------------------------------------------------------------------------------------------


def test_without_skips_all_paths_have_the_whole_length():
    got = dong_theory.path_length_distribution(3, 2, skip=False)
    assert (10**got.log10_count).tolist() == pytest.approx([0, 0, 0, 8])
    assert got.share.tolist() == got.cumulative_share.tolist() == [0, 0, 0, 1]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 1024), st.integers(1, 65536))
@example(96, 96)
@example(1024, 65536)
def test_path_lengths_are_binomial_however_many_there_are(layers, heads):
    got = dong_theory.path_length_distribution(layers, heads)
    length = np.arange(layers + 1)
    # scipy by log-gamma: about 1e-16 of the logarithm, which is 1e4 at the most
    whole, taken, skipped = (scipy.special.gammaln(number + 1) for number in (layers, length, layers - length))
    log_count = whole - taken - skipped + length * math.log(heads)
    assert got.log10_count == pytest.approx(log_count / math.log(10), rel=1e-11, abs=1e-11)
    wanted = scipy.stats.binom(layers, heads / (heads + 1)).pmf(length)
    assert got.share == pytest.approx(wanted, rel=1e-8, abs=1e-300)  # scipy's error grows with the logarithm
    assert got.cumulative_share == pytest.approx(np.cumsum(got.share), rel=1e-13) and got.cumulative_share[-1] == 1
