"""One attention layer as a function of its input, with its derivative in closed form (Kim et al. 2021).

A layer is X -> [f^1(X) W^V,1, .., f^H(X) W^V,H] W^O, s = sqrt(K) (the paper's sqrt(D/H)), P the softmax of the scores:

    dot:  f = P X,    scores (x_i W^Q + b^Q) . (x_j W^K + b^K) / s
    l2:   f = P X A,  scores -||x_i W^Q - x_j W^K||^2 / s,  A = W^Q W^Q^T / s

Biases of values and output shift the output by a constant, which no derivative sees. They are left out here.

Shapes: B sequence, N query token, M key token, D width, E width as input, H head, K head width.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankbench.model.linear import HeadMaps


class AttentionLayer(NamedTuple):
    """The heads of an attention layer, with everything else that its output depends on.

    kind: dot | l2. seen_NM: which keys each query sees; None for all. divisor: of the output (for
    Contractive-L2 the bound for p = inf).
    """

    kind: str
    maps: HeadMaps
    seen_NM: Tensor | None = None
    divisor: float = 1.0

    def to(self, device: torch.device) -> "AttentionLayer":
        """The layer on this device."""
        maps = HeadMaps(*(w.to(device) for w in self.maps))
        return self._replace(maps=maps, seen_NM=None if self.seen_NM is None else self.seen_NM.to(device))

    @property
    def scale(self) -> float:
        """s, which divides the scores."""
        return math.sqrt(self.maps.w_q_HDK.shape[-1])

    @property
    def slope(self) -> int:
        """Factor of q_i k_j in the scores before the division by s: 1, or 2 in -||q_i - k_j||^2."""
        return 2 if self.kind == "l2" else 1

    @property
    def tied(self) -> bool:
        """Whether queries and keys are the same, which makes L2 attention Lipschitz."""
        w = self.maps
        return torch.equal(w.w_q_HDK, w.w_k_HDK) and torch.equal(w.b_q_HK, w.b_k_HK)

    @property
    def has_biases(self) -> bool:
        """Whether queries or keys have a bias."""
        return bool(self.maps.b_q_HK.any() or self.maps.b_k_HK.any())

    def num_seen(self, num_tokens: int) -> np.ndarray:
        """The number of keys that each of this many queries sees."""
        return np.full(num_tokens, num_tokens) if self.seen_NM is None else self.seen_NM.sum(-1).cpu().numpy()

    @property
    def a_HDD(self) -> Tensor:
        """A = W^Q W^K^T / s of each head."""
        return self.maps.w_q_HDK @ self.maps.w_k_HDK.mT / self.scale

    @property
    def read_HDK(self) -> Tensor:
        """The factor of P X before W^O, over the divisor: W^V, or W^Q W^Q^T W^V / s for l2."""
        w = self.maps
        if self.kind == "l2":
            return w.w_q_HDK @ (w.w_q_HDK.mT @ w.w_v_HDK) / (self.scale * self.divisor)
        return w.w_v_HDK / self.divisor

    @property
    def values_HDD(self) -> Tensor:
        """The factor of P X, W^O included."""
        return self.read_HDK @ self.maps.w_o_HKD

    def queries_keys(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """q_BHNK, k_BHMK."""
        w = self.maps
        return x_BND[:, None] @ w.w_q_HDK + w.b_q_HK[:, None], x_BND[:, None] @ w.w_k_HDK + w.b_k_HK[:, None]

    def write(self, mixed_BHNK: Tensor) -> Tensor:
        """The heads' outputs through W^O, (B, N, D)."""
        return mixed_BHNK.transpose(1, 2).flatten(2) @ self.maps.w_o_HKD.flatten(0, 1)


def fresh_layer(
    kind: str, width: int, heads: int, gain: float | None, generator: torch.Generator, *, tied: bool = True
) -> AttentionLayer:
    """A layer of kind dot | l2 with random weights and no biases, float64, head width D/H.

    Weights are uniform in +-gain/sqrt(D). gain None: each head has its columns of the identity, and W^O is the
    identity. tied (l2 only): W^K = W^Q.
    """
    head_width = width // heads
    if gain is None:
        eye_DD = torch.eye(width, dtype=torch.float64)
        w_q_HDK = w_k_HDK = w_v_HDK = eye_DD.unflatten(1, (heads, head_width)).transpose(0, 1)
        w_o_HKD = eye_DD.unflatten(0, (heads, head_width))
    else:
        w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD = (
            gain * width**-0.5 * (2 * torch.rand(heads, *sides, generator=generator, dtype=torch.float64) - 1)
            for sides in [(width, head_width)] * 3 + [(head_width, width)]
        )
    if kind == "l2" and tied:
        w_k_HDK = w_q_HDK
    b_HK = w_q_HDK.new_zeros(heads, head_width)
    return AttentionLayer(kind, HeadMaps(w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD, b_HK, b_HK, b_HK, b_HK.new_zeros(width)))


