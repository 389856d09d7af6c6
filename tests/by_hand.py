"""Attention in numpy, query by query, from the papers' formulas and the rows of its parameters.

Shapes: B batch, N query token, M key token, D width, K head width.
"""

import math
from typing import Any, NamedTuple

import mpmath
import numpy as np
import torch
from scipy.special import softmax

from rankbench.config.model import ModelConfig
from rankbench.model.attention import Attention
from rankbench.model.weightings import ATTENTIONS, COSINE_EPSILON

TIED = {"attention": "l2", "tied_qk": True}
CONTRACTIVE = {"attention": "contractive_l2", "tied_qk": True, "contraction": 0.7}
KINDS: list[dict[str, Any]] = [
    {"attention": "l2"},
    TIED,
    {**TIED, "head_width": 6, "value_width": 3},
    {"attention": "l2", "kv_groups": 1},
    {"attention": "l2", "latent_width": 3},
    CONTRACTIVE,
    {**CONTRACTIVE, "contraction": 40.0},
    {**CONTRACTIVE, "contraction_keys": 300},
    {"attention": "cosine"},
    {"attention": "cosine", "tied_qk": True, "value_width": 5},
    {"attention": "dot"},
    {"attention": "dot", "tied_qk": True, "heads": 3, "head_width": 5},
    {"attention": "dot", "tied_qk": True, "head_width": 1},
    *({"attention": kind, "head_width": 4} for kind in ("sigmoid", "relu", "kernel", "sparse", "differential")),
    {"attention": "differential", "head_width": 4, "tied_qk": True},
    {"attention": "gated"},
    {"attention": "gated", "exclusive": True},
    {"exclusive": True, "value_width": 3, "kv_groups": 1},
    *({"attention": kind, "exclusive": True} for kind in ("l2", "cosine", "sigmoid")),
]


def composite(x_ND: np.ndarray) -> float:
    """The norm of the papers: the root of the largest sum of a column times that of a row."""
    return math.sqrt(np.linalg.norm(x_ND, 1) * np.linalg.norm(x_ND, np.inf))


def relative_residual(x_ND: np.ndarray) -> float:
    """What tokens are apart from their mean, relative to what they are."""
    return composite(x_ND - x_ND.mean(0)) / composite(x_ND)


def maps_by_hand(attention: Attention, head: int) -> tuple[np.ndarray, ...]:
    """W_Q, W_K, W_V (before A_h), W_O, b_Q, b_K, b_V of one head (from 0)."""
    weight = attention.qkv.weight.detach().numpy()
    bias = np.zeros(len(weight)) if attention.qkv.bias is None else attention.qkv.bias.detach().numpy()
    heads, groups, width, values = attention.heads, attention.groups, attention.head_width, attention.value_width
    (w_q, rest), (b_q, shift) = (np.split(x, [heads * width]) for x in (weight, bias))
    if attention.from_latent is not None:
        up = attention.from_latent.weight.detach().numpy()
        own = 0 if attention.from_latent.bias is None else attention.from_latent.bias.detach().numpy()
        rest, shift = up @ rest, up @ shift + own
    group = head // (heads // groups)
    columns = slice(head * width, (head + 1) * width)
    w_k, b_k, before = w_q[columns], b_q[columns], 0
    if not attention.tied_qk:
        w_k, b_k = (x[group * width : (group + 1) * width] for x in (rest, shift))
        before = groups * width
    w_v, b_v = (x[before + group * values : before + (group + 1) * values] for x in (rest, shift))
    w_o = attention.out.weight.detach().numpy()[:, head * values : (head + 1) * values]
    return w_q[columns].T, w_k.T, w_v.T, w_o.T, b_q[columns], b_k, b_v


def is_seen(mask: str, window: int | None, n: int, m: int, length: int) -> bool:
    """Whether query n sees key m; absent tokens see themselves alone."""
    if max(n, m) >= length:
        return n == m
    if mask == "others":
        return n != m or length == 1
    return {"none": True, "causal": m <= n, "window": window is not None and abs(n - m) <= window}[mask]


def bound_by_hand(attention: Attention, cfg: ModelConfig, num_keys: int) -> float:
    """Theorem 3.2 with numpy's matrix norms and mpmath's Lambert W, and the mixes' share in it."""
    maps = [maps_by_hand(attention, head) for head in range(attention.heads)]
    norm = lambda w: np.linalg.norm(w, np.inf)  # noqa: E731
    w_o = np.concatenate([maps_of_head[3] for maps_of_head in maps])
    inverse = float(mpmath.lambertw((num_keys - 1) / mpmath.e).real)
    others = abs(cfg.mix_identity) + abs(cfg.mix_uniform)
    first = abs(cfg.mix_attention) * (4 * inverse + 1 / math.sqrt(attention.head_width))
    first += others / math.sqrt(attention.head_width)
    return first * max(norm(w[0]) * norm(w[0].T) for w in maps) * max(norm(w[2].T) for w in maps) * norm(w_o.T)


def _elu_plus_one(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x + 1, np.exp(x))


