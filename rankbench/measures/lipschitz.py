"""Lipschitz constants of self-attention: bounds, exact constants, certificates, and what is measured (Kim et al. 2021).

A layer is X -> [f^1(X) W^V,1, .., f^H(X) W^V,H] W^O, s = sqrt(K) (the paper's sqrt(D/H)), P the softmax of the scores:

    dot:  f = P X,    scores (x_i W^Q + b^Q) . (x_j W^K + b^K) / s               Lipschitz for no p (Theorem 3.1)
    l2:   f = P X A,  scores -||x_i W^Q - x_j W^K||^2 / s,  A = W^Q W^Q^T / s    Lipschitz if W^Q = W^K (Theorem 3.2)

Lip_p is the supremum over X of ||J||_p, J the Jacobian of the layer as a map on R^(ND): for p = inf its largest
absolute row sum, for p = 2 its largest singular value. A `bound` is above that supremum (a local certificate: above
||J(X)||_2 at the X it was asked for), a lower bound below it, up to rounding. Singular values in bounds are exact SVDs:
power iteration underestimates. Nothing in here knows a model.

Misprints of the paper: its p = 2 bound has ||W^Q||^2 where its proof gives ||W^Q||^4; the first line of eq. 22 has e_ij
for e_ji; app. G wants (i, i) among the masked pairs, where its proof needs it seen.

Shapes: B sequence or start, N query token, M key token, D width, E width as input, H head, K head width.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from scipy.special import lambertw
from torch import Tensor

from rankbench.model.contraction import inverse_phi, l2_bound_inf

KINDS = ("dot", "l2")
ADAM = (0.9, 0.999)
# The gradient at a token is proportional to its attention weight, which falls to 1e-40 for tokens far out; with Adam's
# usual 1e-8 these would never move.
ADAM_EPSILON = 1e-30
SCORES_AT_A_TIME = 2_000_000  # entries of P: what fits the cache's neighbourhood, not the memory's limit
FULL_SVD_UP_TO = 1024  # rows of a Jacobian; larger ones get Lanczos' largest singular value


class Layer(NamedTuple):
    """One attention layer. kind: dot | l2. seen_NM: which keys each query sees, None for all. divisor: the output is
    divided by it (Contractive-L2: by the bound for p = inf). Biases of values and output move the output alone.

    w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD; b_q_HK and b_k_HK or None for none.
    """

    kind: str
    w_q_HDK: Tensor
    w_k_HDK: Tensor
    w_v_HDK: Tensor
    w_o_HKD: Tensor
    b_q_HK: Tensor | None = None
    b_k_HK: Tensor | None = None
    seen_NM: Tensor | None = None
    divisor: float = 1.0

    @property
    def scale(self) -> float:
        """s, which divides the scores."""
        return math.sqrt(self.w_q_HDK.shape[-1])

    @property
    def tied(self) -> bool:
        """Whether queries are keys: what makes L2 attention Lipschitz."""
        biases = [b for b in (self.b_q_HK, self.b_k_HK) if b is not None]
        same = torch.equal(self.w_q_HDK, self.w_k_HDK)
        return same and (not biases or (len(biases) == 2 and torch.equal(*biases)))

    @property
    def a_HDD(self) -> Tensor:
        """A = W^Q W^K^T / s of each head."""
        return self.w_q_HDK @ self.w_k_HDK.transpose(-2, -1) / self.scale

    @property
    def read_HDK(self) -> Tensor:
        """What P X is multiplied by before W^O: W^V, behind W^Q W^Q^T / s for l2; over the divisor."""
        if self.kind == "l2":
            return self.w_q_HDK @ (self.w_q_HDK.mT @ self.w_v_HDK) / (self.scale * self.divisor)
        return self.w_v_HDK / self.divisor

    @property
    def values_HDD(self) -> Tensor:
        """What P X is multiplied by in all."""
        return self.read_HDK @ self.w_o_HKD


# ---------------------------------------------------------------------------------------------------------------------
# The layer and its derivative


def _project(x_BND: Tensor, w_HDK: Tensor, b_HK: Tensor | None) -> Tensor:
    out_BHNK = x_BND[:, None] @ w_HDK
    return out_BHNK if b_HK is None else out_BHNK + b_HK[:, None]


def _weights(layer: Layer, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None) -> Tensor:
    """P of these queries; for l2 without the term -||q||^2, which is the same along a row."""
    scores_BHNM = q_BHNK @ k_BHMK.transpose(-2, -1)
    if layer.kind == "l2":
        scores_BHNM = 2 * scores_BHNM - k_BHMK.square().sum(-1)[..., None, :]
    scores_BHNM = scores_BHNM / layer.scale
    if seen_NM is not None:
        scores_BHNM = scores_BHNM.masked_fill(~seen_NM, float("-inf"))
    return scores_BHNM.softmax(-1)


def _write(layer: Layer, mixed_BHNK: Tensor) -> Tensor:
    return mixed_BHNK.transpose(1, 2).flatten(2) @ layer.w_o_HKD.flatten(0, 1)


def weights(layer: Layer, x_BND: Tensor) -> Tensor:
    """Attention weights P, (B, H, N, M)."""
    q_BHNK, k_BHMK = (_project(x_BND, *of) for of in ((layer.w_q_HDK, layer.b_q_HK), (layer.w_k_HDK, layer.b_k_HK)))
    return _weights(layer, q_BHNK, k_BHMK, layer.seen_NM)


def attend(layer: Layer, x_BND: Tensor) -> Tensor:
    """The layer's output without biases of values and output, (B, N, D)."""
    return _write(layer, weights(layer, x_BND) @ (x_BND[:, None] @ layer.read_HDK))


