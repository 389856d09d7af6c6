"""Closed forms: bounds on the residual and counts of paths (Dong et al. 2021). No model in here.

Bounds are given and returned as log10, because repeated cubes overflow float64 at depth 6. Arguments are numbers or
arrays, which broadcast. beta = max_h ||W_QK,h||_1 ||W_h||_{1,inf}, with W_QK = W_Q W_K^T (sec. 2.1 of
the paper prints W_Q^T W_K, its appendix has it right), W_h = W_V,h W_O,h and ||W||_{1,inf} = sqrt(||W||_1 ||W||_inf);
d_qk is the head width; the residual is ||X - 1 x^T||_{1,inf}.

None of the paper's bounds is safe, which is why `rankbench analyze analysis=[bounds]` reports whether they hold:
- Lemma A.1 writes |PR - 1 q^T R| <= 2 D 1 |q^T R|, where Lemma A.3 gives 2 D 1 q^T |R|; uses e^x <= 1 + 2x, true up to
  x = 1.256; and bounds ||D 1 v^T||_1 = ||D 1||_1 ||v||_inf with ||D 1||_inf, up to N times smaller. Its inf-norm
  half is true all the same (compare diameter_layer); its 1-norm half is false: one layer of one head can exceed the
  bound by a factor sqrt(N) / log(N), up to a constant (tests).
- Lemma A.2 and Cor. 3.2 multiply a 1-norm bound by an inf-norm bound, each a maximum over heads, and take the product
  for beta^2. But the maxima can be at different heads: two heads of width D can exceed the bound D^(1/4)/16 times.
- Cor. 3.1 adds ||.||_{1,inf} of skip and attention, but this is not a norm and has no triangle inequality.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# The largest slope of each activation. gelu' = Phi(z) + z phi(z), gelu'' = (2 - z^2) phi(z): largest at z = sqrt 2.
ACTIVATION_LIPSCHITZ = {"relu": 1.0, "gelu": 0.5 * math.erfc(-1.0) + math.exp(-1.0) / math.sqrt(math.pi)}
# where there is no closed form, the largest slope by root finding, rounded up
ACTIVATION_LIPSCHITZ |= {"gelu_new": 1.12899306866, "silu": 1.09983932013, "quick_gelu": 1.09983932013}

# --- Bounds on the residual ------------------------------------------------------------------------------------------


def attention_coefficient(log10_beta: ArrayLike, heads: int, width_qk: int) -> np.ndarray:
    """log10 of 4 beta H / sqrt(d_qk), which multiplies the cubed residual. Dong et al. 2021, Lemmas A.1 (H=1), A.2."""
    return np.asarray(log10_beta, dtype=float) + math.log10(4 * heads) - 0.5 * math.log10(width_qk)


def thm_2_3(log10_beta: ArrayLike, heads: int, width_qk: int, layers: int, log10_residual: ArrayLike) -> np.ndarray:
    """Attention alone: (4 beta H / sqrt d)^((3^L - 1)/2) ||res(X)||^(3^L). Theorem 2.3; heads=1: Theorem 2.2.

    With beta lambda for beta also attention and MLPs: Cor. 3.2, printed as Theorem 3.2 in the appendix; lambda is the
    largest factor over layers by which an MLP can stretch ||Y - 1 y^T||_{1,inf}. Misprints: Theorem 2.2 writes W_V for
    what is W_V W_O here; Cor. 2.2 of the appendix drops it from beta.
    """
    return _cubed_again_and_again(attention_coefficient(log10_beta, heads, width_qk), layers, log10_residual)


def cor_3_1(log10_beta: ArrayLike, heads: int, width_qk: int, layers: int, log10_residual: ArrayLike) -> np.ndarray:
    """Attention and skips, Corollary 3.1: max over l of c^((3^l - 1)/2) (2H)^(3^l (L - l)) ||res(X)||^(3^l), c twice
    attention_coefficient.

    Each layer either cubes or doubles. The proof says that the order does not matter. It does, but the printed bound is
    the largest over all orders, with every doubling before every cube, so this step stands. The skip needs no factor H.
    """
    coefficient = attention_coefficient(log10_beta, heads, width_qk) + math.log10(2)
    doubled = [np.add(log10_residual, (layers - cubes) * math.log10(2 * heads)) for cubes in range(layers + 1)]
    bounds = [_cubed_again_and_again(coefficient, cubes, doubled_B) for cubes, doubled_B in enumerate(doubled)]
    return np.max(bounds, axis=0)


def layer_bound(
    log10_residual: ArrayLike, log10_coefficient: ArrayLike, skip: float = 0.0, log10_lambda: ArrayLike = 0.0
) -> np.ndarray:
    """One layer with its own constants: lambda (a r + c r^3), a = |skip scale|, c = attention_coefficient.

    Lemma A.2 (a = 0, lambda = 1), eq. 23 for skips (a = 1), sec. A.6 for MLPs (a = 0). The paper has no
    bound for skips with MLPs; the two bounds in turn give this one, with the MLP's own skip in lambda. Without skips it
    contracts where (4 beta H lambda / sqrt d) r^2 < 1; the paper states 4 beta H < sqrt d (sec. 2.3) for "all inputs of
    small residual" (sec. 2.2), but scaling X scales the residual and leaves beta as it is.
    """
    cubed = np.add(log10_coefficient, 3 * np.asarray(log10_residual, dtype=float))
    return np.add(log10_lambda, np.logaddexp(cubed * LN10, _log(skip) + np.multiply(log10_residual, LN10)) / LN10)


def diameter_layer(
    log10_diameter: ArrayLike,
    log10_scores_H: ArrayLike,
    log10_values_H: ArrayLike,
    width_qk: int,
    skip: float = 0.0,
    log10_lambda: ArrayLike = 0.0,
    masked: bool = False,
) -> np.ndarray:
    """One layer's bound on the tokens' diameter delta = max_ij ||x_i - x_j||_1, for every input; not in the paper.

        delta' <= lambda (a delta + sum_h ||W_h||_inf delta tanh(||W_QK,h||_max delta^2 / (4 sqrt d)))

    scores: ||W_QK,h||_max, the largest entry; values: ||W_h||_inf, the largest row sum; the heads are the last axis.
    lambda: the MLP's stretch of ||x - y||_1. masked: rows see different keys, so 1 replaces the tanh.

    Proof. The scores of queries i and k differ, over keys j and l, by a tilt whose range is the largest
    (x_i - x_k) W_QK (x_j - x_l)^T / sqrt d <= ||W_QK||_max delta^2 / sqrt d (biases drop out). A tilt of range t moves
    a distribution by at most tanh(t/4) in total variation, and two averages of the tokens are at most that times delta
    apart. So ||X - 1 x^T||_inf, between delta/2 and delta for x the mean, falls as a cube once it is small.
    """
    log10_diameter = np.asarray(log10_diameter, dtype=float)
    tilt = np.add(log10_scores_H, 2 * log10_diameter[..., None] - math.log10(4) - 0.5 * math.log10(width_qk))
    moved_H = 0.0 if masked else _log10_tanh(tilt)
    heads = np.logaddexp.reduce(np.add(log10_values_H, moved_H) * LN10, axis=-1)
    return log10_lambda + log10_diameter + np.logaddexp(heads, _log(skip)) / LN10


LN10 = math.log(10)


def _cubed_again_and_again(log10_coefficient: ArrayLike, times: int, log10_residual: ArrayLike) -> np.ndarray:
    """r -> c r^3, `times` times: c^((3^n - 1)/2) r^(3^n) = (r / r*)^(3^n) r*, with the fixed point r* = c^(-1/2)."""
    fixed = -0.5 * np.asarray(log10_coefficient, dtype=float)
    above = np.subtract(log10_residual, fixed)
    power = 3.0**times if times < 640 else math.inf  # 3^647 overflows float64
    with np.errstate(over="ignore", invalid="ignore"):
        return fixed + np.where(above == 0, 0.0, above * power)


def _log10_tanh(log10_x: np.ndarray) -> np.ndarray:
    """tanh x = x to the last digit below 1e-8, where x itself can underflow."""
    x = 10.0 ** np.clip(log10_x, -8, 2)
    return np.where(log10_x < -8, log10_x, np.log10(np.tanh(x)))


def _log(scale: float) -> float:
    return math.log(abs(scale)) if scale else -math.inf


# --- Paths -----------------------------------------------------------------------------------------------------------


class PathLengths(NamedTuple):
    """For each length 0..L of paths: log10 of their number (-inf for none), share, and share of lengths up to it."""

    log10_count: np.ndarray
    share: np.ndarray
    cumulative_share: np.ndarray


def num_paths(layers: int, heads: int, length: int, skip: bool = True) -> int:
    """Exact number of paths of this length: C(L, k) H^k; without skips only H^L of length L.

    Dong et al. 2021, sec. 3.1. Sec. 2.1 counts H^L paths where h_l may be 0; with skips there are (H + 1)^L.
    """
    if not skip:
        return heads**layers if length == layers else 0
    return math.comb(layers, length) * heads**length


def path_length_distribution(layers: int, heads: int, skip: bool = True) -> PathLengths:
    """Paths by their length, as in Dong et al. 2021, Fig. 5; arrays of L + 1. Shares (with skips Binomial(L, H/(H+1)))
    are quotients of exact integers of any size (191 digits for GPT-3), so correctly rounded."""
    counts = [num_paths(layers, heads, length, skip) for length in range(layers + 1)]
    total, so_far = sum(counts), np.cumsum(np.array(counts, dtype=object))
    return PathLengths(
        np.array([math.log10(count) if count else -math.inf for count in counts]),
        np.array([count / total for count in counts]),
        np.array([count / total for count in so_far]),
    )