def row_by_hand(kind: str, q_K: np.ndarray, k_MK: np.ndarray, temperature: float, attention: Attention) -> np.ndarray:
    """Weights of one query on the keys that it sees."""
    width, number = len(q_K), len(k_MK)
    scores = k_MK @ q_K / math.sqrt(width) / temperature
    if kind in ("l2", "contractive_l2"):
        return softmax(-((k_MK - q_K) ** 2).sum(1) / math.sqrt(width) / temperature)
    if kind == "cosine":
        lengths = np.sqrt((q_K @ q_K + COSINE_EPSILON) * ((k_MK**2).sum(1) + COSINE_EPSILON))
        return softmax(k_MK @ q_K / lengths / temperature)
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-(scores - math.log(number))))
    if kind == "relu":
        return np.maximum(scores, 0) / number
    if kind == "kernel":
        products = _elu_plus_one(k_MK / temperature) @ _elu_plus_one(q_K / temperature)
        return products / products.sum()
    if kind == "differential":
        own, halves = {name: x.detach().numpy() for name, x in attention.own.items()}, np.split(k_MK, 2, axis=1)
        parts = zip(halves, np.split(q_K, 2), strict=True)
        first, second = (softmax(k @ q / math.sqrt(width // 2) / temperature) for k, q in parts)
        factor = math.exp(own["first_q"] @ own["first_k"]) - math.exp(own["second_q"] @ own["second_k"])
        return first - (factor + 0.8 - 0.6 * math.exp(-0.3 * (attention.layer - 1))) * second
    return softmax(scores)


class HeadByHand(NamedTuple):
    """One head on one sequence: P, the matrix M that mixes the values, their map and bias, and W_O. It adds
    M (x W + b) W_O."""

    p: np.ndarray
    mixing: np.ndarray
    w: np.ndarray
    bias: np.ndarray
    w_o: np.ndarray


def head_by_hand(
    attention: Attention, cfg: ModelConfig, x_ND: np.ndarray, head: int, length: int | None = None
) -> HeadByHand:
    """A head (from 0) on a sequence of which the first `length` tokens are there; None: all."""
    w_q, w_k, w_v, w_o, b_q, b_k, b_v = maps_by_hand(attention, head)
    num_tokens, length = len(x_ND), len(x_ND) if length is None else length
    q_NK, k_MK = x_ND @ w_q + b_q, x_ND @ w_k + b_k
    p, average = np.zeros((2, num_tokens, num_tokens))
    is_part = np.ones_like(p)
    if cfg.attention == "sparse":
        is_part = ATTENTIONS["sparse"].part(attention.layer, num_tokens, num_tokens).numpy()
    for n in range(num_tokens):
        seen = [m for m in range(num_tokens) if is_seen(cfg.mask, cfg.window, n, m, length)]
        read = [m for m in seen if is_part[n, m]] or seen
        p[n, read] = row_by_hand(cfg.attention, q_NK[n], k_MK[read], cfg.temperature, attention)
        average[n, seen] = 1 / len(seen)
    mixing = cfg.mix_attention * p + cfg.mix_identity * np.eye(num_tokens) + cfg.mix_uniform * average
    if attention.is_l2:
        w_v = w_q @ w_q.T / math.sqrt(attention.head_width) @ w_v
    v_MV = x_ND @ w_v + b_v
    if cfg.attention == "cosine":
        mixing = mixing / np.sqrt((v_MV**2).sum(1) + COSINE_EPSILON)
    if cfg.attention == "contractive_l2":
        keys = min(length, 2 * cfg.window + 1) if cfg.mask == "window" else length
        mixing = mixing * cfg.contraction / bound_by_hand(attention, cfg, cfg.contraction_keys or keys)
    if cfg.exclusive:  # nothing lies along a value of zero
        lengths_N = (v_MV**2).sum(1)
        mixing = mixing - np.diag(((mixing @ v_MV) * v_MV).sum(1) / np.where(lengths_N > 0, lengths_N, 1))
    if cfg.attention == "gated":
        mixing = mixing / (1 + np.exp(-q_NK @ attention.own["gate"].detach().numpy()))[:, None]
    return HeadByHand(p, mixing, w_v, b_v, w_o)


def attention_by_hand(attention: Attention, cfg: ModelConfig, x_BND: torch.Tensor, lengths: Any = None) -> torch.Tensor:
    """The output of all heads, for sequences of these lengths; None: no token is absent."""
    copies = attention.heads * attention.head_width / cfg.width if cfg.head_reduction == "mean" else 1
    out = np.zeros(x_BND.shape) + (0 if attention.out.bias is None else attention.out.bias.detach().numpy())
    for out_ND, x_ND, length in zip(out, x_BND.numpy(), lengths or [None] * len(out), strict=True):
        for number in range(attention.heads):
            head = head_by_hand(attention, cfg, x_ND, number, length)
            out_ND += head.mixing @ (x_ND @ head.w + head.bias) @ head.w_o / max(copies, 1)
    return torch.from_numpy(out)
