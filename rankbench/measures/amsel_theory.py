"""Closed forms on the rank of attention heads (Amsel, Yehudai and Bruna), without any model.

The task is to return the one of two orthonormal points x_1, x_2 on the sphere S^(d-1) that is nearer to a uniform query
y. With u = (x_1 - x_2) / sqrt 2, a head T gives a function of u and y, and
E||f - T||^2 >= E(sgn(u.y) - sqrt 2 u.T)^2 / 2. An error here is therefore half of a squared distance from the kernel
sgn(u.y), with squares summed over coordinates. On the sphere, sgn(u.y) = sum over odd l of eta_l sum over i of
Y_li(u) Y_li(y). The harmonics Y, N(d, l) of degree l, are orthonormal under the uniform distribution;
eta_l = (-1)^((l-1)/2) B(l/2, d/2) / pi; sum eta_l^2 N(d, l) = 1.
"""

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import scipy
import torch
from torch import Tensor

DEGREES = 2001  # default degree up to which sums are taken; the remainder is bounded
HIGHEST = 21  # degree of the functions of generalised heads
NEGLIGIBLE = 3e-4  # part of sgn for which heads need no function of a degree
MOST_RIDGES = 700  # ridge functions of one degree, whose least squares take a second
FORMS = ("sharp", "slide", "any")


def num_harmonics(dimension: int, degree: int) -> int:
    """N(d, l) = C(l+d-1, d-1) - C(l+d-3, d-1): dimension of the harmonics of degree l on S^(d-1)."""
    return math.comb(degree + dimension - 1, dimension - 1) - math.comb(degree + dimension - 3, dimension - 1)


def num_seen(rank: int, degree: int, form: str) -> int:
    """M: number of harmonics of degree l to which a head of rank r need not be orthogonal.

    sharp: C(r+l-1, l), homogeneous polynomials in r variables, if value maps are multiples of the identity. slide:
    C(r+l, l), the lemma as printed. any: sum over k in {l-2, l, l+2} of C(r+k-1, k), for every value map.
    """
    if form == "slide":
        return math.comb(rank + degree, degree)
    degrees = (degree,) if form == "sharp" else (degree - 2, degree, degree + 2)
    return sum(math.comb(rank + k - 1, k) for k in degrees if k >= 0)


@lru_cache(maxsize=64)
def _spectrum(dimension: int, degrees: int) -> tuple[list[int], list[int], np.ndarray]:
    """Odd degrees, N(d, l) of each, and eta_l^2 N(d, l): the share of sgn at that degree."""
    odd = list(range(1, degrees + 1, 2))
    numbers = [num_harmonics(dimension, degree) for degree in odd]
    shares = [
        math.exp(2 * scipy.special.betaln(degree / 2, dimension / 2) - 2 * math.log(math.pi) + math.log(n))
        for degree, n in zip(odd, numbers, strict=True)
    ]
    return odd, numbers, np.array(shares)


def lower_bound(dimension: int, rank: int, heads: int, form: str, degrees: int = DEGREES) -> float:
    """The least error of H heads of rank r.

    L / 2 with L = sum over odd l of eta_l^2 max(0, N(d, l) - H M(d, l)). Terms up to `degrees` are added. Of the rest,
    1 - sum eta_l^2 N in total, heads can take at most the share H M / N of the first degree that is left out, since
    C(r+k-1, k) / N(d, l), k - l fixed, falls with l while r < d (slide: r + 1 in place of r).
    """
    odd, numbers, shares = _spectrum(dimension, degrees)
    taken = sum(
        share * min(1.0, heads * num_seen(rank, degree, form) / n)
        for degree, n, share in zip(odd, numbers, shares, strict=True)
    )
    rest, following = max(0.0, 1.0 - shares.sum()), odd[-1] + 2
    rank_of_power = rank + (form == "slide")
    highest = following + 2 if form == "any" else following
    seen = (3 if form == "any" else 1) * math.comb(rank_of_power + highest - 1, highest)
    falls = rank_of_power < dimension
    of_rest = min(1.0, heads * seen / num_harmonics(dimension, following)) if falls else 1.0
    return max(0.0, float(1.0 - taken - rest * of_rest)) / 2


