"""Lipschitz constants of attention layers: closed-form bounds and exact constants (Kim et al. 2021).

Lip_p is the supremum over X of ||J||_p, J the Jacobian of the layer as a map on R^(ND): for p = inf its largest
absolute row sum, for p = 2 its largest singular value. A bound is never below that supremum (a local bound: never below
||J(X)||_2 at the given X), up to rounding. Dot-product attention is Lipschitz for no p (Theorem 3.1); L2 attention is
Lipschitz if W^Q = W^K (Theorem 3.2).

Misprints of the paper: its p = 2 bound has ||W^Q||^2 where its proof gives ||W^Q||^4. App. G asks for (i, i) among the
masked pairs, although its proof needs each query to see itself.

Shapes: B sequence, N query token, M key token, D width, E width as input, H head, K head width.
"""

import math

import numpy as np
import scipy
from torch import Tensor

from rankbench.measures.attention_layer import AttentionLayer
from rankbench.measures.norms import inf_norm, spectral_norm
from rankbench.model.contraction import inverse_phi, l2_bound_inf
from rankbench.model.linear import HeadMaps


def inverse_phi_of(num_keys: np.ndarray) -> np.ndarray:
    """phi^-1(n - 1) of each number n of keys: the largest sum_j P_ij ||y_j - y_i||^2 (Lemma F.2)."""
    return np.array([inverse_phi(int(number)) for number in num_keys])


def theorem(layer: AttentionLayer | None, num_tokens: int, p: str) -> float:
    """Bound on Lip_p of attention on this many tokens: Kim et al., Theorem 3.2 as proved; infinite without one.

    Lemma F.1 rests on W^Q = W^K, and the proof of Lemma F.2 on each query seeing its own key.
    """
    if layer is None or layer.kind == "dot" or not layer.tied:
        return np.inf
    if layer.seen_NM is not None and not layer.seen_NM.diagonal().all():
        return np.inf
    return (theorem_inf if p == "inf" else theorem_2)(layer, num_tokens)


def theorem_inf(layer: AttentionLayer, num_tokens: int) -> float:
    """Bound on Lip_inf of tied L2 attention: Kim et al., Theorem 3.2, with masks app. G.

    (4 phi^-1(N - 1) + 1/s) max_h ||W^Q||_inf ||W^Q^T||_inf  max_h ||W^V^T||_inf  ||W^O^T||_inf, divided by the divisor.
    N is the largest number of keys that a query sees.
    """
    inverse = inverse_phi(int(layer.num_seen(num_tokens).max()))
    w = layer.maps
    return l2_bound_inf(w.w_q_HDK, w.w_v_HDK, w.w_o_HKD, inverse).item() / layer.divisor


def theorem_2(layer: AttentionLayer, num_tokens: int, *, printed: bool = False) -> float:
    """Bound on Lip_2 of tied L2 attention: Kim et al., Theorem 3.2 as its proof gives it (app. F.2.2).

    sqrt(sum_i (4 phi^-1(n_i - 1) + 1)^2) / s  sqrt(sum_h ||W^Q||_2^4 ||W^V||_2^2)  ||W^O||_2, divided by the divisor;
    n_i is the number of keys that query i sees, N without a mask. printed: with ||W^Q||_2^2, as the paper prints the
    theorem. That is not a bound: it fails for ||W^Q|| > 1.
    """
    w = layer.maps
    rows = np.linalg.norm(4 * inverse_phi_of(layer.num_seen(num_tokens)) + 1)
    heads = (spectral_norm(w.w_q_HDK) ** (2 if printed else 4) * spectral_norm(w.w_v_HDK) ** 2).sum().sqrt()
    of_maps = heads * spectral_norm(w.w_o_HKD.flatten(0, 1))
    return float(rows) / layer.scale * of_maps.item() / layer.divisor