def push(layer: Layer, x_BND: Tensor, v_BND: Tensor) -> Tensor:
    """J(X) v, (B, N, D): the directional derivative in closed form, differentiable in both X and v.

    d(P X) = P v + (P * (dL - sum_k P_ik dL_ik)) X, with dL the derivative of the scores.
    """
    q_BHNK, k_BHMK = (_project(x_BND, *of) for of in ((layer.w_q_HDK, layer.b_q_HK), (layer.w_k_HDK, layer.b_k_HK)))
    dq_BHNK, dk_BHMK = (_project(v_BND, w_HDK, None) for w_HDK in (layer.w_q_HDK, layer.w_k_HDK))
    p_BHNM = _weights(layer, q_BHNK, k_BHMK, layer.seen_NM)
    moved_BHNM = dq_BHNK @ k_BHMK.transpose(-2, -1) + q_BHNK @ dk_BHMK.transpose(-2, -1)
    if layer.kind == "l2":
        moved_BHNM = 2 * moved_BHNM - 2 * (k_BHMK * dk_BHMK).sum(-1)[..., None, :]
    moved_BHNM = moved_BHNM / layer.scale
    centred_BHNM = moved_BHNM - (p_BHNM * moved_BHNM).sum(-1, keepdim=True)
    value_BHMK, dvalue_BHMK = (one[:, None] @ layer.read_HDK for one in (x_BND, v_BND))
    return _write(layer, p_BHNM @ dvalue_BHMK + (p_BHNM * centred_BHNM) @ value_BHMK)


def rows_of_token(layer: Layer, x_BND: Tensor, token: int) -> Tensor:
    """The D rows of the Jacobian of one output token, d F_i[d] / d x_j[e], (B, D, N, E), in closed form.

    With m = sum_k P_ik x_k, C = sum_k P_ik (x_k - m) x_k^T, V what P X is multiplied by, g = 1 for dot and 2 for l2:

        J_ij = V^T (P_ij I + d_ij (g/s) C W^K W^Q^T + (g/s) P_ij (x_j - m) r_ij^T W^K^T)

    r_ij = q_i for dot and q_i - k_j for l2. Tied l2: eq. 27-28 of Kim et al.; untied: eq. 21-22; dot: eq. 14.
    """
    q_BH1K = _project(x_BND[:, token : token + 1], layer.w_q_HDK, layer.b_q_HK)
    k_BHMK = _project(x_BND, layer.w_k_HDK, layer.b_k_HK)
    seen_1M = None if layer.seen_NM is None else layer.seen_NM[token : token + 1]
    p_BHM = _weights(layer, q_BH1K, k_BHMK, seen_1M)[:, :, 0]
    slope = (2 if layer.kind == "l2" else 1) / layer.scale
    weighted_BHMD = p_BHM[..., None] * (x_BND[:, None] - p_BHM[:, :, None] @ x_BND[:, None])
    pulled_BHME = (q_BH1K - k_BHMK if layer.kind == "l2" else q_BH1K.expand_as(k_BHMK)) @ layer.w_k_HDK.mT
    values_HDE = layer.values_HDD
    left_BHMD = weighted_BHMD @ values_HDE  # V^T (x_j - m) P_ij
    rows_BDNE = torch.einsum("bhm,hed->bdme", p_BHM, values_HDE)
    rows_BDNE = rows_BDNE + slope * torch.einsum("bhmd,bhme->bdme", left_BHMD, pulled_BHME)
    own_BDE = torch.einsum("bhmd,bhmk,hek->bde", left_BHMD, k_BHMK, layer.w_q_HDK)
    here_N1 = torch.zeros(x_BND.shape[1], 1, dtype=x_BND.dtype, device=x_BND.device)
    here_N1[token] = slope
    return rows_BDNE + own_BDE[:, :, None] * here_N1


