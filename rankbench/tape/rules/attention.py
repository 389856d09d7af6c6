"""Rules of attention: torch's two attention functions, and P v once the weights P are known.

Shapes: B batch, H head, N query token, M key token, D width, K head width.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.tape.recording import Product, Reads, Seen
from rankbench.tape.replay import Node
from rankbench.tape.rules.linear import through
from rankbench.tape.rules.registry import refuse_dropout, rule, unchanged
from rankbench.tape.steps import Affine, Mixed, Through
from rankbench.tape.tags import AttentionCall, Kind, Level, Origin, Role, Tag, Verdict, Weighted

Move = Callable[[Tensor], Tensor]
Lazy = Callable[[], Tensor]
Pair = tuple[Tensor | None, Tensor | None]


def weighted_values(
    seen: Seen,
    weights: Lazy,
    v: Tensor,
    to_values: Move,
    back: Move,
    scores: Pair | None,
    logits: Lazy | None,
    reads: Reads,
    grouped: bool = False,
) -> Tag:
    """The tag of P v. to_values brings v to (*batch, M, K); back brings (*batch, N, K) to the result."""
    tag, values = seen.tag(v), to_values(v)
    origin = None if tag.origin is None else tag.origin.moved(to_values)
    _show(seen, weights, lambda: values, lambda: scores or (None, None), logits)
    if tag.opaque is not None:
        return seen.value_only([tag], Level.LINEAR)
    parent = values if tag.node is None else _values(seen, tag.node, origin, to_values, values.shape)
    bias = origin.bias if origin is not None and origin.constant is not None else None
    shape = seen.result.shape if back is unchanged else torch.Size((*weights().shape[:-1], values.shape[-1]))
    node = seen.node((parent,), Mixed(weights, bias, grouped), "attention weights", reads, shape)
    seen.recorder.mixed[node] = seen.recorder.key_of(seen)
    if back is not unchanged:
        node = seen.node((node,), Through(back))
    return Tag(Kind.ACTIVATION, node=node)


def _show(seen: Seen, weights: Lazy, values: Lazy, scores: Callable[[], Pair], logits: Lazy | None) -> None:
    """Count an attention call, and pass it to the recorder's watch function, if any."""
    recorder = seen.recorder
    recorder.num_attention += 1
    if recorder.watch is not None:
        tensors, depth = (weights(), values(), *scores()), recorder.depth + 1
        made = AttentionCall(recorder.num_attention, seen.call, *tensors, logits, depth, recorder.key_of(seen))
        try:
            recorder.watch(made)
        except TypeError as error:  # of which torch would make one about the operator @
            raise RuntimeError(f"the function that watches {seen.call}: {error}") from error


def _values(seen: Seen, v: Node, origin: Origin | None, to_values: Callable, shape: torch.Size) -> Node:
    """The node of the values. If they are some columns of a linear map, it computes those columns alone.

    A replay then does not compute the queries and keys that the same map makes.
    """
    if origin is None or origin.read is None or (affine := origin.affine) is None:
        return v if to_values is unchanged else seen.node((v,), Through(to_values), shape=shape)
    width = len(affine.weight_FD)
    # follow the number of each column to the values
    numbers = torch.arange(width, device=affine.weight_FD.device).expand(origin.shape)
    smallest, largest = (x.item() for x in origin.chain(numbers).aminmax())
    columns = None if (smallest, largest + 1) == (0, width) else slice(smallest, largest + 1)
    part = Affine(affine.weight_FD, affine.bias, columns)
    node = seen.node((origin.read,), part, reads=[affine.weight_FD, affine.bias], shape=origin.shape)
    return seen.node((node,), Through(origin.chain), shape=shape)


