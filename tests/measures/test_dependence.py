"""rankbench.measures.dependence against definitions written out as loops, closed forms of Gaussian laws, and numpy.

Shapes: N observation, D and E width.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.special import digamma

from rankbench.measures.dependence import (
    alignment,
    correlation,
    covariance,
    gaussian_gram,
    gaussian_information,
    ksg_information,
    linear_gram,
    near_one,
    unbiased_hsic,
    whitened,
)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def correlated(seed, number, rho, pairs=1):
    """x and y of `pairs` columns each, every column pair with correlation rho."""
    x, noise = normal(seed, number, pairs), normal(seed + 10_000, number, pairs)
    return x, rho * x + math.sqrt(1 - rho**2) * noise


# --- covariance ---------------------------------------------------------------------------------------------------


def test_covariance_and_correlation_are_traces_of_numpys_matrix():
    x, y = 3 + normal(0, 40, 5), normal(1, 40, 5) @ normal(2, 5, 5) - 7
    blocks = np.cov(x.T, y.T)
    assert covariance(x, y) == pytest.approx(np.trace(blocks[:5, 5:]), rel=1e-12)
    scale = math.sqrt(np.trace(blocks[:5, :5]) * np.trace(blocks[5:, 5:]))
    assert correlation(x, y) == pytest.approx(np.trace(blocks[:5, 5:]) / scale, rel=1e-12)
    assert correlation(x, -2 * x + 1) == pytest.approx(-1, abs=1e-12)
    assert math.isnan(correlation(x, np.ones_like(x)))


# --- components -----------------------------------------------------------------------------------------------------


def test_whitened_components_are_uncorrelated_leading_and_of_variance_one():
    scales = np.array([9.0, 4.0, 1.0, 0.1])
    x = normal(3, 500, 4) * scales + 5
    scores = whitened(x, 2)
    np.testing.assert_allclose(np.cov(scores.T), np.eye(2), atol=1e-12)
    leading = np.linalg.eigh(np.cov(x.T))[1][:, :-3:-1]
    correlations = np.abs(np.corrcoef((x @ leading).T, scores.T)[:2, 2:])
    np.testing.assert_allclose(correlations, np.eye(2), atol=1e-10)


def test_components_within_rounding_are_left_out():
    x = (1000 + 1e-6 * normal(4, 50, 3)).astype(np.float32)  # moves by less than float32's rounding of 1000
    assert whitened(x, 3).shape == (50, 0)
    assert whitened(x.astype(np.float64) + 1e-2 * normal(5, 50, 3), 3).shape == (50, 3)
    assert whitened(normal(6, 50, 1) @ normal(7, 1, 4), 3).shape == (50, 1)  # rank one
    assert math.isnan(gaussian_information(whitened(x, 3), normal(8, 50, 2)))
    assert math.isnan(ksg_information(whitened(x, 3), normal(8, 50, 2)))


# --- information ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rho", "pairs", "number"), [(0.0, 3, 12), (0.6, 2, 10), (0.9, 1, 6)])
def test_gaussian_information_is_unbiased_however_few_the_observations(rho, pairs, number):
    estimates = [gaussian_information(*correlated(seed, number, rho, pairs)) for seed in range(1500)]
    wanted = -0.5 * pairs * math.log(1 - rho**2)
    # four standard errors of a mean over 1500 draws
    assert np.mean(estimates) == pytest.approx(wanted, abs=4 * np.std(estimates) / math.sqrt(1500))


def test_gaussian_information_is_a_ratio_of_determinants():
    x, y = correlated(1, 200, 0.7, 3)
    blocks = np.cov(x.T, y.T)
    raw = sum(np.linalg.slogdet(block)[1] for block in (blocks[:3, :3], blocks[3:, 3:]))
    raw = (raw - np.linalg.slogdet(blocks)[1]) / 2
    bias = sum(digamma((200 - i) / 2) for i in (1, 2, 3)) - sum(digamma((200 - i) / 2) for i in (4, 5, 6))
    assert gaussian_information(x, y) == pytest.approx(raw - bias / 2, rel=1e-10)
    assert gaussian_information(x @ normal(2, 3, 3), y) == pytest.approx(gaussian_information(x, y), rel=1e-9)
    assert gaussian_information(x, x @ normal(2, 3, 3)) == math.inf
    assert math.isnan(gaussian_information(x[:6], y[:6]))


def ksg_by_loops(x, y, k):
    terms = []
    for i in range(len(x)):
        dx, dy = np.abs(x - x[i]).max(1), np.abs(y - y[i]).max(1)
        radius = sorted(max(a, b) for j, (a, b) in enumerate(zip(dx, dy, strict=True)) if j != i)[k - 1]
        counts = [sum(d[j] < radius for j in range(len(x)) if j != i) for d in (dx, dy)]
        terms.append(sum(digamma(count + 1) for count in counts))
    return digamma(k) + digamma(len(x)) - np.mean(terms)


@pytest.mark.parametrize("k", [1, 4])
def test_ksg_by_loops(k):
    x, y = correlated(3, 70, 0.5, 2)
    assert ksg_information(x, y, k) == pytest.approx(ksg_by_loops(x, y, k), rel=1e-12)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_ksg_of_two_gaussian_numbers(rho):
    estimates = [ksg_information(*correlated(seed, 1000, rho), 4) for seed in range(20)]
    # Kraskov et al. 2004 find a bias far below the spread here: four standard errors
    assert np.mean(estimates) == pytest.approx(-0.5 * math.log(1 - rho**2), abs=4 * np.std(estimates) / math.sqrt(20))
    assert np.std(estimates) < 0.05


def test_ksg_of_discrete_values_and_of_few_is_not_determined():
    x, y = normal(0, 1000, 1), normal(1, 1000, 1)
    assert math.isnan(ksg_information(np.sign(x), np.sign(y)))
    assert math.isnan(ksg_information(x[:4], y[:4], 4))


# --- HSIC -------------------------------------------------------------------------------------------------------------


def test_unbiased_hsic_is_the_mean_over_all_quadruples_of_different_observations():
    x, y = correlated(5, 7, 0.8, 2)
    for gram in (linear_gram, gaussian_gram):
        k, m = gram(x), gram(y)
        quadruples = itertools.permutations(range(7), 4)
        wanted = np.mean([k[a, b] * (m[a, b] + m[c, d] - 2 * m[a, c]) for a, b, c, d in quadruples])
        assert unbiased_hsic(k, m) == pytest.approx(wanted, rel=1e-10, abs=1e-14)
    with pytest.raises(ValueError, match="got 3 observations, wanted at least 4"):
        unbiased_hsic(k[:3, :3], m[:3, :3])


def test_alignment_of_linear_kernels():
    x, y = correlated(7, 1500, 0.8, 3)
    turn = np.linalg.qr(normal(8, 3, 3))[0]
    aligned = alignment(linear_gram(x), linear_gram(y))
    assert aligned == pytest.approx(0.8**2, abs=0.05)  # ||.8 I||^2 / (||I|| ||I||), to a few of 1/sqrt(1500)
    assert alignment(linear_gram(x), linear_gram(3 * x @ turn + 1)) == pytest.approx(1, abs=1e-9)
    assert alignment(linear_gram(5 * x @ turn), linear_gram(y - 2)) == pytest.approx(aligned, rel=1e-9)
    assert math.isnan(alignment(linear_gram(x), linear_gram(np.ones_like(x))))


def test_gaussian_gram_by_loops():
    x = normal(9, 9, 3)
    distances = [np.linalg.norm(a - b) for a, b in itertools.combinations(x, 2)]
    wanted = [[math.exp(-(np.linalg.norm(a - b) ** 2) / (2 * np.median(distances) ** 2)) for b in x] for a in x]
    np.testing.assert_allclose(gaussian_gram(x), wanted, rtol=1e-12)
    assert np.isnan(gaussian_gram(np.ones((5, 2)))).all()


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**600])  # squares underflow, overflow
def test_measures_without_a_scale_do_not_change_with_it(scale):
    x, y = normal(0, 20, 3), normal(1, 20, 3)
    assert correlation(scale * x, y / scale) == correlation(x, y)
    assert (gaussian_gram(near_one(scale * x)) == gaussian_gram(near_one(x))).all()
    aligned = alignment(linear_gram(x), linear_gram(y))
    assert alignment(linear_gram(near_one(scale * x)), linear_gram(y)) == pytest.approx(aligned, rel=1e-12)