def jacobian(layer: Layer, x_BND: Tensor) -> Tensor:
    """The whole Jacobian, (B, N, D, N, E), in closed form."""
    return torch.stack([rows_of_token(layer, x_BND, token) for token in range(x_BND.shape[1])], dim=1)


def widest_token(layer: Layer) -> int:
    """A token that sees the most: where all see all, any row of blocks reaches the same supremum for p = inf, because
    the layer is permutation equivariant (Kim et al., app. F.2.1); with masks it is one that sees the most."""
    return 0 if layer.seen_NM is None else int(layer.seen_NM.sum(-1).argmax())


# ---------------------------------------------------------------------------------------------------------------------
# Bounds and exact constants


def inverse_phi_of(num_keys: np.ndarray) -> np.ndarray:
    """phi^-1(n - 1) of each number n of keys: the largest sum_j P_ij ||y_j - y_i||^2 (Lemma F.2)."""
    return np.array([inverse_phi(int(number)) for number in num_keys])


def _spectral(w: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(w, 2)


def _rows(w: Tensor) -> Tensor:
    """||W||_inf, the largest absolute row sum, of each matrix."""
    return w.abs().sum(-1).amax(-1)


def _seen_by_each(layer: Layer, num_tokens: int) -> np.ndarray:
    """n_i, how many keys each query sees; ValueError where one does not see itself."""
    if layer.kind != "l2":
        raise ValueError("dot-product attention is not Lipschitz (Kim et al., Theorem 3.1): it has no such bound")
    if not layer.tied:
        raise ValueError("L2 attention is Lipschitz where W^Q = W^K (Kim et al., Lemma F.1); these differ")
    if layer.seen_NM is None:
        return np.full(num_tokens, num_tokens)
    if not layer.seen_NM.diagonal().all():
        raise ValueError("a query does not see its own key, which the proof of Lemma F.2 rests on")
    return layer.seen_NM.sum(-1).cpu().numpy()


def theorem_inf(layer: Layer, num_tokens: int) -> float:
    """Bound on Lip_inf of tied L2 attention: Kim et al., Theorem 3.2, with masks app. G (N: the most keys one sees).

    (4 phi^-1(N - 1) + 1/s) max_h ||W^Q||_inf ||W^Q^T||_inf  max_h ||W^V^T||_inf  ||W^O^T||_inf, over the divisor.
    """
    inverse = inverse_phi(int(_seen_by_each(layer, num_tokens).max()))
    return l2_bound_inf(layer.w_q_HDK, layer.w_v_HDK, layer.w_o_HKD, inverse).item() / layer.divisor


def theorem_2(layer: Layer, num_tokens: int, *, printed: bool = False) -> float:
    """Bound on Lip_2 of tied L2 attention: Kim et al., Theorem 3.2 as its proof has it (app. F.2.2).

    sqrt(sum_i (4 phi^-1(n_i - 1) + 1)^2) / s  sqrt(sum_h ||W^Q||_2^4 ||W^V||_2^2)  ||W^O||_2, over the divisor; n_i is
    the number of keys that query i sees, N without a mask. printed: with ||W^Q||_2^2, as the theorem stands in the
    paper. That is no bound: it fails for ||W^Q|| > 1 (tests).
    """
    rows = np.linalg.norm(4 * inverse_phi_of(_seen_by_each(layer, num_tokens)) + 1)
    heads = (_spectral(layer.w_q_HDK) ** (2 if printed else 4) * _spectral(layer.w_v_HDK) ** 2).sum().sqrt()
    weights = heads * _spectral(layer.w_o_HKD.flatten(0, 1))
    return float(rows) / layer.scale * weights.item() / layer.divisor


def cosine_bound(weights: tuple[Tensor, ...], tau: float, epsilon: float, num_tokens: int, p: str) -> float:
    """Bound on Lip_p of scaled cosine similarity attention, p = 2 or inf, with any mask; weights: W^Q, W^K, W^V (H, D,
    K) and W^O (H, K, D). Rankbench's own, in place of Qi et al. 2023 (LipsFormer), Theorem 1, which grows with N^2.

    L = epsilon^-1/2 sum_h ||W^O||_2 (||W^V||_2 + tau (||W^Q||_2 + ||W^K||_2)); sqrt(N) L for p = 2, sqrt(D) L for inf.

    W x over sqrt(||W x||^2 + epsilon) is shorter than 1 and moves by at most epsilon^-1/2 ||W|| ||dx||. So no score
    moves by more than tau times what query and key do; a softmax moves by at most as much, in the sum of absolute
    values (the mean absolute deviation of its scores' changes); a mean of values by that and by what the values do.
    Thus a token moves by at most L times what the token does that moves most.
    """
    q_H, k_H, v_H, o_H = (_spectral(w) for w in weights)
    of_a_token = epsilon**-0.5 * (o_H * (v_H + tau * (q_H + k_H))).sum().item()
    return of_a_token * (num_tokens if p == "2" else weights[0].shape[1]) ** 0.5


def _one_dimension(layer: Layer) -> None:
    if layer.w_q_HDK.shape[0] != 1 or layer.w_q_HDK.shape[-1] != 1:
        raise ValueError(f"these constants are of one head of width 1, got w_q_HDK of {tuple(layer.w_q_HDK.shape)}")


def one_dimension_inf(layer: Layer, num_tokens: int) -> float:
    """Lip_inf of one tied L2 head of width 1: 1 + 4 W0((n - 1) e^-3/2), times |W^Q^T W^V| ||W^O||_inf ||W^Q||_1.

    n is the largest number of keys a query sees. The constant itself for odd n, a bound for even n; rankbench's own.

    Proof. With y = X W^Q the layer is P(y) y times weights, and the weights give the factor. Let query 0 stand at 0.
    dm/dy_j = P_j (1 - 2 y_j (y_j - m)) off the diagonal, the row sums to 1 and its own entry P_0 + 2 Var is positive;
    so the absolute row sum is 1 + 2 F, F = sum_j P_j (2 y_j (y_j - m) - 1)^+ . Let S be the tokens that count in F, T
    the others but query 0, p the weight of T, a and b the parts of m from S and T, G = sum_S P_j (2 y_j^2 - 1): F = G -
    2 a (a + b) <= G + b^2/2 (<= G unless a and b differ in sign). As sum_T P_j y_j^2 >= b^2/p, b^2 >= 2 p^2/3 makes F
    <= sum over S and T of P_j (2 y_j^2 - 1). Else F < G + p^2/3, which is below G/(1 - p), the first sum with T taken
    away, unless G < p (1 - p)/3; and then F < p/3 < 1/3, less than 2 W0(e^-3/2) = .37. So F <= max sum_j P_j (2 u_j -
    1), u = y^2. There all u are equal, u = 3/2 + W0((n - 1) e^-3/2), and F = 2 (u - 3/2). As many tokens at +sqrt(u)
    as at -sqrt(u) make m = 0 and attain it.
    """
    _one_dimension(layer)
    base = 1 + 4 * lambertw((_seen_by_each(layer, num_tokens).max() - 1) * math.exp(-1.5)).real
    w_q_D, w_v_D, w_o_D = layer.w_q_HDK[0, :, 0], layer.w_v_HDK[0, :, 0], layer.w_o_HKD[0, 0]
    factor = (w_q_D @ w_v_D).abs() * w_o_D.abs().max() * w_q_D.abs().sum() / layer.divisor
    return float(base) * factor.item()


def one_dimension_2(layer: Layer, num_tokens: int) -> float:
    """Bound on Lip_2 of one tied L2 head of width 1 without a mask, polylogarithmic in N where the theorem has sqrt N:

    sqrt(1 + s1) + 2 q + 2 sqrt(q s2), times |W^Q^T W^V| ||W^O||_2 ||W^Q||_2; q = phi^-1(N - 1), s1 = sum 1/(k + 1),
    s2 = sum phi^-1(k)/k, both over k = 1.. on the two sides of a token, floor and ceil of (N - 1)/2 tokens.

    Proof. J = P + 2 diag Var_i + 2 M, M_ij = P_ij (y_j - m_i)(y_i - y_j). ||P||^2 is at most its largest column sum:
    to a token that is the k-th from j on its side, itself, j and the k - 1 between weigh at least P_ij each, so P_ij <=
    1/(k + 1). Var_i <= q (Lemma F.2). By Cauchy and Schwarz |(M v)_i|^2 <= Var_i sum_j P_ij (y_i - y_j)^2 v_j^2, and to
    the k-th on a side P_ij d^2 <= d^2 e^-d^2 / (1 + k e^-d^2) <= phi^-1(k)/k. Both sums are largest for even sides.
    """
    _one_dimension(layer)
    if layer.seen_NM is not None:
        raise ValueError("this bound counts the tokens between two; with a mask they may not be seen")
    largest = inverse_phi(int(_seen_by_each(layer, num_tokens)[0]))
    sides = [np.arange(1, side + 1) for side in ((num_tokens - 1) // 2, num_tokens // 2)]
    columns = sum((1 / (k + 1)).sum() for k in sides)
    distances = sum((inverse_phi_of(k + 1) / k).sum() for k in sides)
    base = math.sqrt(1 + columns) + 2 * largest + 2 * math.sqrt(largest * distances)
    w_q_D, w_v_D, w_o_D = layer.w_q_HDK[0, :, 0], layer.w_v_HDK[0, :, 0], layer.w_o_HKD[0, 0]
    return float(base) * ((w_q_D @ w_v_D).abs() * w_o_D.norm() * w_q_D.norm()).item() / layer.divisor


def local_2(layer: Layer, x_BND: Tensor) -> Tensor:
    """Bound on ||J(X)||_2 at these inputs alone, (B,); dot or l2, tied or not, masked or not.

    sum_h ||V|| (||P|| + g ||A|| max_i lambda_max(Cov_i) + g sqrt(max_j sum_i P_ij tr(Cov_i) ||W^K r_ij||^2 / s^2)),
    V, g and r as in rows_of_token, A = W^Q W^K^T / s, Cov_i the covariance of the tokens with weights P_i. The three
    terms of d(P X) one by one, the last by Cauchy and Schwarz: sum_j P_ij (x_j - m_i)(.) has squared length at most
    tr(Cov_i) sum_j P_ij (.)^2.
    """
    p_BHNM = weights(layer, x_BND)
    q_BHNK, k_BHMK = (_project(x_BND, *of) for of in ((layer.w_q_HDK, layer.b_q_HK), (layer.w_k_HDK, layer.b_k_HK)))
    # from centred tokens: second moments less squared means lose all digits where tokens are far out or equal
    centred_BHNMD = x_BND[:, None, None] - (p_BHNM @ x_BND[:, None])[..., None, :]
    covariance_BHNDE = (p_BHNM[..., None] * centred_BHNMD).mT @ centred_BHNMD
    spread_BHN = covariance_BHNDE.diagonal(dim1=-2, dim2=-1).sum(-1)
    widest_BH = torch.linalg.eigvalsh(covariance_BHNDE)[..., -1].amax(-1)
    pulled_BHND = q_BHNK @ layer.w_k_HDK.mT / layer.scale
    if layer.kind == "l2":
        keys_BHMD = k_BHMK @ layer.w_k_HDK.mT / layer.scale
        squared_BHNM = torch.cdist(pulled_BHND, keys_BHMD, compute_mode="donot_use_mm_for_euclid_dist").square()
    else:
        squared_BHNM = pulled_BHND.square().sum(-1, keepdim=True)
    columns_BH = (p_BHNM * spread_BHN[..., None] * squared_BHNM).sum(-2).amax(-1)
    slope = 2 if layer.kind == "l2" else 1
    inner_BH = _spectral(p_BHNM) + slope * (_spectral(layer.a_HDD) * widest_BH + columns_BH.sqrt())
    return (inner_BH * _spectral(layer.values_HDD)).sum(-1)


def dot_ball_2(layer: Layer, num_tokens: int, radius: float, *, castin: bool = False) -> float:
    """Bound on ||J(X)||_2 of dot-product attention without masks and biases while every ||x_i||_2 <= radius.

    sum_h sqrt3 ||V|| (||A||^2 R^4 (N + 1) + N)^1/2: the three terms of local_2, (a + b + c)^2 <= 3 (a^2 + b^2 + c^2),
    with lambda_max(Cov) and tr(Cov) at most R^2. castin: with 4N + 1 for N + 1, Castin et al. 2024, How smooth is
    attention?, Theorem 3.3.
    """
    if layer.kind != "dot" or layer.seen_NM is not None or layer.b_q_HK is not None or layer.b_k_HK is not None:
        raise ValueError("the bound on a ball is of dot-product attention without masks and biases")
    factor = (4 if castin else 1) * num_tokens + 1
    inner_H = (_spectral(layer.a_HDD).square() * radius**4 * factor + num_tokens).sqrt()
    return (math.sqrt(3) * _spectral(layer.values_HDD) * inner_H).sum().item()


def norm_bound(width: int, weight: Tensor | None, largest_scale: float, p: str, centred: bool) -> float:
    """Bound on Lip_p of LayerNorm (centred) or RMSNorm over inputs whose scale, 1/sqrt(variance + epsilon), is at most
    this; over all inputs the scale is at most epsilon^-1/2.

    J = diag(w) scale (C - scale^2 c c^T / D), C the centring and c the centred token: 0 <= J' <= scale for p = 2; for p
    = inf scale (||C||_inf + sqrt D), because ||c||_inf ||c||_1 <= sqrt(D) ||c||_2^2 <= D^1.5 / scale^2.
    """
    largest = 1.0 if weight is None else weight.abs().max().item()
    if p == "2":
        return largest * largest_scale
    return largest * largest_scale * ((2 - 2 / width if centred else 1) + math.sqrt(width))


def linear_norm(weight: Tensor, p: str) -> float:
    """Lip_p of x -> W x, W of shape (out, in): its largest singular value (exact SVD), or its largest row sum."""
    return (_spectral(weight) if p == "2" else _rows(weight)).item()


# ---------------------------------------------------------------------------------------------------------------------
# Norms of Jacobians at given inputs


def jacobian_norm(function: Callable[[Tensor], Tensor], x: Tensor, p: str, chunk: int = 256) -> float:
    """||J(x)||_p of any differentiable map from x (any shape) to a tensor of any shape.

    p = inf: every row, by reverse differentiation, `chunk` rows at a time. p = 2: exact SVD up to FULL_SVD_UP_TO rows
    or columns, else Lanczos on products with J and J^T (a lower bound of the norm to its tolerance of 1e-10).
    """
    y, pull = torch.func.vjp(function, x)
    if p == "2" and min(x.numel(), y.numel()) > FULL_SVD_UP_TO:
        return _largest_singular_value(x, y, pull)
    unit = torch.eye(y.numel(), dtype=y.dtype, device=y.device)
    parts = []
    for rows in unit.split(chunk):
        (pulled,) = torch.func.vmap(pull)(rows.view(-1, *y.shape))
        parts.append(pulled.flatten(1) if p == "2" else pulled.flatten(1).abs().sum(1))
    return _spectral(torch.cat(parts)).item() if p == "2" else torch.cat(parts).max().item()


def _largest_singular_value(x: Tensor, y: Tensor, pull: Callable) -> float:
    # J v is the derivative of u -> J^T u, pulled back: forward differentiation by two reverse ones
    _, forward = torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(y))

    def product(apply: Callable, like: Tensor) -> Callable[[np.ndarray], np.ndarray]:
        return lambda v: (
            apply(torch.from_numpy(np.ascontiguousarray(v)).to(like).view_as(like))[0].flatten().cpu().numpy()
        )

    operator = LinearOperator(
        (y.numel(), x.numel()), matvec=product(forward, x), rmatvec=product(pull, y), dtype=np.float64
    )
    start = np.random.default_rng(0).standard_normal(min(operator.shape))
    return float(svds(operator, k=1, tol=1e-10, v0=start, return_singular_vectors=False)[0])


# ---------------------------------------------------------------------------------------------------------------------
# Ascent over inputs


class Ascent(NamedTuple):
    """values_TB: ||J||_p at each recorded step, the largest so far of each start; steps_T; x_BND where the largest was
    found. Each value is attained at some input, so it is a lower bound of the Lipschitz constant."""

    steps_T: list[int]
    values_TB: Tensor
    x_BND: Tensor


def random_starts(number: int, num_tokens: int, width: int, largest: float, generator: torch.Generator) -> Tensor:
    """Inputs uniform in [-c, c], c uniform in [0, largest] for each start, (B, N, D), float64. Kim et al., app. I."""
    c_B11 = largest * torch.rand(number, 1, 1, generator=generator, dtype=torch.float64)
    return c_B11 * (2 * torch.rand(number, num_tokens, width, generator=generator, dtype=torch.float64) - 1)


def ascend(
    layer: Layer, starts_BND: Tensor, p: str, steps: int, lr: float, record_every: int, *, mirror: bool = False
) -> Ascent:
    """Maximise ||J(X)||_p over inputs with Adam from all starts at once (Kim et al., app. I: lr .1).

    p = inf: the largest absolute sum among the rows of one token (widest_token). p = 2: u^T J v, where u and v make one
    step of power iteration for each step of the ascent and are held fixed for its gradient; unit vectors keep it below
    ||J||_2. Best values so far are kept, so a step too far loses nothing.

    mirror, for one head of width 1: half-way every token is put, at its distance, on alternate sides of the widest
    one, which centres their mean. P stays as it is; Adam alone cannot take a token across, and ends where the first
    draw left more on one side.
    """
    chunk = max(1, SCORES_AT_A_TIME // _cost_of_one(layer, starts_BND, p))
    parts = [
        _ascend(layer, some_BND.clone(), p, steps, lr, record_every, mirror) for some_BND in starts_BND.split(chunk)
    ]
    return Ascent(
        parts[0].steps_T, torch.cat([part.values_TB for part in parts], 1), torch.cat([part.x_BND for part in parts])
    )


def _cost_of_one(layer: Layer, starts_BND: Tensor, p: str) -> int:
    _, num_tokens, width = starts_BND.shape
    return num_tokens * (num_tokens * len(layer.w_q_HDK) if p == "2" else width * width)


def _ascend(layer: Layer, x_BND: Tensor, p: str, steps: int, lr: float, record_every: int, mirror: bool) -> Ascent:
    climb = _climber(layer, x_BND, p)
    mean_BND, square_BND = torch.zeros_like(x_BND), torch.zeros_like(x_BND)
    best_B, best_BND = x_BND.new_full((len(x_BND),), -math.inf), x_BND.clone()
    recorded, values = [], []
    for step in range(steps + 1):
        value_B, gradient_BND = climb(x_BND)
        better_B = value_B > best_B
        best_B = torch.where(better_B, value_B, best_B)
        best_BND = torch.where(better_B[:, None, None], x_BND, best_BND)
        if step % record_every == 0 or step == steps:
            recorded.append(step)
            values.append(best_B)
        mean_BND = torch.lerp(gradient_BND, mean_BND, ADAM[0])
        square_BND = torch.lerp(gradient_BND.square(), square_BND, ADAM[1])
        root_BND = (square_BND / (1 - ADAM[1] ** (step + 1))).sqrt() + ADAM_EPSILON
        x_BND = x_BND + lr / (1 - ADAM[0] ** (step + 1)) * mean_BND / root_BND
        if mirror and step == steps // 2:
            x_BND = _mirrored(x_BND, widest_token(layer))
            mean_BND = torch.zeros_like(mean_BND)
    return Ascent(recorded, torch.stack(values), best_BND)


def _climber(layer: Layer, start_BND: Tensor, p: str) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """x -> (the value of each start, its gradient)."""
    token = widest_token(layer)
    if p == "inf" and layer.kind == "l2" and layer.tied and layer.w_q_HDK.shape == (1, 1, 1) and layer.seen_NM is None:
        return lambda x_BND: _one_dimension_row(layer, x_BND)
    if p == "inf":

        def climb(x_BND: Tensor) -> tuple[Tensor, Tensor]:
            x_BND = x_BND.detach().requires_grad_()
            value_B = rows_of_token(layer, x_BND, token).abs().sum((-2, -1)).amax(-1)
            return value_B.detach(), torch.autograd.grad(value_B.sum(), x_BND)[0]

        return climb
    v_BND = torch.ones_like(start_BND) + start_BND / (1 + start_BND.abs().amax((1, 2), keepdim=True))
    v_BND = v_BND / v_BND.flatten(1).norm(dim=1)[:, None, None]

    def climb_2(x_BND: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal v_BND
        x_BND, right_BND = x_BND.detach().requires_grad_(), v_BND.detach().requires_grad_()
        pushed_BND = push(layer, x_BND, right_BND)
        length_B = pushed_BND.detach().flatten(1).norm(dim=1).clamp(min=torch.finfo(x_BND.dtype).tiny)
        left_BND = pushed_BND.detach() / length_B[:, None, None]
        gradient_BND, pulled_BND = torch.autograd.grad((left_BND * pushed_BND).sum(), (x_BND, right_BND))
        v_BND = pulled_BND / pulled_BND.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None]
        return length_B, gradient_BND

    return climb_2


def _one_dimension_row(layer: Layer, x_BN1: Tensor) -> tuple[Tensor, Tensor]:
    """The absolute sum of one row of J for D = H = K = 1, tied l2, and its gradient, written out: no graph is built.

    In d = w (x - x_0): 1 + 2 F, F = sum_j P_j t_j, t_j = (2 d_j (d_j - m) - 1)^+, times |w^2 v o|.
    """
    w = layer.w_q_HDK.item()
    factor = abs(layer.values_HDD.item())
    d_BN = w * (x_BN1 - x_BN1[:, :1])[..., 0]
    p_BN = (-d_BN.square()).softmax(-1)
    mean_B1 = (p_BN * d_BN).sum(-1, keepdim=True)
    raw_BN = 2 * d_BN * (d_BN - mean_B1) - 1
    counted_BN = (raw_BN > 0).to(d_BN)
    weighted_BN = p_BN * counted_BN
    f_B1 = (weighted_BN * raw_BN).sum(-1, keepdim=True)
    sum_B1 = (weighted_BN * d_BN).sum(-1, keepdim=True)
    gradient_BN = p_BN * (2 * d_BN * (f_B1 - counted_BN * raw_BN) + 2 * sum_B1 * raw_BN)
    gradient_BN += weighted_BN * (4 * d_BN - 2 * mean_B1)
    gradient_BN[:, 0] -= gradient_BN.sum(-1)
    return factor * (1 + 2 * f_B1[:, 0]), (2 * factor * w * gradient_BN)[..., None]


def _mirrored(x_BN1: Tensor, token: int) -> Tensor:
    """Each token at its distance from the given one, on alternate sides in the order of the distances."""
    if x_BN1.shape[-1] != 1:
        raise ValueError(f"mirror: tokens of width 1 have two sides, got width {x_BN1.shape[-1]}")
    centre_B11 = x_BN1[:, token : token + 1]
    distance_BN = (x_BN1 - centre_B11).abs()[..., 0]
    place_BN = distance_BN.argsort(-1).argsort(-1)  # 0 is the given token itself
    return centre_B11 + (distance_BN * torch.where(place_BN % 2 == 1, 1.0, -1.0))[..., None]


# ---------------------------------------------------------------------------------------------------------------------
# Inversion


def invert(function: Callable[[Tensor], Tensor], y: Tensor, iterations: int) -> list[Tensor]:
    """Iterates of the fixed point of x = y - f(x), from x = y: the inverse of g(x) = x + f(x) where f is a contraction.

    Kim et al., sec. 4.1 (Behrmann et al. 2019). Returns iterations + 1 tensors, the first is y itself.
    """
    found = [y]
    for _ in range(iterations):
        found.append(y - function(found[-1]))
    return found


def fresh_layer(
    kind: str, width: int, heads: int, limits: dict[str, float] | None, generator: torch.Generator, *, tied: bool = True
) -> Layer:
    """A layer with random weights, float64, head width D/H: every entry of W^m uniform in +-limits[m], m in q, k, v, o;
    limits None: every head's columns of the identity, W^O the identity. tied (l2 only): W^K = W^Q."""
    head_width = width // heads
    if limits is None:
        eye_HDK = torch.eye(width, dtype=torch.float64).unflatten(1, (heads, head_width)).transpose(0, 1)
        drawn = dict.fromkeys("qkv", eye_HDK)
        drawn["o"] = torch.eye(width, dtype=torch.float64).unflatten(0, (heads, head_width))
    else:
        shapes = dict.fromkeys("qkv", (heads, width, head_width)) | {"o": (heads, head_width, width)}
        drawn = {
            name: limits[name] * (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1)
            for name, shape in shapes.items()
        }
    keys = drawn["q"] if kind == "l2" and tied else drawn["k"]
    return Layer(kind, drawn["q"], keys, drawn["v"], drawn["o"])
