"""Constants of a network's parts from its weights alone: Lipschitz bounds and spectral norms.

Formulas of attention are in rankbench.measures.lipschitz_bounds (Kim et al. 2021). A block's bound is made of products
and sums of the bounds of its parts (Lemma 2.1). An infinite bound means that there is none.

Shapes: D width, H head, K head width.
"""

import copy
import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rankbench.measures import lipschitz_bounds
from rankbench.measures.attention_layer import AttentionLayer
from rankbench.measures.dong_theory import ACTIVATION_LIPSCHITZ
from rankbench.measures.norms import frobenius_norm, spectral_norm
from rankbench.model.attention import Heads, visible_keys
from rankbench.model.mlp import MLP
from rankbench.model.network import Network
from rankbench.model.norm import Norm
from rankbench.model.sublayers import AnySublayer, AttentionSublayer, MlpSublayer
from rankbench.model.weightings import COSINE_EPSILON

COVERED = ("dot", "l2", "contractive_l2")  # kinds of attention that can be an AttentionLayer
LIPSCHITZ_METRICS = {"lipschitz_inf": "inf", "lipschitz_2": "2"}  # column name -> p: a bound on Lip_p
HEAD_METRICS = ("qk_norm", "vo_norm")  # spectral norms of a head's maps


def is_layer(attention: Heads) -> bool:
    """Whether an AttentionLayer can represent a model's attention."""
    mix = attention.mix
    covered = attention.score_name in COVERED and not (mix["identity"] or mix["uniform"] or attention.exclusive)
    return covered and not (attention.is_l2 and attention.temperature != 1)


def layer_of(attention: Heads, num_tokens: int) -> AttentionLayer | None:
    """A model's attention on this many tokens as an AttentionLayer; None if that class cannot represent it."""
    if not is_layer(attention):
        return None
    mix, w = attention.mix, attention.maps()
    gains = attention.gains(w.w_v_HDK.new_zeros(1, attention.heads, num_tokens, attention.value_width), None)
    divisor = 1.0 if gains is None else 1 / gains.flatten()[0].item()
    maps = w._replace(
        w_q_HDK=w.w_q_HDK / attention.temperature,
        b_q_HK=w.b_q_HK / attention.temperature,
        w_o_HKD=w.w_o_HKD * mix["attention"],
    )
    seen_NM = visible_keys(attention.mask, attention.window, num_tokens, w.w_q_HDK.device)
    return AttentionLayer("l2" if attention.is_l2 else "dot", maps, seen_NM, divisor)


def attention_bound(attention: Heads, num_tokens: int, p: str) -> float:
    """Bound on Lip_p of a model's attention on this many tokens; infinite if none exists or none is known.

    None exists for l2 with values of the first layer: a change of P is multiplied by their size, which has no bound.
    """
    mix = attention.mix
    if attention.score_name != "cosine" or mix["identity"] or mix["uniform"] or attention.exclusive:
        layer = None if attention.first is not None else layer_of(attention, num_tokens)
        return lipschitz_bounds.theorem(layer, num_tokens, p)
    w = attention.maps()
    maps = w._replace(w_o_HKD=w.w_o_HKD * mix["attention"])
    return lipschitz_bounds.cosine_bound(maps, 1 / attention.temperature, COSINE_EPSILON, num_tokens, p)


def capped_bound(network: Network, num_tokens: int, cap: float) -> float:
    """Bound on Lip_2 of any network of this shape whose matrices have no singular value above `cap`; infinite unless
    its attention is tied L2. Norms count with their own weights."""
    bound = 1.0
    for sublayer in network.sublayers:
        if isinstance(sublayer, MlpSublayer):
            of_part = cap**2 * ACTIVATION_LIPSCHITZ.get(sublayer.part.activation_name, np.inf)
        else:
            of_part = _capped_attention(sublayer.part, num_tokens, cap)
        bound *= sublayer_bound(sublayer, "2", of_part)
    return bound * norm_bound(network.last_norm, "2")


def _capped_attention(attention: Heads, num_tokens: int, cap: float) -> float:
    """Theorem 3.2 with every spectral norm as large as the cap allows; the bound grows with these norms."""
    layer = layer_of(attention, num_tokens)
    if layer is None or attention.score_name != "l2" or not layer.tied:
        return np.inf
    w = layer.maps
    w_q_HDK, w_v_HDK = _with_norm(cap, w.w_q_HDK), _with_norm(cap, w.w_v_HDK)
    all_heads_DD = _with_norm(cap * abs(attention.mix["attention"]), w.w_o_HKD.flatten(0, 1))
    w_o_HKD = all_heads_DD.unflatten(0, w.w_o_HKD.shape[:2])
    maps = w._replace(w_q_HDK=w_q_HDK, w_k_HDK=w_q_HDK, w_v_HDK=w_v_HDK, w_o_HKD=w_o_HKD)
    return lipschitz_bounds.theorem(layer._replace(maps=maps), num_tokens, "2")


