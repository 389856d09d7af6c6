"""rankbench.measures.norms, states and attention_matrices against numpy and scipy loops, closed forms and, for what
holds for all inputs, hypothesis.

Shapes: B batch, N query token, M key token, D width, H head.
"""

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from by_hand import composite
from drawn import normal
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbench.measures import norms
from rankbench.measures.attention_matrices import ATTENTION_FLOORS, ATTENTION_METRICS, attention_metrics
from rankbench.measures.norms import composite_norm, cosine, residual_from_median, residual_matrix
from rankbench.measures.states import STATE_FLOORS, STATE_METRICS, state_metrics

# Float64 against another float64 route over at most a few hundred terms of order 1: 1e-12 is about 5000 eps.
EXACT = {"rtol": 1e-12, "atol": 1e-12}

every_seed = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 7)


def random_attention(seed, *shape):
    return torch.softmax(2 * normal(seed, *shape), -1)


def only(x_ND):
    """A batch of one sequence."""
    return torch.as_tensor(x_ND, dtype=torch.float64)[None]


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 2.0**-100), (torch.float64, 2.0**-900)])
def test_norms_do_not_underflow_where_squares_and_products_do(dtype, scale):
    x = normal(0, 4, 3).to(dtype)
    for norm in (composite_norm, norms.frobenius_norm):
        # Powers of two scale without rounding, except that the root of an odd power would not: both are even.
        torch.testing.assert_close(norm(x * scale) / scale, norm(x))


# --- states: every entry against a loop in numpy ---------------------------------------------------------------------


def entropy_rank(weights):
    return math.exp(scipy.stats.entropy(weights))  # scipy normalises the weights