def cosine_bound(maps: HeadMaps, tau: float, epsilon: float, num_tokens: int, p: str) -> float:
    """Bound on Lip_p of scaled cosine similarity attention, p = 2 or inf, with any mask. Rankbench's own, in place of
    Qi et al. 2023 (LipsFormer), Theorem 1, which grows with N^2.

    L = epsilon^-1/2 sum_h ||W^O||_2 (||W^V||_2 + tau (||W^Q||_2 + ||W^K||_2)); sqrt(N) L for p = 2, sqrt(D) L for inf.

    W x over sqrt(||W x||^2 + epsilon) is shorter than 1 and moves by at most epsilon^-1/2 ||W|| ||dx||. So no score
    moves by more than tau times the movements of its query and its key. The sum of absolute changes of a softmax is at
    most as large (the mean absolute deviation of its scores' changes). A mean of values moves by at most that plus the
    movement of the values. Thus each token of the output moves by at most L times the largest movement of a token.
    """
    all_maps = (maps.w_q_HDK, maps.w_k_HDK, maps.w_v_HDK, maps.w_o_HKD)
    q_H, k_H, v_H, o_H = (spectral_norm(w) for w in all_maps)
    of_a_token = epsilon**-0.5 * (o_H * (v_H + tau * (q_H + k_H))).sum().item()
    return of_a_token * (num_tokens if p == "2" else maps.w_q_HDK.shape[1]) ** 0.5