def _with_norm(size: float, x: Tensor) -> Tensor:
    """A matrix of this shape with all singular values equal to `size`."""
    return size * torch.eye(*x.shape[-2:]).to(x).expand_as(x)


class Certificate(NamedTuple):
    """Bounds on Lip_2 on a ball: for each layer's attention and each layer, in order, and for the whole network."""

    attentions: list[float]
    layers: list[float]
    network: float


def certificate(network: Network, num_tokens: int, radius: float) -> Certificate | None:
    """Bounds while every token of the embedding is no longer than `radius`; None if a part has no bound.

    The length of the tokens is bounded from part to part, so that softmax attention, which is Lipschitz on no
    unbounded set, has a bound on the ball that its inputs lie in (lipschitz_bounds.softmax_ball_2). A block's bound
    follows from those of its parts by Lemma 2.1 of Kim et al.; after a norm the ball does not depend on the radius.
    """
    attentions, layers = [], []
    for sublayers in network.layers:
        constant = 1.0
        for sublayer in sublayers:
            normed = functools.partial(_longest_normed, sublayer.norm)
            read = sublayer.before(radius, normed)
            bounds = _part_on_ball(sublayer, num_tokens, read)
            if bounds is None:
                return None
            of_part, longest = bounds
            longest = _longest_normed(sublayer.branch_norm, longest)
            if isinstance(sublayer, AttentionSublayer):
                attentions.append(of_part)
            constant *= sublayer_bound(sublayer, "2", of_part)
            radius = abs(sublayer.skip) * radius + abs(sublayer.branch) * longest
            radius = sublayer.after(radius, normed)
        layers.append(constant)
    return Certificate(attentions, layers, math.prod(layers) * norm_bound(network.last_norm, "2"))


def _part_on_ball(sublayer: AnySublayer, num_tokens: int, radius: float) -> tuple[float, float] | None:
    """Bounds on Lip_2 of a sub-layer's part, and on the length of its output tokens; None if there are none."""
    if isinstance(sublayer, MlpSublayer):
        part = sublayer.part
        if part.activation_name not in ACTIVATION_LIPSCHITZ:
            return None
        up, down = part.up, part.down
        hidden = lipschitz_bounds.linear_norm(up.weight, "2") * radius + _length(up.bias)
        # an activation that is 0 at 0 lengthens no vector by more than its Lipschitz constant
        longest = lipschitz_bounds.linear_norm(down.weight, "2") * ACTIVATION_LIPSCHITZ[part.activation_name] * hidden
        return mlp_bound(part, "2"), longest + _length(down.bias)
    layer = layer_of(sublayer.part, num_tokens)
    if layer is None:
        return None
    w = layer.maps
    bias_D = torch.einsum("hk,hkd->d", w.b_v_HK / layer.divisor, w.w_o_HKD) + w.b_o_D
    on_ball = lipschitz_bounds.softmax_ball_2(layer, num_tokens, radius)
    everywhere = lipschitz_bounds.theorem(layer, num_tokens, "2")
    longest = radius * spectral_norm(layer.values_HDD).sum() + bias_D.norm()  # a row of P averages the tokens
    return min(on_ball, everywhere), longest.item()


def _longest_normed(norm: Norm | None, radius: float) -> float:
    """Bound on the length of a token that was no longer than `radius` before the norm, if there is one."""
    if norm is None:
        return radius
    most = 1.0 if norm.kind == "l2norm" else norm.width**0.5
    longest = min(most, radius * norm.epsilon**-0.5) * _largest_weight(norm)
    return norm.factor * (longest + _length(norm.shift))


def _largest_weight(norm: Norm) -> float:
    return 1.0 if norm.weight is None else norm.weight.abs().max().item()


def _length(bias: Tensor | None) -> float:
    return 0.0 if bias is None else bias.norm().item()


def matrices(sublayer: AnySublayer) -> dict[str, Tensor]:
    """The weights of a sub-layer as matrices, the heads' side by side."""
    if isinstance(sublayer, MlpSublayer):
        return {"mlp_up": sublayer.part.up.weight, "mlp_down": sublayer.part.down.weight}
    w = sublayer.part.maps()
    of_heads = {"w_q": w.w_q_HDK, "w_k": w.w_k_HDK} if sublayer.part.has_score_maps else {}
    side_by_side = {name: w_HDK.transpose(0, 1).flatten(1) for name, w_HDK in (of_heads | {"w_v": w.w_v_HDK}).items()}
    return side_by_side | {"w_o": sublayer.part.out.weight}