def pairwise_cosine(matrix, function=float):
    pairs = itertools.combinations([row for row in matrix if np.linalg.norm(row) > 1e-12], 2)
    return np.mean([function(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs])


def reference_state_metrics(x):
    mean = x.mean(0)
    r = x - np.ones((len(x), 1)) * mean
    s, s_centred = scipy.linalg.svdvals(x), scipy.linalg.svdvals(r)
    # Eigenvalues of the Gram matrix by another algorithm; their fourth and second powers of s.
    gram = x @ x.T
    return {
        "relative_residual": composite(r) / composite(x),
        "residual": composite(r),
        "relative_residual_l1": np.linalg.norm(r, 1) / np.linalg.norm(x, 1),
        "relative_residual_linf": np.linalg.norm(r, np.inf) / np.linalg.norm(x, np.inf),
        "relative_residual_frobenius": np.linalg.norm(r) / np.linalg.norm(x),
        "residual_frobenius": np.linalg.norm(r),
        "high_frequency_energy": np.linalg.norm(r) / np.linalg.norm(np.ones((len(x), 1)) * mean),
        "stable_rank": np.linalg.norm(x) ** 2 / np.linalg.norm(x, 2) ** 2,
        "stable_rank_gram": np.linalg.norm(gram) ** 2 / np.linalg.norm(gram, 2) ** 2,
        "effective_rank": entropy_rank(s),
        "effective_rank_squared": entropy_rank(s**2),
        "effective_rank_centred": entropy_rank(s_centred),
        "effective_rank_squared_centred": entropy_rank(s_centred**2),
        "participation_ratio": np.trace(gram) ** 2 / np.trace(gram @ gram),
        "numerical_rank": float(np.linalg.matrix_rank(x)),
        "second_singular_ratio": s[1] / s[0],
        "mean_cosine": pairwise_cosine(x),
        "mean_cosine_centred": pairwise_cosine(r),
        "mean_absolute_cosine": pairwise_cosine(x, np.abs),
        "antipodal_share": pairwise_cosine(x, lambda cosine: cosine < -0.9),
    }


SHAPES = [(7, 4, 4), (4, 7, 4), (5, 5, 3), (2, 9, 2)]  # tokens, width, rank
STATES = [normal(1, 3, num_tokens, rank) @ normal(2, 3, rank, width) for num_tokens, width, rank in SHAPES]
STATES += [
    only([[1.0, 0], [0, 0], [1, 1], [0, 0]]),  # tokens of zero have no direction
    only([[0.1, 0.7], [0.2, 0.8], [0.3, 0.9]]),  # nor has, from the mean, the middle one: 0.1 + 0.3 is not twice 0.2
    only([[3.0, 4, 0], [-3, -4, 0], [0, 0, 0], [6, 8, 0]]),  # on a line, some antipodal
]


@pytest.mark.parametrize("x_BND", STATES)
def test_state_metrics_are_those_of_a_numpy_loop(x_BND):
    values = state_metrics(x_BND)
    for index, x in enumerate(x_BND.numpy()):
        expected = reference_state_metrics(x)
        assert {name: value[index].item() for name, value in values.items()} == pytest.approx(expected, rel=1e-11)
        assert values.keys() == expected.keys()


def test_state_metrics_keep_the_dtype_and_have_one_value_per_sequence():
    x_BND = normal(3, 5, 6, 4).float()
    values = state_metrics(x_BND)
    assert list(values) == list(STATE_METRICS)
    assert all(value.dtype == torch.float32 and value.shape == (5,) for value in values.values())
    double = state_metrics(x_BND.double())
    for name in values:
        # 1e-4 is about 1000 eps of float32, above the error of its SVD for this well-conditioned input.
        torch.testing.assert_close(values[name].double(), double[name], rtol=1e-4, atol=1e-4)


def test_numerical_rank_counts_what_is_above_rounding():
    def numerical_rank(x_BND):
        return state_metrics(x_BND)["numerical_rank"].item()

    # 1e-10 is above 3 eps of float64 and below 3 eps of float32.
    x_BND = only(torch.diag(torch.tensor([1.0, 1e-10, 0.0], dtype=torch.float64)))
    assert numerical_rank(x_BND) == 2
    assert numerical_rank(x_BND.float()) == 1
    # The tolerance is eps times the longer side: 5 eps counts for 2 x 2 and not for 8 x 2.
    x_BND = torch.zeros(1, 8, 2, dtype=torch.float64)
    x_BND[0, 0, 0], x_BND[0, 1, 1] = 1, 5 * 2.0**-52
    assert numerical_rank(x_BND[:, :2]) == 2
    assert numerical_rank(x_BND) == 1


# --- states: statements about all inputs -----------------------------------------------------------------------------


@every_seed
@given(seeds, sizes, sizes)
def test_residual_is_zero_if_and_only_if_all_tokens_are_equal(seed, num_tokens, width):
    collapsed_BND = normal(seed, 1, 1, width).repeat(1, num_tokens, 1)
    values = state_metrics(collapsed_BND)
    for name in ("residual", "residual_frobenius", "relative_residual", "high_frequency_energy"):
        assert values[name].item() == 0  # exactly: equal tokens have difference 0
    torch.testing.assert_close(values["mean_cosine"], torch.ones(1, dtype=torch.float64), **EXACT)
    different_BND = collapsed_BND.clone()
    different_BND[0, -1, 0] = torch.nextafter(different_BND[0, -1, 0], torch.tensor(torch.inf, dtype=torch.float64))
    values = state_metrics(different_BND)
    # even for the smallest change that float64 can hold
    assert 0 < values["residual"].item() < norms.own_rounding(different_BND).item()


def test_residual_of_a_nearly_collapsed_sequence_is_accurate_below_eps_of_the_sequence():
    # Tokens 1/3 + k ulp: the residual is known exactly although it is 1e-16 of the sequence.
    ulp = 2.0**-54
    x_BND = only(torch.tensor([[1 / 3 + k * ulp] for k in (0, 1, 2, 9)], dtype=torch.float64))
    torch.testing.assert_close(residual_matrix(x_BND)[0, :, 0] / ulp, torch.tensor([-3.0, -2, -1, 6]).double())


@every_seed
@given(seeds, sizes, sizes)
def test_median_minimises_the_one_norm_exactly(seed, num_tokens, width):
    x = normal(seed, num_tokens, width)
    # Brute force: a column sum of |X - x_d| is piecewise linear in x_d, so one of the column's entries minimises it.
    columns = [min((column - entry).abs().sum() for entry in column) for column in x.T]
    torch.testing.assert_close(norms.one_norm(residual_from_median(x)), max(columns), **EXACT)


# --- states: edges ---------------------------------------------------------------------------------------------------

DEFINED_FOR_ZERO = {"residual", "residual_frobenius", "numerical_rank"}


def test_all_zero_sequence_is_nan_where_a_metric_is_undefined():
    x_BND = normal(10, 3, 4, 5)
    x_BND[1] = 0
    values = state_metrics(x_BND)
    for name in STATE_METRICS:
        assert values[name][[0, 2]].isfinite().all()
        assert values[name][1] == 0 if name in DEFINED_FOR_ZERO else values[name][1].isnan()
    floor_B = torch.full((3,), 1e-9, dtype=torch.float64)
    values = state_metrics(x_BND, floor_B=floor_B)
    assert values["below_floor"].tolist() == [False, True, False] and values["relative_noise_floor"][1].isnan()


def test_single_token_has_no_residual_and_no_cosine():
    values = {name: value.item() for name, value in state_metrics(normal(11, 1, 1, 5)).items()}
    for name in ("residual", "relative_residual", "residual_frobenius", "high_frequency_energy"):
        assert values[name] == 0
    for name in ("stable_rank", "effective_rank", "participation_ratio", "numerical_rank"):
        assert values[name] == 1
    assert values["second_singular_ratio"] == 0
    undefined = {"mean_cosine", "mean_cosine_centred", "mean_absolute_cosine", "antipodal_share"}
    undefined |= {"effective_rank_centred", "effective_rank_squared_centred"}
    assert {name for name, value in values.items() if math.isnan(value)} == undefined
    # Undefined, and not the infinity that rounding error over zero pairs would be in some of 64 sequences.
    x_BND = normal(11, 64, 3, 50)
    x_BND[:, 1:] = 0
    assert state_metrics(x_BND)["mean_cosine"].isnan().all()


def test_high_frequency_energy_of_centred_tokens_is_infinite():
    assert state_metrics(only([[1.0, 2], [-1, -2]]))["high_frequency_energy"].item() == math.inf


def test_own_rounding_knows_its_dtype():
    x_BND = 1 + 1e-3 * normal(12, 2, 5, 3)
    ratio = norms.own_rounding(x_BND.float()).double() / norms.own_rounding(x_BND)
    # eps is 2^-23 and 2^-52; the norm itself differs by rounding.
    torch.testing.assert_close(ratio, torch.full_like(ratio, 2.0**29), rtol=1e-6, atol=0)


def test_a_given_floor_is_in_the_table_in_both_units_and_says_what_is_below():
    x_BND = normal(12, 3, 5, 3)
    floor_B = composite_norm(residual_matrix(x_BND)) * torch.tensor([0.5, 1.0, 2.0])
    values = state_metrics(x_BND, floor_B=floor_B)
    assert set(values) == {*STATE_METRICS, *STATE_FLOORS}
    assert values["below_floor"].tolist() == [False, True, True]
    torch.testing.assert_close(values["noise_floor"], floor_B)
    torch.testing.assert_close(values["relative_noise_floor"], floor_B / composite_norm(x_BND))
    p_BHNM = normal(13, 3, 2, 4, 4).softmax(-1)
    size_BH = composite_norm(p_BHNM)
    factor_BH = torch.tensor([[0.5, 2.0]] * 3)
    floor_BH = composite_norm(residual_matrix(p_BHNM)) * factor_BH
    values = attention_metrics(p_BHNM, floor_BH=floor_BH)
    assert set(values) == {*ATTENTION_METRICS, *ATTENTION_FLOORS}
    assert values["attention_below_floor"].tolist() == [[False, True]] * 3
    torch.testing.assert_close(values["attention_relative_noise_floor"], floor_BH / size_BH)


@pytest.mark.parametrize(
    "x_BND, message",
    [
        (torch.ones(3, 2), r"x_BND: got shape \(3, 2\), wanted \(B, N, D\) with no empty axis but B"),
        (torch.ones(1, 0, 2), r"x_BND: got shape \(1, 0, 2\)"),
        (torch.ones(1, 3, 2, dtype=torch.bfloat16), r"x_BND: got torch.bfloat16, allowed are torch.float32 and"),
        (torch.tensor([[[1.0, math.nan]]]), r"x_BND: got 1 nan or infinite entries, all must be finite"),
        (torch.tensor([[[math.inf, -math.inf]]]), r"x_BND: got 2 nan or infinite entries, all must be finite"),
    ],
)
def test_bad_states_are_refused(x_BND, message):
    with pytest.raises(ValueError, match=message):
        state_metrics(x_BND)


def test_empty_batch_gives_empty_columns():
    assert {value.shape for value in state_metrics(torch.ones(0, 3, 2)).values()} == {(0,)}
    assert {value.shape for value in attention_metrics(torch.ones(0, 2, 3, 3)).values()} == {(0, 2)}


# --- attention -------------------------------------------------------------------------------------------------------


def reference_attention_metrics(p, visible):
    entropies = [
        scipy.stats.entropy(row) / math.log(sees.sum()) for row, sees in zip(p, visible, strict=True) if sees.sum() > 1
    ]
    r = p - p.mean(0)
    s = scipy.linalg.svdvals(p)
    modulus = sorted(abs(scipy.linalg.eigvals(p)))
    return {
        "attention_entropy": np.mean(entropies),
        "attention_stable_rank": np.linalg.norm(p) ** 2 / np.linalg.norm(p, 2) ** 2,
        "attention_effective_rank": entropy_rank(s),
        "attention_relative_residual": composite(r) / composite(p),
        "attention_gap_eigenvalue": 1 - modulus[-2],
        "attention_gap_singular": s[0] - s[1],
    }


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_attention_metrics_are_those_of_a_numpy_loop(mask):
    distance_NM = torch.arange(6)[:, None] - torch.arange(6)
    visible_NM = {"none": distance_NM > -9, "causal": distance_NM >= 0, "window": distance_NM.abs() <= 1}[mask]
    scores_BHNM = normal(13, 2, 3, 6, 6).masked_fill(~visible_NM, -math.inf)
    p_BHNM = torch.softmax(scores_BHNM, -1)
    values = attention_metrics(p_BHNM, None if mask == "none" else visible_NM)
    for batch, head in itertools.product(range(2), range(3)):
        expected = reference_attention_metrics(p_BHNM[batch, head].numpy(), visible_NM.numpy())
        got = {name: value[batch, head].item() for name, value in values.items()}
        assert got == pytest.approx(expected, rel=1e-11) and got.keys() == expected.keys()


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_uniform_attention(size):
    values = attention_metrics(torch.full((1, 1, size, size), 1 / size, dtype=torch.float64))
    values = {name: value.item() for name, value in values.items()}
    wanted = {name: 1 for name in values} | {"attention_relative_residual": 0}
    wanted |= {"attention_entropy": math.nan} if size == 1 else {}  # there is no choice
    assert values == pytest.approx(wanted, abs=1e-12, nan_ok=True)


def test_eigenvalue_gap_of_long_causal_attention_is_exact():
    # Uniform causal attention has eigenvalues 1, 1/2, 1/3 ...; its eigenvectors are ill-conditioned as 2^N.
    p_BHNM = torch.ones(200, 200, dtype=torch.float64).tril()
    p_BHNM = (p_BHNM / p_BHNM.sum(-1, keepdim=True))[None, None]
    assert attention_metrics(p_BHNM)["attention_gap_eigenvalue"].item() == 0.5


def test_rectangular_attention_has_no_eigenvalues():
    p_BHNM = random_attention(15, 2, 3, 4, 6)
    values = attention_metrics(p_BHNM)
    assert values.pop("attention_gap_eigenvalue").isnan().all()
    assert all(value.isfinite().all() for value in values.values())


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1.0, 1e200])
def test_a_cosine_does_not_depend_on_lengths(scale):
    x, y = normal(0, 2, 5), normal(1, 2, 5)
    expected = torch.einsum("bd,bd->b", x, y) / (x.norm(dim=-1) * y.norm(dim=-1))
    torch.testing.assert_close(cosine(scale * x, y / scale), expected, **EXACT)
    assert cosine(0 * x, y).isnan().all()