def _softmax(layer: AttentionLayer, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None) -> Tensor:
    """P for these queries; for l2 without the term -||q||^2, which is constant along a row."""
    scores_BHNM = q_BHNK @ k_BHMK.mT
    if layer.kind == "l2":
        scores_BHNM = 2 * scores_BHNM - k_BHMK.square().sum(-1)[..., None, :]
    scores_BHNM = scores_BHNM / layer.scale
    if seen_NM is not None:
        scores_BHNM = scores_BHNM.masked_fill(~seen_NM, float("-inf"))
    return scores_BHNM.softmax(-1)


def weights(layer: AttentionLayer, x_BND: Tensor) -> Tensor:
    """Attention weights P, (B, H, N, M)."""
    return _softmax(layer, *layer.queries_keys(x_BND), layer.seen_NM)


def attend(layer: AttentionLayer, x_BND: Tensor) -> Tensor:
    """The layer's output, (B, N, D)."""
    return layer.write(weights(layer, x_BND) @ (x_BND[:, None] @ layer.read_HDK))


def push(layer: AttentionLayer, x_BND: Tensor, v_BND: Tensor) -> Tensor:
    """J(X) v, (B, N, D): the directional derivative in closed form, differentiable in both X and v.

    d(P X) = P v + (P * (dL - sum_k P_ik dL_ik)) X, with dL the derivative of the scores.
    """
    q_BHNK, k_BHMK = layer.queries_keys(x_BND)
    dq_BHNK, dk_BHMK = (v_BND[:, None] @ w_HDK for w_HDK in (layer.maps.w_q_HDK, layer.maps.w_k_HDK))
    p_BHNM = _softmax(layer, q_BHNK, k_BHMK, layer.seen_NM)
    moved_BHNM = dq_BHNK @ k_BHMK.mT + q_BHNK @ dk_BHMK.mT
    if layer.kind == "l2":
        moved_BHNM = 2 * moved_BHNM - 2 * (k_BHMK * dk_BHMK).sum(-1)[..., None, :]
    moved_BHNM = moved_BHNM / layer.scale
    centred_BHNM = moved_BHNM - (p_BHNM * moved_BHNM).sum(-1, keepdim=True)
    value_BHMK, dvalue_BHMK = (y_BND[:, None] @ layer.read_HDK for y_BND in (x_BND, v_BND))
    return layer.write(p_BHNM @ dvalue_BHMK + (p_BHNM * centred_BHNM) @ value_BHMK)


def rows_of_token(layer: AttentionLayer, x_BND: Tensor, token: int) -> Tensor:
    """The D rows of the Jacobian of one output token, d F_i[d] / d x_j[e], (B, D, N, E), in closed form.

    With m = sum_k P_ik x_k, C = sum_k P_ik (x_k - m) x_k^T, V the factor of P X, g = 1 for dot and 2 for l2:

        J_ij = V^T (P_ij I + d_ij (g/s) C W^K W^Q^T + (g/s) P_ij (x_j - m) r_ij^T W^K^T)

    r_ij = q_i for dot and q_i - k_j for l2. Tied l2: eq. 27-28 of Kim et al.; untied: eq. 21-22 (whose first line has
    e_ij for e_ji, a misprint); dot: eq. 14.
    """
    w = layer.maps
    q_BH1K = x_BND[:, None, token : token + 1] @ w.w_q_HDK + w.b_q_HK[:, None]
    k_BHMK = x_BND[:, None] @ w.w_k_HDK + w.b_k_HK[:, None]
    seen_1M = None if layer.seen_NM is None else layer.seen_NM[token : token + 1]
    p_BHM = _softmax(layer, q_BH1K, k_BHMK, seen_1M)[:, :, 0]
    slope = layer.slope / layer.scale
    weighted_BHMD = p_BHM[..., None] * (x_BND[:, None] - p_BHM[:, :, None] @ x_BND[:, None])
    pulled_BHME = (q_BH1K - k_BHMK if layer.kind == "l2" else q_BH1K.expand_as(k_BHMK)) @ w.w_k_HDK.mT
    values_HDE = layer.values_HDD
    left_BHMD = weighted_BHMD @ values_HDE  # V^T (x_j - m) P_ij
    rows_BDNE = torch.einsum("bhm,hed->bdme", p_BHM, values_HDE)
    rows_BDNE = rows_BDNE + slope * torch.einsum("bhmd,bhme->bdme", left_BHMD, pulled_BHME)
    own_BDE = torch.einsum("bhmd,bhmk,hek->bde", left_BHMD, k_BHMK, w.w_q_HDK)
    slope_N1 = torch.zeros(x_BND.shape[1], 1, dtype=x_BND.dtype, device=x_BND.device)
    slope_N1[token] = slope
    return rows_BDNE + own_BDE[:, :, None] * slope_N1


def widest_token(layer: AttentionLayer) -> int:
    """A token that sees the most keys.

    If all tokens see all keys, the rows of any token reach the same supremum for p = inf, because the layer is
    permutation equivariant (Kim et al., app. F.2.1).
    """
    return 0 if layer.seen_NM is None else int(layer.seen_NM.sum(-1).argmax())