def _maps_of_width_1(layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
    """W^Q, W^V and W^O of the one head, (D,) each."""
    w = layer.maps
    return w.w_q_HDK[0, :, 0], w.w_v_HDK[0, :, 0], w.w_o_HKD[0, 0]


def one_dimension_inf(layer: AttentionLayer, num_tokens: int) -> float:
    """Constant Lip_inf of a tied L2 head of width 1: 1 + 4 W0((n - 1) e^-3/2), times |W^Q^T W^V| ||W^O||_inf ||W^Q||_1.

    n is the largest number of keys a query sees. The constant itself for odd n, a bound for even n; rankbench's own.

    Proof. With y = X W^Q the layer is P(y) y times weights, and the weights give the factor. Let query 0 lie at 0.
    dm/dy_j = P_j (1 - 2 y_j (y_j - m)) off the diagonal, the row sums to 1 and its own entry P_0 + 2 Var is positive;
    so the absolute row sum is 1 + 2 F, F = sum_j P_j (2 y_j (y_j - m) - 1)^+ . Let S be the tokens that count in F, T
    the others but query 0, p the weight of T, a and b the parts of m from S and T, G = sum_S P_j (2 y_j^2 - 1): F = G -
    2 a (a + b) <= G + b^2/2 (<= G unless a and b differ in sign). As sum_T P_j y_j^2 >= b^2/p, b^2 >= 2 p^2/3 makes F
    <= sum over S and T of P_j (2 y_j^2 - 1). Else F < G + p^2/3, which is below G/(1 - p), the first sum with T taken
    away, unless G < p (1 - p)/3; and then F < p/3 < 1/3, less than 2 W0(e^-3/2) = .37. So F <= max sum_j P_j (2 u_j -
    1), u = y^2. There all u are equal, u = 3/2 + W0((n - 1) e^-3/2), and F = 2 (u - 3/2). As many tokens at +sqrt(u)
    as at -sqrt(u) make m = 0 and attain it.
    """
    w_q_D, w_v_D, w_o_D = _maps_of_width_1(layer)
    base = 1 + 4 * scipy.special.lambertw((layer.num_seen(num_tokens).max() - 1) * math.exp(-1.5)).real
    factor = (w_q_D @ w_v_D).abs() * w_o_D.abs().max() * w_q_D.abs().sum() / layer.divisor
    return float(base) * factor.item()


def one_dimension_2(layer: AttentionLayer, num_tokens: int) -> float:
    """Bound on Lip_2 of one tied L2 head of width 1 without a mask, polylogarithmic in N where the theorem has sqrt N:

    sqrt(1 + s1) + 2 q + 2 sqrt(q s2), times |W^Q^T W^V| ||W^O||_2 ||W^Q||_2; q = phi^-1(N - 1), s1 = sum 1/(k + 1),
    s2 = sum phi^-1(k)/k, both over k = 1.. on the two sides of a token, floor and ceil of (N - 1)/2 tokens.

    Proof. J = P + 2 diag Var_i + 2 M, M_ij = P_ij (y_j - m_i)(y_i - y_j). ||P||^2 is at most its largest column sum:
    to a token that is the k-th from j on its side, itself, j and the k - 1 between weigh at least P_ij each, so P_ij <=
    1/(k + 1). Var_i <= q (Lemma F.2). By Cauchy and Schwarz |(M v)_i|^2 <= Var_i sum_j P_ij (y_i - y_j)^2 v_j^2, and to
    the k-th on a side P_ij d^2 <= d^2 e^-d^2 / (1 + k e^-d^2) <= phi^-1(k)/k. Both sums are largest for even sides.
    """
    w_q_D, w_v_D, w_o_D = _maps_of_width_1(layer)
    largest = inverse_phi(num_tokens)
    sides = [np.arange(1, side + 1) for side in ((num_tokens - 1) // 2, num_tokens // 2)]
    columns = sum((1 / (k + 1)).sum() for k in sides)
    distances = sum((inverse_phi_of(k + 1) / k).sum() for k in sides)
    base = math.sqrt(1 + columns) + 2 * largest + 2 * math.sqrt(largest * distances)
    return float(base) * ((w_q_D @ w_v_D).abs() * w_o_D.norm() * w_q_D.norm()).item() / layer.divisor


def dot_ball_2(layer: AttentionLayer, num_tokens: int, radius: float, *, castin: bool = False) -> float:
    """Bound on ||J(X)||_2 of dot-product attention without masks and biases while every ||x_i||_2 <= radius.

    sum_h sqrt3 ||V|| (||A||^2 R^4 (N + 1) + N)^1/2: the three terms of softmax_ball_2, (a + b + c)^2 <= 3 (a^2 + b^2 +
    c^2), with lambda_max(Cov) and tr(Cov) at most R^2. castin: with 4N + 1 for N + 1, Castin et al. 2024, How smooth is
    attention?, Theorem 3.3.
    """
    factor = (4 if castin else 1) * num_tokens + 1
    inner_H = (spectral_norm(layer.a_HDD).square() * radius**4 * factor + num_tokens).sqrt()
    return (math.sqrt(3) * spectral_norm(layer.values_HDD) * inner_H).sum().item()


def softmax_ball_2(layer: AttentionLayer, num_tokens: int, radius: float) -> float:
    """Bound on ||J(X)||_2 while every ||x_i||_2 <= radius; dot or l2, tied or not, with any mask and biases.

    sum_h ||V|| (sqrt N + g ||A|| R^2 + g sqrt N R max ||W^K r_ij|| / s), V, g, r as in attention_layer.rows_of_token,
    A = W^Q W^K^T / s. At given inputs the three terms of d(P X) are at most ||P||, g ||A|| max_i lambda_max(Cov_i) and
    g sqrt(max_j sum_i P_ij tr(Cov_i) ||W^K r_ij||^2 / s^2), Cov_i the covariance of the tokens with weights P_i; the
    last by Cauchy and Schwarz: sum_j P_ij (x_j - m_i)(.) has squared length at most tr(Cov_i) sum_j P_ij (.)^2. Here
    each has its largest value on the ball. ||P||_2 <= sqrt N because its rows sum to 1 and its columns to at most N;
    tr(Cov) is at most R^2; and r is q_i, or for l2 q_i - k_j.
    """
    w = layer.maps
    a_H = spectral_norm(layer.a_HDD)
    pulled_H = a_H * radius + (w.w_k_HDK @ w.b_q_HK[..., None]).flatten(1).norm(dim=1) / layer.scale
    if layer.kind == "l2":
        pulled_H = pulled_H + spectral_norm(w.w_k_HDK).square() * radius / layer.scale
        pulled_H = pulled_H + (w.w_k_HDK @ w.b_k_HK[..., None]).flatten(1).norm(dim=1) / layer.scale
    root = math.sqrt(num_tokens)
    inner_H = root + layer.slope * (a_H * radius**2 + root * radius * pulled_H)
    return (inner_H * spectral_norm(layer.values_HDD)).sum().item()


def linear_norm(weight: Tensor, p: str) -> float:
    """Constant Lip_p of x -> W x, W (out, in): the largest singular value (exact SVD), or the largest row sum."""
    return (spectral_norm(weight) if p == "2" else inf_norm(weight)).item()