def fewest_heads(dimension: int, rank: int, error: float, form: str) -> float:
    """The smallest H whose lower bound is at most `error`; fewer heads cannot reach it. inf beyond 10^300."""
    if lower_bound(dimension, rank, 1, form) <= error:
        return 1
    low, high = 1, 2
    while lower_bound(dimension, rank, high, form) > error:
        low, high = high, high * 2
        if high > 10**300:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if lower_bound(dimension, rank, middle, form) > error else (low, middle)
    return high


def agreement(dimension: int) -> float:
    """kappa = E[sgn(u.y) sgn(q.u) sgn(q.y)] = (2/pi) E asin|u.y|: agreement of a random rank-1 head q with the answer.

    The head is right with probability (1 + kappa) / 2.
    """
    return _mean_over_cosine(lambda t: 2 / math.pi * math.asin(t), dimension)


def likeness(dimension: int) -> float:
    """rho = E[(2/pi asin(q.q'))^2]: the mean product of two random rank-1 heads."""
    return _mean_over_cosine(lambda t: (2 / math.pi * math.asin(t)) ** 2, dimension)


def equal_weights(dimension: int, heads: int) -> float:
    """Mean error of H random rank-1 heads that share the best common weight, with the points' mean added:
    (1 - H kappa^2 / (1 + (H - 1) rho)) / 2."""
    return (1 - heads * agreement(dimension) ** 2 / (1 + (heads - 1) * likeness(dimension))) / 2


def optimal_weights(queries_HD: Tensor) -> float:
    """Error of the rank-1 heads with these unit vectors, each with its own best weight, with the points' mean added:
    (1 - b^T G^-1 b) / 2, b_h = kappa, G_hk = (2/pi asin(q_h.q_k))^2."""
    cosine_HH = (queries_HD @ queries_HD.T).clamp(-1, 1)
    gram_HH = (2 / math.pi * cosine_HH.asin()).square().fill_diagonal_(1).cpu()  # asin loses half of the digits near 1
    b_H = torch.full((len(queries_HD),), agreement(queries_HD.shape[1]), dtype=queries_HD.dtype)
    return (1 - (b_H @ torch.linalg.lstsq(gram_HH, b_H[:, None], driver="gelsd").solution).item()) / 2


def num_ridges(rank: int, degree: int) -> int:
    """Number of random ridge functions that span what a head of rank r sees of a degree; twice their dimension, because
    as many as the dimension would be nearly dependent."""
    return 1 if rank == 1 else 2 * num_seen(rank, degree, "sharp")


