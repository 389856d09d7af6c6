"""Dependence between two random vectors: estimators on arrays of paired observations.

x_ND and y_NE hold N observations, one a row. The unbiased estimators assume that rows are independent draws.
Information is in nats. A number that the data do not determine (constant vector, equal observations) is nan.

Shapes: N observation, D and E width, R principal component.
"""

import math

import numpy as np
import scipy

Array = np.ndarray

# Rounding error that a few layers leave in a state, in units of eps: less variation than this is not a signal.
ROUNDINGS = 10


def near_one(x_ND: Array) -> Array:
    """x times the power of two that brings its largest entry to about 1. Squares then neither overflow nor vanish, and
    results that do not depend on the scale stay the same bit for bit."""
    return np.ldexp(x_ND, -np.frexp(np.abs(x_ND).max())[1])


def covariance(x_ND: Array, y_ND: Array) -> float:
    """Sum over coordinates of their covariance, tr Cov(x, y) = E<x - Ex, y - Ey>, unbiased; in units of x times y.

    The spread of a sum s is the sum of this over all pairs of its terms: E||s - Es||^2.
    """
    return float(((x_ND - x_ND.mean(0)) * (y_ND - y_ND.mean(0))).sum() / (len(x_ND) - 1))


def correlation(x_ND: Array, y_ND: Array) -> float:
    """tr Cov(x, y) / sqrt(tr Cov(x, x) tr Cov(y, y)), in [-1, 1]; nan if one of them does not vary."""
    x_ND, y_ND = near_one(x_ND), near_one(y_ND)
    scale = math.sqrt(covariance(x_ND, x_ND) * covariance(y_ND, y_ND))
    return covariance(x_ND, y_ND) / scale if scale > 0 else math.nan


def whitened(x_ND: Array, components: int) -> Array:
    """The leading principal components of x, each of sample variance 1; (N, R), R <= components.

    Whitening is invertible and does not change mutual information; dropping components does. Directions in which x
    varies by no more than its rounding are dropped, so R = 0 for a constant.
    """
    wide_ND = x_ND.astype(np.float64)
    u_NR, s_R, _ = np.linalg.svd(wide_ND - wide_ND.mean(0), full_matrices=False)
    rounding = ROUNDINGS * np.finfo(x_ND.dtype).eps * np.linalg.norm(wide_ND)
    rank = min(components, int((s_R > rounding).sum()))
    return u_NR[:, :rank] * math.sqrt(len(x_ND) - 1)


def gaussian_information(x_ND: Array, y_NE: Array) -> float:
    """Mutual information in nats, unbiased for jointly Gaussian x and y; for others it only sees correlations.

    -1/2 sum log(1 - rho^2) over the canonical correlations rho, less its exact bias under Gaussian data: the
    log-determinant of a D-dimensional sample covariance with v = N - 1 degrees of freedom is off by
    sum_{i=1..D} digamma((v + 1 - i)/2) + D log(2/v) (Wishart), and the terms in log(2/v) cancel. The correction
    also holds after `whitened` if x and y are independent. Can be negative by chance; inf if y is a linear function of
    x; nan if a vector has no components, or N <= D + E.
    """
    (num, width), height = x_ND.shape, y_NE.shape[1]
    if min(width, height) == 0 or num <= width + height:
        return math.nan
    bases = [np.linalg.qr(z - z.mean(0))[0] for z in (x_ND, y_NE)]
    rho = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).clip(max=1)
    if rho.max() ** 2 >= 1 - num * np.finfo(np.float64).eps:
        return math.inf
    terms = scipy.special.digamma((num - np.arange(1, width + height + 1)) / 2)
    bias = (terms[:width].sum() + terms[:height].sum() - terms.sum()) / 2
    return float(-0.5 * np.log1p(-(rho**2)).sum() - bias)


def ksg_information(x_ND: Array, y_NE: Array, neighbours: int = 4) -> float:
    """Mutual information in nats by nearest neighbours, for continuous x and y of any distribution.

    Kraskov, Stoegbauer & Grassberger 2004, estimator 1: digamma(k) + digamma(N) - mean of digamma(n_x + 1) +
    digamma(n_y + 1), n_x observations nearer in x than the k-th neighbour is in (x, y), all in the maximum norm.
    Almost unbiased for independent x and y; too small for dependent ones in many dimensions. nan if k or more
    observations coincide with another one, because x and y are then not continuous.
    """
    num = len(x_ND)
    if min(x_ND.shape[1], y_NE.shape[1]) == 0 or num <= neighbours:
        return math.nan
    z = np.hstack([x_ND, y_NE])
    cKDTree, digamma = scipy.spatial.cKDTree, scipy.special.digamma
    distance_N = cKDTree(z).query(z, neighbours + 1, p=np.inf)[0][:, -1]  # the first neighbour is itself
    if distance_N.min() == 0:
        return math.nan
    nearer_N = np.nextafter(distance_N, 0)
    counts = (cKDTree(part).query_ball_point(part, nearer_N, p=np.inf, return_length=True) for part in (x_ND, y_NE))
    # the count includes the observation itself: n + 1
    return float(digamma(neighbours) + digamma(num) - sum(digamma(count_N).mean() for count_N in counts))


def linear_gram(x_ND: Array) -> Array:
    """Inner products <x_i, x_j> of the centred observations; (N, N)."""
    centred_ND = x_ND - x_ND.mean(0)
    return centred_ND @ centred_ND.T


def gaussian_gram(x_ND: Array) -> Array:
    """exp(-||x_i - x_j||^2 / (2 m^2)), m the median distance of two observations; (N, N), nan if m = 0."""
    distances = scipy.spatial.distance.pdist(x_ND)
    median = np.median(distances)
    if median == 0:
        return np.full((len(x_ND), len(x_ND)), math.nan)
    return np.exp(-(scipy.spatial.distance.squareform(distances / median) ** 2) / 2)


def unbiased_hsic(k_NN: Array, l_NN: Array) -> float:
    """Hilbert-Schmidt independence criterion of two Gram matrices, unbiased; mean 0 for independent x and y.

    Song et al. 2012, eq. 5: with zero diagonals, [tr KL + 1'K1 1'L1 / ((N-1)(N-2)) - 2/(N-2) 1'KL1] / (N(N-3)).
    Raises ValueError for fewer than 4 observations.
    """
    num = len(k_NN)
    if num < 4:
        raise ValueError(f"unbiased_hsic: got {num} observations, wanted at least 4")
    k_N, l_N = k_NN.sum(1) - k_NN.diagonal(), l_NN.sum(1) - l_NN.diagonal()
    trace = np.vdot(k_NN, l_NN) - k_NN.diagonal() @ l_NN.diagonal()
    total = trace + k_N.sum() * l_N.sum() / ((num - 1) * (num - 2)) - 2 * (k_N @ l_N) / (num - 2)
    return float(total) / (num * (num - 3))


def alignment(k_NN: Array, l_NN: Array) -> float:
    """Debiased centred kernel alignment, HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), each unbiased; at most about 1.

    Kornblith et al. 2019 with the estimator of Nguyen et al. 2021. With linear_gram: linear CKA, the squared cosine of
    the two Gram matrices. nan if one of them does not vary.
    """
    scale = unbiased_hsic(k_NN, k_NN) * unbiased_hsic(l_NN, l_NN)
    return unbiased_hsic(k_NN, l_NN) / math.sqrt(scale) if scale > 0 else math.nan