def norm_bound(norm: Norm | None, p: str) -> float:
    """Bound on Lip_p of a norm, whose scale, 1/sqrt(variance + epsilon), is at most epsilon^-1/2. 1 without a norm.

    J = diag(w) scale (C - scale^2 c c^T / D), C the centring and c the centred token: 0 <= J' <= scale for p = 2; for p
    = inf scale (||C||_inf + sqrt D), because ||c||_inf ||c||_1 <= sqrt(D) ||c||_2^2 <= D^1.5 / scale^2.
    """
    if norm is None:
        return 1.0
    bound = _largest_weight(norm) * norm.epsilon**-0.5
    if p == "inf":
        bound *= (2 - 2 / norm.width if norm.kind == "layernorm" else 1) + math.sqrt(norm.width)
    return norm.factor * bound


def mlp_bound(mlp: MLP, p: str) -> float:
    """Bound on Lip_p of an MLP: its activation's constant times the norms of its maps. Infinite for a gated MLP."""
    if mlp.activation_name not in ACTIVATION_LIPSCHITZ:
        return np.inf
    weights = lipschitz_bounds.linear_norm(mlp.up.weight, p) * lipschitz_bounds.linear_norm(mlp.down.weight, p)
    return weights * ACTIVATION_LIPSCHITZ[mlp.activation_name]


def sublayer_bound(sublayer: AnySublayer, p: str, part: float) -> float:
    """Bound on Lip_p of a sub-layer from that of its part: the sub-layer run on Lipschitz constants (Lemma 2.1)."""
    of_norm, of_branch_norm = norm_bound(sublayer.norm, p), norm_bound(sublayer.branch_norm, p)
    return sublayer.apply(
        1.0,
        part=lambda constant: part * constant,
        norm=lambda constant: of_norm * constant,
        add=lambda a, x, b, y: abs(a) * x + abs(b) * y,
        branch_norm=lambda constant: of_branch_norm * constant,
    )


def head_maps(attention: Heads) -> dict[str, tuple[Tensor, Tensor]]:
    """W_QK and W_VO of each head, each as (left, right) with the matrix left right^T; both sides (H, D, K).

    W_QK is the bilinear form of the scores as they enter the softmax (Weighting.qk_maps); differential attention has
    two for each head, and scores that depend on positions have none. W_VO is W_V W_O, in L2 attention A_h W_V W_O,
    without mixes and without the `gains` of the values.
    """
    w = attention.maps_as_applied()
    return attention.qk_maps() | {"vo": (w.w_v_HDK, w.w_o_HKD.mT)}


def spectra(left_HDK: Tensor, right_HDK: Tensor) -> tuple[Tensor, Tensor]:
    """For M = left right^T of each head: the singular values (H, min(D, K)), largest first, and the angle to the
    identity in degrees (H,), nan for M = 0."""
    # the singular values of two triangular factors' product, which is K x K
    left_HKK, right_HKK = (torch.linalg.qr(side, mode="r").R for side in (left_HDK, right_HDK))
    sigma_HS = torch.linalg.svdvals(left_HKK @ right_HKK.mT)
    cosine_H = (left_HDK * right_HDK).sum((1, 2)) / (sigma_HS.norm(dim=1) * left_HDK.shape[1] ** 0.5)
    return sigma_HS, cosine_H.clamp(-1, 1).acos().rad2deg()


def rounding_of_spectra(left_HDK: Tensor, right_HDK: Tensor) -> Tensor:
    """The size that rounding can give a zero singular value of left right^T, (H,): D eps ||left||_F ||right||_F."""
    sizes_H = frobenius_norm(left_HDK) * frobenius_norm(right_HDK)
    return left_HDK.shape[1] * torch.finfo(left_HDK.dtype).eps * sizes_H


@torch.no_grad()
def constants_by_layer(network: Network, num_tokens: int) -> dict[tuple[int, str, int | None], dict[str, float]]:
    """The HEAD_METRICS of each head, and the LIPSCHITZ_METRICS of each attention on this many tokens, in float64.

    Keys are (layer, sublayer, head) as in rankbench.measures.by_layer.metrics_by_layer; head metrics have the sublayer
    "weights".
    """
    constants: dict[tuple[int, str, int | None], dict[str, float]] = {}
    network = copy.deepcopy(network)
    assert isinstance(network, nn.Module)  # a network without parts taken out
    for number, attention in enumerate(network.double().attentions, 1):
        for matrix, maps in head_maps(attention).items():
            for head, norm in enumerate(spectra(*maps)[0][:, 0].tolist(), 1):
                constants.setdefault((number, "weights", head), {})[f"{matrix}_norm"] = norm
        bounds = {name: attention_bound(attention, num_tokens, p) for name, p in LIPSCHITZ_METRICS.items()}
        constants[number, "attention", None] = bounds
    return constants
