"""Multi-head attention whose heads can be taken apart.

Shapes: B batch, N query token, M key token, D width, H head, K head width.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.config.model import ModelConfig
from rankbench.model.contraction import inverse_phi, inverse_phis, l2_bound_inf
from rankbench.model.fused import fused_mixing
from rankbench.model.linear import HeadMaps, LinearMap, linear
from rankbench.model.weightings import ATTENTIONS, Factors, Softmax, Weighting, as_weights, inverse_length

# The explicit softmax is faster while the N x N table fits the cache, the fused kernel beyond that. Measured on one
# core at D=48..512, the two cross between 64 and 128 tokens. Heads of rank 1 are always faster fused, 2 to 4 times with
# 16 tokens, because a product of a column and a row wastes the matrix kernels. On CUDA a launch for each of the table's
# five operations costs more than their work, so it is always fused there.
FUSED_FROM_TOKENS = 96
# How the values are mixed; the caller chooses. fused: by torch's fused kernel if that is faster and there is no
# dropout. side_by_side: the same, for networks under vmap only. table: always with the N x N table of weights, which
# Jacobians, second derivatives and compiled networks under vmap need.
KERNELS = ("fused", "side_by_side", "table")
ATTENTION_ALONE = {"attention": 1.0, "identity": 0.0, "uniform": 0.0}


def visible_keys(mask: str, window: int | None, num_tokens: int, device: torch.device | None = None) -> Tensor | None:
    """Mask of the keys that each query may see, (N, M) bool; None if it may see all of them.

    causal: itself and earlier tokens. window: tokens at most `window` away, on either side. others: all but itself, or
    itself if there is no other token.
    """
    if mask == "none":
        return None
    distance_NM = torch.arange(num_tokens, device=device)[:, None] - torch.arange(num_tokens, device=device)[None, :]
    if mask == "causal":
        return distance_NM >= 0
    if mask == "others":
        return (distance_NM != 0) | (num_tokens == 1)
    assert window is not None  # mask=window has one
    return distance_NM.abs() <= window


class Heads(nn.Module):
    """Attention of several heads: everything that follows from the maps, which a subclass defines.

    The subclass sets heads, head_width, value_width and `out`, the linear map from the concatenated heads to the width,
    and overrides the fields below where it differs. It also defines `queries_keys_values` and `maps`.
    """

    score_name, is_l2 = "dot", False
    has_score_maps = True  # whether scores are a product of two tokens' maps
    weighting: Weighting = ATTENTIONS["dot"]
    layer = 1  # number of the layer
    mask, temperature = "none", 1.0
    window: int | None = None
    contraction_keys: int | None = None
    mix: Mapping[str, float] = ATTENTION_ALONE
    exclusive = False  # whether each head's output loses its part along the token's own value

    # The attention whose values are mixed into this layer's, and their share. Its input is a stream next to the tokens.
    first: "tuple[Heads, float] | None" = None
    own: nn.ParameterDict  # parameters of the weighting, if it has any
    heads: int
    head_width: int
    value_width: int
    out: LinearMap

    def queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head, each (B, H, N, K); values of another width are (B, H, N, V)."""
        raise NotImplementedError

    def maps(self) -> HeadMaps:
        """The heads' parameters as separate maps, views wherever that is possible."""
        raise NotImplementedError

    def maps_as_applied(self) -> HeadMaps:
        """The heads as the separate maps that are applied to the tokens."""
        return self.maps()

    def maps_of_input(self) -> HeadMaps:
        """As maps_as_applied, but of the whole input: with `first`, tokens and the stream next to them, (H, 2 D, K)."""
        w = self.maps_as_applied()
        if self.first is None:
            return w
        attention, share = self.first
        first = attention.maps_as_applied()
        queries_keys = {name: F.pad(getattr(w, name), (0, 0, 0, w.w_v_HDK.shape[1])) for name in ("w_q_HDK", "w_k_HDK")}
        w_v_HDK = torch.cat([w.w_v_HDK, share * first.w_v_HDK], 1)
        return w._replace(**queries_keys, w_v_HDK=w_v_HDK, b_v_HK=w.b_v_HK + share * first.b_v_HK)

    @property
    def mixes(self) -> bool:
        """Whether the values are mixed by anything but P."""
        return self.mix != ATTENTION_ALONE or self.exclusive

    def num_keys(self, num_tokens: int) -> int:
        """The most keys that a query sees among this many tokens; ConfigError if more than model.contraction_keys."""
        most = num_tokens if self.window is None else min(num_tokens, 2 * self.window + 1)
        if self.contraction_keys is not None and most > self.contraction_keys:
            raise ConfigError(
                f"model.contraction_keys={self.contraction_keys}: here a query may see {most} keys; "
                f"set it to {most} or more"
            )
        return most

    def gains(self, v_BHMK: Tensor, present_BN: Tensor | None) -> Tensor | None:
        """Factor of each value, (B, H, M) or broadcastable to it; None for 1."""
        return None

    def seen(self, present_BN: Tensor | None, num_tokens: int, device: torch.device) -> Tensor | None:
        """Mask of the keys that each query sees, (N, M) or with absent tokens (B, N or 1, M) bool; None if it sees all.

        No token sees absent tokens, except that an absent token sees itself, so that no row is empty. With mask=others
        the only present token of a sequence also sees itself.
        """
        visible_NM = visible_keys(self.mask, self.window, num_tokens, device)
        if present_BN is None:
            return visible_NM
        if visible_NM is None:
            return present_BN[..., None, :]
        alone_BN = ~present_BN if self.mask != "others" else ~present_BN | (present_BN.sum(-1, keepdim=True) == 1)
        themselves_BNM = torch.eye(num_tokens, dtype=torch.bool, device=device) & alone_BN[..., None]
        return present_BN[..., None, :] & visible_NM | themselves_BNM

    def factors(self, q_BHNK: Tensor, k_BHMK: Tensor) -> Factors:
        """The scores of a softmax as a product, before the temperature."""
        return self.weighting.factors(q_BHNK, k_BHMK)

    def score_bias(self, q_BHNK: Tensor) -> Tensor | None:
        """Term that is added to the product of the factors, (B or 1, H, N, M); None for no such term."""
        return None

    def weights(self, q_BHNK: Tensor, k_BHMK: Tensor, seen_NM: Tensor | None) -> Tensor:
        """Attention weights P, (B, H, N, M)."""
        p_BHNM = self.weighting.weights(q_BHNK, k_BHMK, seen_NM, self)
        return p_BHNM if isinstance(self.weighting, Softmax) else as_weights(p_BHNM)

    def qk_maps(self) -> dict[str, tuple[Tensor, Tensor]]:
        """W_QK of each head by name, as `Weighting.qk_maps`; empty if scores are not a product of two tokens' maps."""
        return self.weighting.qk_maps(self.maps_as_applied(), self) if self.has_score_maps else {}

    def mixing(
        self, p_BHNM: Tensor, seen_NM: Tensor | None, gains_BHM: Tensor | None, v_BHMV: Tensor, gate_BHN: Tensor | None
    ) -> Tensor:
        """Matrix M that multiplies the values v: P, or its mix with the identity and the average of the visible keys.
        It includes the `gains` of the values and the weighting's `gate` of the queries.

        Before the gate, exclusive heads have M - diag(c), c_i = <(M v)_i, v_i> / |v_i|^2, whose product with v is
        orthogonal to v token by token (Zhai 2026, Exclusive self-attention), and with P and c frozen linear in v.
        """
        mixed_BHNM = p_BHNM if self.mix == ATTENTION_ALONE else self._mixed(p_BHNM, seen_NM)
        mixed_BHNM = mixed_BHNM if gains_BHM is None else mixed_BHNM * gains_BHM[..., None, :]
        if self.exclusive:
            # <(M v)_i, v_i> without M v, which a mode that watches attention would take for the output
            along_BHN = (mixed_BHNM * (v_BHMV @ v_BHMV.mT)).sum(-1)
            mixed_BHNM = as_weights(mixed_BHNM - torch.diag_embed(along_BHN / _squared_lengths(v_BHMV)))
        return mixed_BHNM if gate_BHN is None else as_weights(gate_BHN[..., None] * mixed_BHNM)

    def _mixed(self, p_BHNM: Tensor, seen_NM: Tensor | None) -> Tensor:
        mixed_BHNM = self.mix["attention"] * p_BHNM
        if self.mix["identity"]:
            eye_NM = torch.eye(p_BHNM.shape[-1], dtype=p_BHNM.dtype, device=p_BHNM.device)
            mixed_BHNM = mixed_BHNM + self.mix["identity"] * eye_NM
        if self.mix["uniform"]:
            seen_NM = p_BHNM.new_ones(p_BHNM.shape[-2:]) if seen_NM is None else seen_NM.to(p_BHNM.dtype)
            mixed_BHNM = mixed_BHNM + self.mix["uniform"] * (seen_NM / seen_NM.sum(-1, keepdim=True))
        return mixed_BHNM

    def forward(
        self, x_BND: Tensor, present_BN: Tensor | None = None, dropout_BHNM: Tensor | None = None, kernel: str = "table"
    ) -> Tensor:
        """The layer's output, (B, N, D).

        dropout_BHNM: the mask of the attention weights. kernel: one of KERNELS.
        """
        if kernel == "table" or dropout_BHNM is not None or not self._fuses(x_BND):
            return self.observe(x_BND, present_BN, dropout_BHNM)[0]
        mixed_BHNK = self._fused(x_BND, present_BN, side_by_side=kernel == "side_by_side")
        return self.out(mixed_BHNK.transpose(-3, -2).flatten(-2))

    def observe(
        self, x_BND: Tensor, present_BN: Tensor | None = None, dropout_BHNM: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The layer's output, and by name weights_BHNM (P), mixing_BHNM and mixed_BHNK, as in network.AttentionStep."""
        q_BHNK, k_BHNK, v_BHNK = self.queries_keys_values(x_BND)
        present_B1N = _for_all_heads(present_BN)
        gains_BHM = self.gains(v_BHNK, present_B1N)
        seen_NM = self.seen(present_B1N, x_BND.shape[-2], x_BND.device)
        weights_BHNM = self.weights(q_BHNK, k_BHNK, seen_NM)
        p_BHNM = weights_BHNM if dropout_BHNM is None else weights_BHNM * dropout_BHNM
        mixing_BHNM = self.mixing(p_BHNM, seen_NM, gains_BHM, v_BHNK, self.weighting.gate(q_BHNK, self))
        tables = {"weights_BHNM": weights_BHNM, "mixing_BHNM": mixing_BHNM, "mixed_BHNK": mixing_BHNM @ v_BHNK}
        return self.out(tables["mixed_BHNK"].transpose(-3, -2).flatten(-2)), tables

    def _fuses(self, x_BND: Tensor) -> bool:
        plain = self.weighting.fusible and not (self.mix["identity"] or self.mix["uniform"])
        is_faster = x_BND.shape[-2] >= FUSED_FROM_TOKENS or self.head_width == 1 or x_BND.device.type == "cuda"
        return plain and is_faster

    def _fused(self, x_BND: Tensor, present_BN: Tensor | None, side_by_side: bool) -> Tensor:
        """The mixed values, without an N x M table. States of absent tokens may differ from those with the table."""
        q_BHNK, k_BHMK, v_BHMV = self.queries_keys_values(x_BND)
        present_B1N = _for_all_heads(present_BN)
        q_BHNE, k_BHME, scale = self.factors(q_BHNK, k_BHMK)
        own_BHMV = v_BHMV
        if (gains_BHM := self.gains(v_BHMV, present_B1N)) is not None:
            v_BHMV = v_BHMV * gains_BHM[..., None]
        causal = self.mask == "causal"  # absent tokens come last, so only they see absent tokens
        seen_NM = None if causal else self.seen(present_B1N, q_BHNE.shape[-2], q_BHNE.device)
        mixed_BHNV = fused_mixing(q_BHNE, k_BHME, v_BHMV, seen_NM, causal, scale / self.temperature, side_by_side)
        mixed_BHNV = mixed_BHNV if self.mix["attention"] == 1 else self.mix["attention"] * mixed_BHNV
        if self.exclusive:
            along_BHN = (mixed_BHNV * own_BHMV).sum(-1) / _squared_lengths(own_BHMV)
            mixed_BHNV = mixed_BHNV - along_BHN[..., None] * own_BHMV
        gate_BHN = self.weighting.gate(q_BHNK, self)
        return mixed_BHNV if gate_BHN is None else gate_BHN[..., None] * mixed_BHNV


class Attention(Heads):
    """H heads of width K on a width of D; K need not be D/H, so a head's W_QK and W_VO can have any rank up to D.

    Values can have another width than keys. Groups of heads can share keys and values, or keys and values can be read
    from a narrow latent of each token (Ainslie et al. 2023; DeepSeek-AI 2024, without its separate part for positions).

    dot:             P_h (x W_V,h + b_V,h)
    l2:              P_h (x A_h W_V,h + b_V,h),  A_h = W_Q,h W_Q,h^T / sqrt(K); Kim et al. 2021, app. F: free keys too
    contractive_l2:  l2 times c / bound; bound is `bound_inf`, c is model.contraction
    cosine:          P_h times the values, each divided by its length sqrt(||v||^2 + epsilon) (Qi et al. 2023)

    Biases of queries, keys and values are constants that the papers leave out. No Lipschitz constant here depends on
    them, because with tied queries and keys they cancel in q - k.
    """

    def __init__(self, cfg: ModelConfig, layer: int = 1) -> None:
        super().__init__()
        self.layer, self.weighting = layer, ATTENTIONS[cfg.attention]
        self.heads, self.head_width = cfg.heads, cfg.head_width or cfg.width // cfg.heads
        self.tied_qk, self.mask, self.window = cfg.tied_qk, cfg.mask, cfg.window
        self.temperature, self.exclusive = cfg.temperature, cfg.exclusive
        self.value_width, self.groups = cfg.value_width or self.head_width, cfg.kv_groups or self.heads
        copies = self.heads * self.head_width / cfg.width if cfg.head_reduction == "mean" else 1.0
        mix = {"attention": cfg.mix_attention, "identity": cfg.mix_identity, "uniform": cfg.mix_uniform}
        self.mix = {part: share / max(copies, 1.0) for part, share in mix.items()}
        self.score_name, self.is_l2 = cfg.attention, cfg.attention in ("l2", "contractive_l2")
        self.contraction, self.contraction_keys = cfg.contraction, cfg.contraction_keys
        inner, keys_and_values = self.heads * self.head_width, [self.groups * self.head_width] * (not self.tied_qk)
        keys_and_values += [self.groups * self.value_width]
        # one matrix for queries, keys (unless tied) and values: one large product instead of three small ones
        self.rows = [inner, *keys_and_values] if cfg.latent_width is None else [inner, cfg.latent_width]
        self.qkv = linear(cfg, cfg.width, sum(self.rows), len(self.rows))
        self.rows_of_latent = keys_and_values
        self.from_latent = linear(cfg, cfg.latent_width, sum(keys_and_values)) if cfg.latent_width else None
        self.out: nn.Linear = linear(cfg, self.heads * self.value_width, cfg.width)
        starts = self.weighting.parameters(self)
        self.own = nn.ParameterDict({name: torch.empty(start.shape) for name, start in starts.items()})

    def queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in Heads; with `first`, x_BND is twice as wide: tokens, and beside them the first attention's input."""
        if self.first is None:
            return self._own_queries_keys_values(x_BND)
        attention, share = self.first
        x_BND, beside_BND = x_BND.chunk(2, -1)
        q_BHNK, k_BHNK, v_BHNK = self._own_queries_keys_values(x_BND)
        w = attention.maps_as_applied()
        first_BHNK = beside_BND[..., None, :, :] @ w.w_v_HDK + w.b_v_HK[:, None]
        return q_BHNK, k_BHNK, (1 - share) * v_BHNK + share * first_BHNK

    def _own_queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.is_l2:
            return self._l2_queries_keys_values(x_BND)
        # split the maps before the heads: the gradient of split is one copy, that of unbind two
        parts = self.qkv(x_BND).split(self.rows, -1)
        if self.from_latent is not None:
            parts = [parts[0], *self.from_latent(parts[1]).split(self.rows_of_latent, -1)]
        parts = [part.unflatten(-1, shape).transpose(-3, -2) for part, shape in zip(parts, self._shapes, strict=True)]
        return self._of_all_heads(parts, -3)

    def _l2_queries_keys_values(self, x_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of l2, whose values are read from the queries: x A_h W_V,h = (x W_Q,h)
        (W_Q,h^T W_V,h / sqrt(K)). Products with small matrices replace the product with W_V."""
        w = self.maps()
        read = [(w.w_q_HDK, w.b_q_HK)] if self.tied_qk else [(w.w_q_HDK, w.b_q_HK), (w.w_k_HDK, w.b_k_HK)]
        weight = torch.cat([w_HDK.transpose(-2, -1).flatten(0, 1) for w_HDK, _ in read])
        parts = F.linear(x_BND, weight, torch.cat([b_HK.flatten() for _, b_HK in read]))
        q_BHNK, *keys = parts.unflatten(-1, (-1, self.head_width)).transpose(-3, -2).split(self.heads, -3)
        small_HKV = w.w_q_HDK.transpose(-2, -1) @ w.w_v_HDK * self.head_width**-0.5
        v_BHNV = q_BHNK @ small_HKV
        shift_H1V = w.b_v_HK[:, None] - w.b_q_HK[:, None] @ small_HKV  # the values do not contain the queries' bias
        return q_BHNK, keys[0] if keys else q_BHNK, v_BHNV + shift_H1V.to(v_BHNV.dtype)

    def bound_inf(self, inverse: float | Tensor) -> Tensor:
        """`l2_bound_inf` of these heads, before any contraction. inverse: `inverse_phi` of the number of keys."""
        w, (attention, *others) = self.maps(), map(abs, self.mix.values())
        return l2_bound_inf(w.w_q_HDK, w.w_v_HDK, w.w_o_HKD, inverse, attention, sum(others))

    def gains(self, v_BHMK: Tensor, present_BN: Tensor | None) -> Tensor | None:
        """As in Heads; raises ConfigError like `num_keys`."""
        if self.score_name == "cosine":
            return inverse_length(v_BHMK).squeeze(-1)
        if self.score_name != "contractive_l2":
            return None
        assert self.contraction is not None  # contractive_l2 has one
        most = self.num_keys(v_BHMK.shape[-2])
        if self.contraction_keys is not None or present_BN is None:
            inverse_B1 = v_BHMK.new_full((1,), inverse_phi(self.contraction_keys or most))
        else:
            by_num_keys = inverse_phis(most, v_BHMK.dtype, v_BHMK.device)
            inverse_B1 = by_num_keys[present_BN.sum(-1, keepdim=True).clamp(1, most) - 1]
        bound_B1 = self.bound_inf(inverse_B1)
        return self.contraction / bound_B1

    def maps_as_applied(self) -> HeadMaps:
        """The heads as the separate maps that are applied to the tokens: for l2, W_V is A_h W_V; with `first`, W_V
        includes the share of the layer's own values. Otherwise the same as `maps`."""
        w = self.maps()
        if self.is_l2:
            w = w._replace(w_v_HDK=w.w_q_HDK @ (w.w_q_HDK.transpose(-2, -1) @ w.w_v_HDK) * self.head_width**-0.5)
        if self.first is None:
            return w
        own = 1 - self.first[1]
        return w._replace(w_v_HDK=own * w.w_v_HDK, b_v_HK=own * w.b_v_HK)

    def maps(self) -> HeadMaps:
        """The heads' parameters as separate maps: views, except maps that groups share or that pass a latent."""
        weight, bias = self.qkv.weight, self.qkv.bias
        weights = weight.split(self.rows)
        biases = (weight.new_zeros(len(weight)) if bias is None else bias).split(self.rows)
        if self.from_latent is not None:
            up, shift = self.from_latent.weight, self.from_latent.bias
            weights = [weights[0], *(up @ weights[1]).split(self.rows_of_latent)]
            shift = up @ biases[1] + (0 if shift is None else shift)
            biases = [biases[0], *shift.split(self.rows_of_latent)]
        w_HDK = [w.unflatten(0, shape).transpose(-2, -1) for w, shape in zip(weights, self._shapes, strict=True)]
        b_HK = [b.unflatten(0, shape) for b, shape in zip(biases, self._shapes, strict=True)]
        w_o_HKD = self.out.weight.T.unflatten(0, (self.heads, self.value_width))
        b_o_D = self.out.bias if self.out.bias is not None else weight.new_zeros(self.out.out_features)
        return HeadMaps(*self._of_all_heads(w_HDK, 0), w_o_HKD, *self._of_all_heads(b_HK, 0), b_o_D)

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """(number of heads, width) of queries, keys (unless tied) and values."""
        keys = [] if self.tied_qk else [(self.groups, self.head_width)]
        return [(self.heads, self.head_width), *keys, (self.groups, self.value_width)]

    def _of_all_heads(self, parts: Sequence[Tensor], dim: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values; those that several heads share are repeated for each head."""
        if self.tied_qk:
            parts = [parts[0], *parts]
        share, (queries, *others) = self.heads // self.groups, parts
        keys, values = (part if share == 1 else part.repeat_interleave(share, dim) for part in others)
        return queries, keys, values


def _squared_lengths(v_BHMV: Tensor) -> Tensor:
    """|v|^2 of each value, (B, H, M), with 1 in place of 0: nothing lies along a zero value."""
    squared_BHM = v_BHMV.square().sum(-1)
    return torch.where(squared_BHM > 0, squared_BHM, 1)


def _for_all_heads(present_BN: Tensor | None) -> Tensor | None:
    return None if present_BN is None else present_BN[..., None, :]