def best_heads(bases_HRD: Tensor, generator: torch.Generator) -> Callable[[Tensor, Tensor], Tensor]:
    """Sum of the best generalised heads with these orthonormal bases: a function of u and y, both (B, D), with values
    (B,). Their error is half of its mean squared distance to sgn(u.y).

    A generalised head (Theorem 2) is any function of y and of the tokens seen through a map of rank r. If its value map
    is a multiple of the identity, it gives any function of y and of the r coordinates K u. The best sum is, for each y,
    the projection of sgn(u.y) onto sums of such functions. It is taken degree by degree: the functions of degree l that
    a head sees are spanned by zonal functions P_l(k.u) with k in the span of K; by Funk and Hecke,
    E P_l(k.u) P_l(k'.u) = P_l(k.k') / N and E P_l(k.u) sgn(u.y) = eta_l P_l(k.y). Degrees that hold a negligible part
    of sgn for these heads, or need too many functions, are left out. What is left is still a sum of such heads.
    """
    heads, rank, dimension = bases_HRD.shape
    parts = []
    for degree, number, share in zip(*_spectrum(dimension, HIGHEST), strict=True):
        part_seen = share * min(1.0, heads * num_seen(rank, degree, "sharp") / number)
        ridges = min(num_ridges(rank, degree), math.ceil(2 * number / heads))  # twice all harmonics are enough, too
        if part_seen < NEGLIGIBLE or heads * ridges > MOST_RIDGES:
            continue
        directions_KD = bases_HRD[:, 0]
        if rank > 1:
            mix_HKR = torch.randn(heads, ridges, rank, generator=generator, dtype=bases_HRD.dtype)
            directions_KD = ((mix_HKR / mix_HKR.norm(dim=2, keepdim=True)) @ bases_HRD).flatten(0, 1)
        gram_KK = zonal(directions_KD @ directions_KD.T, degree, dimension)
        signed = (-1) ** (degree // 2) * math.sqrt(share * number)  # eta_l N
        parts.append((degree, directions_KD, signed * torch.linalg.pinv(gram_KK, rtol=1e-9, hermitian=True)))

    def total(u_BD: Tensor, y_BD: Tensor) -> Tensor:
        sum_B = u_BD.new_zeros(len(u_BD))
        for degree, k_KD, weights_KK in parts:
            seen_BK, wanted_BK = (zonal(x_BD @ k_KD.T, degree, dimension) for x_BD in (u_BD, y_BD))
            sum_B += (seen_BK * (wanted_BK @ weights_KK)).sum(1)
        return sum_B

    return total


def zonal(cosine: Tensor, degree: int, dimension: int) -> Tensor:
    """Gegenbauer polynomial P_l of S^(d-1) with P_l(1) = 1, at these cosines."""
    before, value = torch.ones_like(cosine), cosine
    for k in range(1, degree):
        before, value = value, ((2 * k + dimension - 2) * cosine * value - k * before) / (k + dimension - 2)
    return value


def majority_vote(dimension: int, heads: int) -> float:
    """Error of the majority vote of H random rank-1 heads for a point: 2 P(wrong); a coin decides a draw.

    Given |u.y| = t, heads are right independently with probability 1/2 + asin(t) / pi.
    """

    def wrong(t: float) -> float:
        right = 0.5 + math.asin(t) / math.pi
        below = scipy.special.bdtr((heads - 1) // 2, heads, right)
        if heads % 2:
            return below
        half = heads // 2
        gammaln, xlogy = scipy.special.gammaln, scipy.special.xlogy
        log_draw = gammaln(heads + 1) - 2 * gammaln(half + 1) + xlogy(half, right)
        return below + math.exp(log_draw + xlogy(half, 1 - right)) / 2

    return 2 * _mean_over_cosine(wrong, dimension)


def _mean_over_cosine(function: Callable[[float], float], dimension: int) -> float:
    """Mean of a function of |u.y| = sin(angle), u and y uniform on S^(d-1): the angle's density is like cos^(d-2)."""

    def weighted(angle: float) -> float:
        return function(math.sin(angle)) * math.cos(angle) ** (dimension - 2)

    mean, _ = scipy.integrate.quad(weighted, 0, math.pi / 2, epsabs=1e-13, epsrel=1e-12, limit=500)
    return mean / (scipy.special.beta(0.5, (dimension - 1) / 2) / 2)


def angle_limit(dimension: int, rank: int) -> float:
    """arccos(-sqrt(r/d)) in degrees: the largest angle of a matrix of rank r to the identity."""
    return math.degrees(math.acos(-math.sqrt(rank / dimension)))


def low_rank_attention_error(p_NN: Tensor, rank: int) -> float:
    """||softmax(S) - P||_F / ||P||_F for the scores S of this rank nearest to log P (Frobenius), rows centred.

    An upper bound on what heads of rank r must miss of a row-stochastic P > 0 (Bhojanapalli et al. 2020): a constant
    along a row does not change the softmax.
    """
    log_NN = p_NN.log()
    u, s, vh = torch.linalg.svd(log_NN - log_NN.mean(1, keepdim=True))
    scores_NN = (u[:, :rank] * s[:rank]) @ vh[:rank]
    return ((scores_NN.softmax(1) - p_NN).norm() / p_NN.norm()).item()


def sparse_margin(num_keys: int, rank: int, generator: torch.Generator) -> float:
    """1 - the largest inner product of two of num_keys random unit keys of width r: the margin by which the score of
    any key can exceed all others. A width of O(log num_keys) keeps it above a constant (Likhosherstov et al. 2021)."""
    keys_NK = torch.randn(num_keys, rank, generator=generator, dtype=torch.float64)
    keys_NK = keys_NK / keys_NK.norm(dim=1, keepdim=True)
    products_NN = keys_NK @ keys_NK.T
    return 1 - products_NN.fill_diagonal_(-1).max().item()