def logits_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """scale q k^T + mask, (*batch, N, M). Groups of query heads may share keys."""
    if k.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = (q * scale) @ k.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def weights_of(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale q k^T + mask), (*batch, N, M); rows that see no key are 0. Groups of query heads may share keys."""
    scores = logits_of(q, k, mask, scale)
    return scores.softmax(-1).masked_fill(scores.amax(-1, keepdim=True) == -math.inf, 0)


@rule("scaled_dot_product_attention")
def _fused(seen: Seen) -> Tag | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    q, k, v, mask, dropout, causal, scale, grouped = (seen.get(i, name) for i, name in enumerate(names))
    refuse_dropout(seen, dropout or 0.0)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    grouped = bool(grouped) and v.shape[-3] != q.shape[-3]
    reads = [q, k, mask]
    weights, logits = (partial(function, q, k, mask, scale) for function in (weights_of, logits_of))
    side = Weighted(lambda q, k, v, mask=None: weights_of(q, k, mask, scale), lambda *given: given[2], unchanged)
    tensors = (q, k, v) if mask is None else (q, k, v, mask)
    product = Product(seen, tensors, (side,), Verdict(Role.ATTENTION), lambda q, k, *_: (q, k), is_kernel=True)
    if seen.recorder.verdict(product).role == Role.FACTOR:
        return frozen_weights(seen, weights, v)
    return weighted_values(seen, weights, v, unchanged, unchanged, (q, k), logits, reads, grouped)


@rule("flex_attention")
def _flexible(seen: Seen) -> list[Tag]:
    """torch's operator behind flex_attention: functions of indices change the scores and hide keys. Of the identity as
    values it makes P, and with P the logarithms of its sums."""
    others = [seen.value_only([seen.tag(x) for x in seen.args[:2]]) for _ in seen.result[1:]]
    seen = replace(seen, result=seen.result[0])
    q, k, v = seen.args[:3]
    grouped = v.shape[-3] != q.shape[-3]

    def whole(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        each_key = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1)
        p, logarithms, *_ = seen.function(q, k, each_key, *seen.args[3:], **seen.kwargs)
        return p, logarithms

    def logits() -> Tensor:
        p, logarithms = whole(q.double(), k.double())
        return p.log() + math.log(2) * logarithms[..., None]

    p = whole(q, k)[0]  # at once: what its functions of indices read may change
    side = Weighted(lambda q, k, v: whole(q, k)[0], lambda *given: given[2], unchanged)
    product = Product(seen, (q, k, v), (side,), Verdict(Role.ATTENTION), lambda q, k, _: (q, k), is_kernel=True)
    if seen.recorder.verdict(product).role == Role.FACTOR:
        tag = frozen_weights(seen, lambda: p, v)
    else:
        tag = weighted_values(seen, lambda: p, v, unchanged, unchanged, (q, k), logits, [p], grouped)
    return [tag, *others]


def frozen_weights(seen: Seen, weights: Lazy, v: Tensor) -> Tag:
    """The tag of P v where P is a frozen factor like any other, and no head."""
    p = weights()

    def mixed(x: Tensor) -> Tensor:
        groups = 1 if x.ndim < 3 else p.shape[-3] // x.shape[-3]
        return p @ (x if groups == 1 else x.repeat_interleave(groups, -3))

    tag = through(seen, [v], mixed, reads=[p])
    if tag.node is not None:
        tag.node.frozen = f"factor, of {seen.call}"
    return tag


@rule("multi_head_attention_forward")
def _multi_head(seen: Seen) -> list[Tag] | None:
    """torch.nn.MultiheadAttention: (N, B, D) in and out."""
    given = inspect.signature(F.multi_head_attention_forward).bind(*seen.args, **seen.kwargs)
    given.apply_defaults()
    at = given.arguments
    refuse_dropout(seen, at["dropout_p"] if at["training"] else 0.0)
    if any(at[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v")) or at["add_zero_attn"]:
        seen.recorder.uncovered.append(seen.call)
        return None
    query, key, value = _kept(seen, at["query"], at["key"], at["value"])
    heads, width = at["num_heads"], query.shape[-1]
    maps, biases = _maps_of(at)

    def by_head(x_NBD: Tensor) -> Tensor:  # (B, H, N, K)
        return x_NBD.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)

    def back(x_BHNK: Tensor) -> Tensor:
        return x_BHNK.permute(2, 0, 1, 3).flatten(-2)

    mask = _additive_mask(at["attn_mask"], at["key_padding_mask"], heads, query)

    def queries_and_keys(query: Tensor, key: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        q_BHNK, k_BHMK = (by_head(F.linear(x, w, b)) for x, w, b in zip((query, key), maps, biases, strict=False))
        return q_BHNK, k_BHMK

    def of_scores(function: Callable, *given: Tensor) -> Tensor:
        q_BHNK, k_BHMK = queries_and_keys(*given)
        return function(q_BHNK, k_BHMK, mask, q_BHNK.shape[-1] ** -0.5)

    def values(*given: Tensor) -> Tensor:
        return by_head(F.linear(given[2], maps[2], biases[2]))

    weights, logits = (partial(of_scores, function, query, key) for function in (weights_of, logits_of))
    side = Weighted(partial(of_scores, weights_of), values, back)
    product = Product(seen, (query, key, value), (side,), Verdict(Role.ATTENTION), queries_and_keys, is_kernel=True)
    is_head = seen.recorder.verdict(product).role == Role.ATTENTION
    tag, shape_NBD = seen.tag(at["value"]), torch.Size((*value.shape[:-1], width))
    if is_head:
        _show(seen, weights, lambda: values(query, key, value), lambda: queries_and_keys(query, key), logits)
    average = seen.value_only([seen.tag(at["query"])], Level.SOFTMAX)
    if tag.opaque is not None:
        return [seen.value_only([tag], Level.LINEAR), average]
    unbatched = at["query"].ndim == 2
    bias = None if biases[2] is None else lambda: by_head(biases[2].expand(shape_NBD))
    p = None if is_head else weights()
    steps = [
        *([Through(lambda x: x[:, None])] if unbatched and tag.node is not None else []),
        *(Affine(maps[2], biases[2]), Through(by_head)),
        *([Mixed(weights, bias)] if is_head else [Through(lambda x: p @ x)]),
        *(Through(back), Affine(at["out_proj_weight"], at["out_proj_bias"])),
        *([Through(lambda x: x[:, 0])] if unbatched else []),
    ]
    node = tag.node or value
    of_heads = torch.Size((query.shape[1], heads, query.shape[0], width // heads))
    for step in steps:
        frozen, reads = ("attention weights", [query, key, mask]) if isinstance(step, Mixed) else (None, ())
        node = seen.node((node,), step, frozen, reads, of_heads if isinstance(step, Mixed) else seen.result[0].shape)
        if isinstance(step, Mixed):
            seen.recorder.mixed[node] = seen.recorder.key_of(seen)
    return [Tag(Kind.ACTIVATION, node=node), average]


def _kept(seen: Seen, *states: Any) -> list[Any]:
    """The arguments (N, B, D) as they are now: a layer may change its states in place afterwards. In one layout, so
    that another pass rounds alike."""
    if seen.recorder.keeps_tape:
        states = tuple(x if seen.tag(x).kind == Kind.WEIGHT else x.clone() for x in states)
    return [(x[:, None] if states[0].ndim == 2 else x).contiguous() for x in states]


def _maps_of(at: dict[str, Any]) -> tuple[Sequence[Tensor], Sequence[Any]]:
    """The weights and biases of queries, keys and values."""
    separate = [at[f"{name}_proj_weight"] for name in "qkv"]
    maps = separate if at["use_separate_proj_weight"] else at["in_proj_weight"].chunk(3)
    return maps, [None] * 3 if at["in_proj_bias"] is None else at["in_proj_bias"].chunk(3)


def _additive_mask(mask: Tensor | None, padding: Tensor | None, heads: int, query: Tensor) -> Tensor | None:
    """The term that multi_head_attention_forward adds to scores, (B or 1, H or 1, N or 1, M); True in a mask hides."""
    parts = []
    if mask is not None:
        parts.append(mask.unflatten(0, (-1, heads)) if mask.ndim == 3 else mask[None, None])
    if padding is not None:
        parts.append((padding if padding.ndim == 2 else padding[None])[:, None, None])
    zero = query.new_zeros(())
    added = [torch.where(part, -math.inf, zero) if part.dtype == torch.bool else part for part in parts]
    total: Any = sum(added)
    return total if added else None
