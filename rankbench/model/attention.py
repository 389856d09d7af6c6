"""Multi-head attention whose heads can be taken apart.

Shapes: B batch, N query token, M key token, D width, H head, K head width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.config import ModelConfig
from rankbench.model.linear import linear
from rankbench.model.trace import record

# With an N x N table that fits the cache the explicit softmax is the faster one; beyond it the fused kernel is.
# Measured on one core at D=48..512: the two cross between 64 and 128 tokens.
FUSED_FROM_TOKENS = 96
SHORT_ROW = 32


def dot_scores(q_BHNK: Tensor, k_BHMK: Tensor) -> Tensor:
    """Scaled dot products q k^T / sqrt(K); shape (B, H, N, M). Vaswani et al. 2017, eq. 1."""
    return (q_BHNK * q_BHNK.shape[-1] ** -0.5) @ k_BHMK.transpose(-2, -1)


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"dot": dot_scores}


class HeadWeights(NamedTuple):
    """One layer's heads, each as its own linear maps: y_h = M_h (x W_V,h + b_V,h) W_O,h with M_h what `mixing` makes of
    P_h (P_h itself unless the model mixes in the identity or the average); the layer adds b_O once.

    w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD; b_q_HK, b_k_HK, b_v_HK, b_o_D (zeros in a network without biases).
    """

    w_q_HDK: Tensor
    w_k_HDK: Tensor
    w_v_HDK: Tensor
    w_o_HKD: Tensor
    b_q_HK: Tensor
    b_k_HK: Tensor
    b_v_HK: Tensor
    b_o_D: Tensor


def softmax_of_rows(scores: Tensor) -> Tensor:
    """Softmax over the last axis, spelt out where rows are short: torch's kernel takes rows one by one and needs five
    times as long for rows of 8 on a CPU."""
    if scores.shape[-1] > SHORT_ROW or scores.device.type != "cpu":
        return scores.softmax(-1)
    powers = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return powers / powers.sum(-1, keepdim=True)


def visible_keys(mask: str, window: int | None, num_tokens: int, device: torch.device | None = None) -> Tensor | None:
    """Which keys a query may see, (N, M) bool; None when it may see all of them.

    causal: itself and what came before. window: tokens at most `window` away, on either side.
    """
    if mask == "none":
        return None
    distance_NM = torch.arange(num_tokens, device=device)[:, None] - torch.arange(num_tokens, device=device)[None, :]
    if mask == "causal":
        return distance_NM >= 0
    return distance_NM.abs() <= window


class Attention(nn.Module):
    """H heads of width K on a width of D; K is free of D/H, so a head's W_QK and W_VO can have any rank up to D."""

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.heads, self.head_width = cfg.heads, cfg.head_width or cfg.width // cfg.heads
        self.tied_qk, self.mask, self.window = cfg.tied_qk, cfg.mask, cfg.window
        self.temperature = cfg.temperature
        self.mix = {"attention": cfg.mix_attention, "identity": cfg.mix_identity, "uniform": cfg.mix_uniform}
        self.mixes = self.mix != {"attention": 1.0, "identity": 0.0, "uniform": 0.0}
        self.score_name = cfg.attention
        inner = self.heads * self.head_width
        # One matrix for queries (, keys) and values: one large product instead of three small ones.
        num_maps = 2 if self.tied_qk else 3
        self.qkv = linear(cfg, cfg.width, inner * num_maps, num_maps)
        self.out = linear(cfg, inner, cfg.width)

    def queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, each (B, H, N, K)."""
        # chunked before the heads are split off: the gradient of that is one copy, of unbind it is two
        parts = [
            part.unflatten(-1, (self.heads, self.head_width)).transpose(-3, -2)
            for part in self._parts(self.qkv(x_BND), -1)
        ]
        return (parts[0], parts[0], parts[1]) if self.tied_qk else tuple(parts)

    def seen(self, present_BN: Tensor | None, num_tokens: int, device: torch.device) -> Tensor | None:
        """Which keys each query sees, (N, M) or with absent tokens (B, N or 1, M) bool; None when it sees all of them.

        Absent tokens are seen by nobody but, so that no row is empty, themselves.
        """
        visible_NM = visible_keys(self.mask, self.window, num_tokens, device)
        if present_BN is None:
            return visible_NM
        if visible_NM is None:
            return present_BN[..., None, :]
        return present_BN[..., None, :] & visible_NM | torch.eye(num_tokens, dtype=torch.bool, device=device)

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None) -> Tensor:
        """Attention weights P, row-stochastic; shape (B, H, N, M)."""
        scores_BHNM = SCORES[self.score_name](q_BHNK, k_BHMK)
        if self.temperature != 1:
            scores_BHNM = scores_BHNM / self.temperature
        if seen_NM is not None:
            scores_BHNM = scores_BHNM.masked_fill(~seen_NM, float("-inf"))
        return softmax_of_rows(scores_BHNM)

    def mixing(self, p_BHNM: Tensor, seen_NM: Tensor | None) -> Tensor:
        """What the values are multiplied by: P itself, or its mix with the identity and the average of what is seen."""
        if not self.mixes:
            return p_BHNM
        mixed_BHNM = self.mix["attention"] * p_BHNM
        if self.mix["identity"]:
            mixed_BHNM = mixed_BHNM + self.mix["identity"] * torch.eye(
                p_BHNM.shape[-1], dtype=p_BHNM.dtype, device=p_BHNM.device
            )
        if self.mix["uniform"]:
            seen_NM = p_BHNM.new_ones(p_BHNM.shape[-2:]) if seen_NM is None else seen_NM.to(p_BHNM.dtype)
            mixed_BHNM = mixed_BHNM + self.mix["uniform"] * (seen_NM / seen_NM.sum(-1, keepdim=True))
        return mixed_BHNM

    @property
    def row_sum(self) -> float:
        """Of the matrix that the values are multiplied by; 1 where that is P."""
        return sum(self.mix.values())

    def forward(
        self,
        x_BND: Tensor,
        name: str,
        dropout: dict[str, Tensor] | None,
        trace: dict | None,
        present_BN: Tensor | None = None,
    ) -> Tensor:
        q_BHNK, k_BHNK, v_BHNK = self.queries_keys_values(x_BND)
        seen_NM = self.seen(present_BN, x_BND.shape[-2], x_BND.device)
        if present_BN is not None:
            seen_NM = seen_NM[..., None, :, :]  # for all heads
        if trace is None and dropout is None and self.score_name == "dot" and self._fuses(q_BHNK):
            scale = self.head_width**-0.5 / self.temperature
            mixed_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, attn_mask=seen_NM, scale=scale)
        else:
            p_BHNM = self.weights(q_BHNK, k_BHNK, seen_NM)
            weights_BHNM = p_BHNM  # as the softmax gave them, before dropout
            record(trace, f"{name}.weights", lambda: weights_BHNM)
            if dropout is not None:
                p_BHNM = p_BHNM * dropout[f"{name}.weights"]
            mixing_BHNM = self.mixing(p_BHNM, seen_NM)
            record(trace, f"{name}.mixing", lambda: mixing_BHNM)
            mixed_BHNK = mixing_BHNM @ v_BHNK
        record(trace, f"{name}.heads", lambda: mixed_BHNK @ self.head_weights().w_o_HKD)
        return self.out(mixed_BHNK.transpose(-3, -2).flatten(-2))

    def _fuses(self, q_BHNK: Tensor) -> bool:
        # vmap over seeds has no fused kernel: it would fall back to a loop over the batch.
        if self.mixes or torch._C._functorch.is_batchedtensor(q_BHNK):
            return False
        return q_BHNK.shape[-2] >= FUSED_FROM_TOKENS

    def head_weights(self) -> HeadWeights:
        """The heads as separate maps (views, no copies)."""
        w_HDK = [w.unflatten(0, (self.heads, self.head_width)).transpose(-2, -1) for w in self._parts(self.qkv.weight)]
        if self.qkv.bias is None:
            zeros = self.qkv.weight.new_zeros
            b_HK = [zeros(self.heads, self.head_width)] * len(w_HDK)
            b_o_D = zeros(self.out.out_features)
        else:
            b_HK = [b.unflatten(0, (self.heads, self.head_width)) for b in self._parts(self.qkv.bias)]
            b_o_D = self.out.bias
        w_o_HKD = self.out.weight.T.unflatten(0, (self.heads, self.head_width))
        if self.tied_qk:
            w_HDK, b_HK = [w_HDK[0], *w_HDK], [b_HK[0], *b_HK]
        return HeadWeights(*w_HDK, w_o_HKD, *b_HK, b_o_D)

    def _parts(self, fused: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        return fused.chunk(2 if self.tied_qk else 3, dim=dim)
