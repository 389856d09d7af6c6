"""Rules of products: with a factor that is frozen, with a matrix of weights, and of attention weights with values.

Shapes: D and F widths.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from rankbench.model.tape.recording import Kind, Level, Origin, Recorder, Seen, Tag
from rankbench.model.tape.replay import Affine, Scaled
from rankbench.model.tape.rules.attention import Move, Pair, weighted_values
from rankbench.model.tape.rules.linear import as_map, through
from rankbench.model.tape.rules.registry import rule, unchanged

Layout = tuple[Move, Move, Move]


@rule("mul")
def _mul(seen: Seen) -> Tag | None:
    a, b = seen.args[:2]
    left, right = seen.tag(a), seen.tag(b)
    # the less linear side is frozen; if both are alike, the left
    if left.has_paths and not (right.has_paths and left.level >= right.level):
        return _scaled(seen, a, b, "right factor")
    return _scaled(seen, b, a, "left factor")


@rule("div")
def _div(seen: Seen) -> Tag | None:
    if seen.kwargs.get("rounding_mode") is not None:
        return None
    return _scaled(seen, *seen.args[:2], "divisor")


def _scaled(seen: Seen, x: Any, factor: Any, side: str) -> Tag:
    """The tag of x times (or divided by) a frozen factor. side: of the factor, as the tape names what is frozen."""
    carried, other = seen.tag(x), seen.tag(factor)
    tag = Recorder.combined([carried, other])
    mixed = other.mixes and side != "divisor"  # P v, written as a product and a sum: its heads are not known
    if mixed or carried.opaque is not None or (carried.node is None and other.has_paths):
        return seen.value_only([carried, other], Level.GATED)
    if other.kind == carried.kind == Kind.ACTIVATION:
        tag.level = max(Level.GATED, min(carried.level, other.level))
    if carried.node is not None:
        made_by = "" if other.maker is None else f", of {other.maker}"
        frozen = f"{side}{made_by}" if other.kind == Kind.ACTIVATION else None
        tag.node = seen.node((carried.node,), Scaled(factor, divides=side == "divisor"), frozen, [factor])
    return tag


@rule("linear")
def _linear(seen: Seen) -> Tag | None:
    x, weight_FD, bias = seen.args[0], seen.get(1, "weight"), seen.get(2, "bias")
    if seen.tag(weight_FD).has_paths or seen.tag(bias).has_paths:
        return None
    return _affine(seen, x, weight_FD, bias)


def _affine(seen: Seen, x: Tensor, weight_FD: Tensor, bias: Tensor | None) -> Tag | None:
    """x W^T + b with constant W and b."""
    if weight_FD.ndim != 2:
        return None
    before, shape = seen.tag(x), seen.result.shape
    if before.opaque is not None:
        return seen.value_only([before], Level.LINEAR)
    affine = Affine(weight_FD, bias)
    tag = as_map(Recorder.combined([before]))
    if before.node is not None:
        tag.node = seen.node((before.node,), affine, reads=[weight_FD, bias])
    tag.origin = Origin(shape, unchanged, None if bias is None else lambda: bias, before.node, affine)
    return tag


@rule("matmul", "rmatmul")
def _matmul(seen: Seen) -> Tag | None:
    a, b = seen.args[:2] if seen.name == "matmul" else reversed(seen.args[:2])
    if b.ndim == 2 and a.ndim > 1 and seen.tag(b).kind == Kind.WEIGHT and seen.tag(a).kind != Kind.WEIGHT:
        return _affine(seen, a, b.mT, None)
    if a.ndim == 1 or b.ndim == 1:
        return _product(seen, a, b, torch.matmul)
    return _product(seen, a, b, torch.matmul, ((unchanged,) * 3, (attrgetter("mT"),) * 3), (a, b.mT))


@rule("addmm")
def _addmm(seen: Seen) -> Tag | None:
    c, a, b = seen.args[0], seen.get(1, "mat1"), seen.get(2, "mat2")
    if a is None or b is None or b.ndim != 2 or seen.tag(b).kind != Kind.WEIGHT or seen.tag(c).has_paths:
        return None
    alpha, beta = seen.kwargs.get("alpha", 1), seen.kwargs.get("beta", 1)
    return _affine(seen, a, b.mT if alpha == 1 else alpha * b.mT, c if beta == 1 else beta * c)


@rule("einsum")
def _einsum(seen: Seen) -> Tag | None:
    equation, *operands = seen.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str):
        return None
    if len(operands) == 1:
        return through(seen, operands, lambda x: torch.einsum(equation, x))
    if len(operands) != 2:
        return None
    multiply, terms = partial(torch.einsum, equation), _letters(equation, operands[0].ndim, operands[1].ndim)
    if terms is None:
        return _product(seen, *operands, multiply)
    a, b, out = terms
    layouts, scores = (_layout(a, b, out, a), _layout(b, a, out, b)), None
    if (as_scores := _layout(a, b, out, out)) is not None:
        to_queries, to_keys, _ = as_scores
        scores = to_queries(operands[0]), to_keys(operands[1]).mT
    return _product(seen, *operands, multiply, None if None in layouts else layouts, scores)


def _letters(equation: str, *ndims: int) -> tuple[str, str, str] | None:
    """The letters of both terms and of the result, "..." written out; None if a term repeats a letter."""
    equation = equation.replace(" ", "")
    given, arrow, out = equation.partition("->")
    terms = given.split(",")
    free = [letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in equation]
    if not arrow:
        letters = sorted(letter for letter in set(given) - {",", "."} if given.count(letter) == 1)
        out = ("..." if "..." in given else "") + "".join(letters)
    widths = [ndim - len(term.replace("...", "")) for term, ndim in zip(terms, ndims, strict=True)]
    most = max([width for width, term in zip(widths, terms, strict=True) if "..." in term], default=0)
    terms = [term.replace("...", "".join(free[most - width : most])) for term, width in zip(terms, widths, strict=True)]
    terms.append(out.replace("...", "".join(free[:most])))
    return None if any(len(set(term)) < len(term) for term in terms) else tuple(terms)


def _layout(weights: str, values: str, out: str, order: str) -> Layout | None:
    """How to bring weights to (*batch, N, M) and values to (*batch, M, K), and (*batch, N, K) to the result.

    order: the term whose order of letters the batch has.
    """
    batch = [x for x in order if x in weights and x in values and x in out]
    queries = [x for x in weights if x not in values and x in out]
    keys = [x for x in weights if x in values and x not in out]
    features = [x for x in values if x not in weights and x in out]
    if not len(queries) == len(keys) == len(features) == 1 or len(batch) + 2 != len(weights):
        return None
    if len(batch) + 2 != len(values) or len(batch) + 2 != len(out):
        return None
    return (
        _permuted(weights, [*batch, *queries, *keys]),
        _permuted(values, [*batch, *keys, *features]),
        _permuted([*batch, *queries, *features], out),
    )


def _permuted(given: Sequence[str], wanted: Sequence[str]) -> Callable[[Tensor], Tensor]:
    order = [given.index(letter) for letter in wanted]
    return lambda x: x.permute(order)


def _product(
    seen: Seen,
    a: Tensor,
    b: Tensor,
    multiply: Callable,
    layouts: Sequence[Layout] | None = None,
    scores: Pair | None = None,
) -> Tag | None:
    """A product of two tensors that sums over an axis: a linear map, attention, or scores.

    layouts: how to read it as P v with P on the left, and with P on the right. scores: its factors as queries and keys.
    """
    tags = [seen.tag(a), seen.tag(b)]
    if all(tag.kind == Kind.ACTIVATION for tag in tags):
        side = _weights_side(*tags)
        if layouts is None or side is None:
            tag = seen.value_only(tags, Level.PRODUCT)
            tag.opaque, tag.mixes, tag.scores = tag.opaque or seen.call, True, scores if seen.recorder.watch else None
            return tag
        (to_weights, *moves), logits = layouts[side], tags[side].logits
        p, v = (a, b) if side == 0 else (b, a)
        logits = None if logits is None or logits.shape != p.shape else partial(to_weights, logits)
        p = to_weights(p)
        return weighted_values(seen, lambda: p, v, *moves, tags[side].scores, logits, reads=[p])
    if tags[0].has_paths:
        tag = through(seen, [a], lambda x: multiply(x, b), reads=[b])
    else:
        tag = through(seen, [b], lambda x: multiply(a, x), reads=[a])
    return tag if tag.opaque is not None else as_map(tag)


def _weights_side(left: Tag, right: Tag) -> int | None:
    """Which side of a product is attention weights: 0 the left, 1 the right; None if neither is.

    Scores used without a softmax count as weights only on the left, as in (q k^T) v. On the right, the product of keys
    and values in q (k^T v) would be taken for weights.
    """
    is_weights = [tag.mixes or tag.level == Level.SOFTMAX for tag in (left, right)]
    if is_weights[0] and (not is_weights[1] or left.level >= right.level):
        return 0
    return 1 if is_weights[1] and right.level > Level.PRODUCT else None
