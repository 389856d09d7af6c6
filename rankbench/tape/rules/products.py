"""Rules of products: with a factor that is frozen, with a matrix of weights, and of attention weights with values.

Shapes: D and F widths.
"""

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import tensors_in
from rankbench.tape.recording import Product, Seen
from rankbench.tape.replay import Call
from rankbench.tape.rules.attention import weighted_values
from rankbench.tape.rules.layouts import AS_IT_IS, MATRICES, Moves, Ways, after, letters_of, of_vector, ways_of
from rankbench.tape.rules.linear import as_map, through
from rankbench.tape.rules.registry import RULES, rule, unchanged
from rankbench.tape.steps import Affine, Scaled, Sum
from rankbench.tape.tags import Kind, Level, Origin, Role, Scores, Tag, Verdict, Weighted, combined

KERNELS = [name for name in dir(torch) if name.startswith("_scaled_dot_product")]  # torch's own, behind its function


@rule("mul")
def _mul(seen: Seen) -> Tag | None:
    a, b = seen.args[:2]
    left, right = seen.tag(a), seen.tag(b)
    for tag, x, other in ((left, b, right), (right, a, left)):
        if tag.opaque is not None and isinstance(x, Tensor) and other.kind == Kind.CONSTANT and not x.any():
            return Tag(Kind.CONSTANT)  # a scan's state before the first token
    # the less linear side is frozen; if both are alike, a gate of positive numbers, or that of fewer attention calls,
    # or of fewer numbers; if none is, half of the paths go through each
    may_carry = [tag.has_paths or _gates(other, tag) for tag, other in ((left, right), (right, left))]
    if may_carry[0] and not (may_carry[1] and _order(left, a) >= _order(right, b)):
        tag = _scaled(seen, a, b, "right factor")
    else:
        tag = _scaled(seen, b, a, "left factor")
        if all(may_carry) and _are_alike(seen, a, b):
            tag = _halves(seen, tag, _scaled(seen, a, b, "right factor"))
    if left.kind == right.kind == Kind.ACTIVATION:
        if _decays(left, right) or _decays(right, left):
            tag.form = "decayed"
        tag.factors = a, b
        for of_p, p, v in ((left, a, b), (right, b, a)):
            if of_p.level == Level.SOFTMAX:
                seen.recorder.weighs(seen, p, v)
    return tag


def _decays(decay: Tag, scores: Tag) -> bool:
    """Whether one of two factors is an exponential that is not of scores, and the other is scores, as in a scan."""
    is_exponential = scores.form in ("exp", "shares") or scores.level == Level.SOFTMAX
    return decay.form == "exp" and not decay.mixes and scores.mixes and not is_exponential


def _gates(gate: Tag, state: Tag) -> bool:
    """Whether one of two factors gates the other, a state that has passed no heads."""
    return state.kind == Kind.ACTIVATION and gate.level == Level.GATED > state.level


def _order(tag: Tag, x: Tensor) -> tuple[int, bool, int, int]:
    """The side of a product for which it is larger is frozen."""
    is_gate = tag.level == Level.GATED and bool((x > 0).all())
    return tag.level, is_gate, -tag.depth, -x.numel()


def _are_alike(seen: Seen, a: Tensor, b: Tensor) -> bool:
    """Whether the product is elementwise, and nothing but the order in which its factors stand tells them apart."""
    if a.shape != b.shape or _order(seen.tag(a), a) != _order(seen.tag(b), b):
        return False
    return torch.equal(seen.result.flatten(), (a * b).flatten())


def _halves(seen: Seen, tag: Tag, other: Tag) -> Tag:
    """A product of which half is carried by one factor, and half by the other."""
    if tag.node is not None and other.node is not None:
        tag.node = seen.node((tag.node, other.node), Sum(seen.result.dtype, (0.5, 0.5)))
    return tag


LINEAR_SUM: Callable[[Seen], Any] = RULES["sum"]


@rule("sum")
def _sum(seen: Seen) -> Tag | None:
    """A sum over axes of a product of two activations is a product of matrices if each has an axis that the other
    lacks, as (a[..., None] * b[..., None, :, :]).sum(-2) is a @ b. If only b has, a is a matrix of one row."""
    axis, tag = seen.get(1, "dim", seen.kwargs.get("axis")), seen.tag(seen.args[0])
    if tag.factors is None or axis is None or seen.kwargs.get("dtype") is not None:
        return LINEAR_SUM(seen)
    whole, result = seen.args[0].shape, seen.result.shape
    letters = string.ascii_letters[: len(whole)]
    summed = [letters[number] for number in (axis if isinstance(axis, (tuple, list)) else [axis])]
    terms, squeezed = [], []
    for factor in tag.factors:
        sizes = (*[1] * (len(whole) - factor.dim()), *factor.shape)
        kept = [number for number, size in enumerate(sizes) if size == whole[number]]
        terms.append("".join(letters[number] for number in kept))
        squeezed.append(lambda x, shape=tuple(whole[number] for number in kept): x.reshape(shape))
    (left, right), (a, b) = tag.factors, terms
    left_over = "".join(letter for letter in letters if letter not in summed)
    ways = ways_of(a, b, left_over, dict(zip(letters, whole, strict=True)))

    def as_factor() -> Tag | None:
        if ways.scores is not None or tag.node is None:
            made = LINEAR_SUM(seen)
        else:
            keepdim = bool(seen.get(2, "keepdim", seen.kwargs.get("keepdims")))
            made = _with_frozen_side(seen, left, right, lambda a, b: (a * b).sum(axis, keepdim))
        return made if made is None else replace(made, pairs=True)

    if ways == Ways():
        return as_factor()
    pairs = (squeezed, squeezed[::-1], squeezed)
    ways = Ways(*(after(way, first, second, result) for way, (first, second) in zip(ways, pairs, strict=True)))
    return _activations(seen, left, right, ways, as_factor)


@rule("div")
def _div(seen: Seen) -> Tag | None:
    if seen.kwargs.get("rounding_mode") is not None:
        return None
    return _scaled(seen, seen.args[0], seen.args[1], "divisor")


def _scaled(seen: Seen, x: Any, factor: Any, side: str) -> Tag:
    """The tag of x times (or divided by) a frozen factor. side: of the factor, as the tape names what is frozen."""
    carried, other = seen.tag(x), seen.tag(factor)
    if side == "divisor":
        if carried.form == other.form == "exp":  # exponentials over their sum
            return replace(seen.value_only([carried, other], Level.SOFTMAX), form="shares", logits=carried.logits)
        other = replace(other, form="")  # weights are of the kind of what is divided
    tag = combined([carried, other])
    mixed = other.mixes and side != "divisor"  # P v, written as a product and a sum: its heads are not known
    is_gated = _gates(other, carried) and not carried.has_paths
    if mixed or carried.opaque is not None or (carried.node is None and other.has_paths and not is_gated):
        first = replace(carried, opaque=carried.opaque or seen.call) if carried.node is not None else carried
        tag = seen.value_only([first, other], Level.GATED)
        for whole, of_whole, share in ((x, carried, factor), (factor, other, x)):
            if isinstance(whole, Tensor) and isinstance(share, Tensor) and share.shape[-1:] == (1,) != whole.shape[-1:]:
                tag.level = max(Level.GATED, of_whole.level)  # a router's softmax makes no weights of what it scales
        return tag
    if other.kind == carried.kind == Kind.ACTIVATION:
        is_of_tokens = seen.result.shape == x.shape and x.shape[-1:] != factor.shape[-1:] == (1,)  # as a norm's scale
        tag.level = carried.level if is_of_tokens else max(Level.SCALED, min(carried.level, other.level))
    if carried.node is not None:
        frozen = f"{side}{_made_by(other)}" if other.kind == Kind.ACTIVATION else None
        tag.node = seen.node((carried.node,), Scaled(factor, divides=side == "divisor"), frozen, [factor])
    return tag


def _made_by(frozen: Tag) -> str:
    return "" if frozen.maker is None else f", of {frozen.maker}"


@rule("linear")
def _linear(seen: Seen) -> Tag | None:
    x, weight_FD, bias = seen.args[0], seen.get(1, "weight"), seen.get(2, "bias")
    if seen.tag(weight_FD).has_paths or seen.tag(bias).has_paths:
        return None
    if seen.tag(x).level == Level.SOFTMAX and seen.tag(weight_FD).kind == Kind.ACTIVATION:  # P v
        return None
    return _affine(seen, x, weight_FD, bias)


def _affine(seen: Seen, x: Tensor, weight_FD: Tensor, bias: Tensor | None) -> Tag | None:
    """x W^T + b with constant W and b."""
    if weight_FD.ndim != 2:
        return None
    before, shape = seen.tag(x), seen.result.shape
    if before.opaque is not None:
        return replace(seen.value_only([before], Level.LINEAR), unclear=None)
    affine = Affine(weight_FD, bias)
    tag = replace(as_map(combined([before])), pairs=False)  # of a state, as what a scan has summed
    if before.node is not None:
        tag.node = seen.node((before.node,), affine, reads=[weight_FD, bias])
    tag.origin = Origin(shape, unchanged, None if bias is None else lambda: bias, before.node, affine)
    return tag


@rule("matmul", "rmatmul")
def _matmul(seen: Seen) -> Tag | None:
    a, b = seen.args[0], seen.get(1, "mat2", seen.kwargs.get("vec"))
    a, b = (a, b) if seen.name == "matmul" else (b, a)
    if b.ndim == 2 and a.ndim > 1 and seen.tag(b).kind == Kind.WEIGHT and seen.tag(a).kind != Kind.WEIGHT:
        return _affine(seen, a, b.mT, None)
    return _product(seen, a, b, torch.matmul, of_vector(a, b) if a.ndim == 1 or b.ndim == 1 else MATRICES)


@rule("addmm", "baddbmm")
def _addmm(seen: Seen) -> Tag | None:
    c = seen.args[0]
    a, b = (seen.get(i, name, seen.kwargs.get(f"batch{i}")) for i, name in ((1, "mat1"), (2, "mat2")))
    if len(seen.args) > 3:  # numbers in front of the tensors, which torch once took
        return None
    alpha, beta = seen.kwargs.get("alpha", 1), seen.kwargs.get("beta", 1)
    if all(seen.tag(x).kind == Kind.ACTIVATION for x in (a, b)):
        # scores that are added to a table of positions; a sum with P v would need both of its terms
        if any(seen.tag(x).level == Level.SOFTMAX for x in (a, b)):
            return None
        tag = _activations(seen, a, b, Ways(scores=AS_IT_IS), lambda: seen.value_only([seen.tag(x) for x in (a, b)]))
        return seen.value_only([*([] if tag is None else [tag]), seen.tag(c)], Level.PRODUCT)
    if b.ndim != 2 or seen.tag(b).kind != Kind.WEIGHT or seen.tag(c).has_paths:
        return None
    return _affine(seen, a, b.mT if alpha == 1 else alpha * b.mT, c if beta == 1 else beta * c)


@rule("tensordot")
def _tensordot(seen: Seen) -> Tag | None:
    operands, others, kwargs = seen.args[:2], seen.args[2:], seen.kwargs
    return _of_one(seen, operands, lambda a, b: torch.tensordot(a, b, *others, **kwargs))


def _of_one(seen: Seen, operands: Sequence[Tensor], multiply: Callable[..., Tensor]) -> Tag | None:
    """A product of several tensors of which one depends on the inputs: a linear map of it."""
    numbers = [number for number, x in enumerate(operands) if seen.tag(x).kind == Kind.ACTIVATION]
    return as_map(_linear_in(seen, operands, numbers[0], multiply)) if len(numbers) == 1 else uncovered(seen)


def _linear_in(seen: Seen, operands: Sequence[Tensor], number: int, multiply: Callable[..., Tensor]) -> Tag:
    """The tag of a product that is linear in the operand of this number; the others are held."""
    before, after = operands[:number], operands[number + 1 :]
    return through(seen, [operands[number]], lambda x: multiply(*before, x, *after), reads=[*before, *after])


@rule("linalg_multi_dot", "chain_matmul", "operator", *KERNELS)
def uncovered(seen: Seen) -> None:
    """A call that no rule covers. Of two activations it may be attention, and the module is refused."""
    if sum(seen.tag(x).kind == Kind.ACTIVATION for x in tensors_in(seen.args) + tensors_in(seen.kwargs)) > 1:
        seen.recorder.uncovered.append(seen.call)


@rule("einsum")
def _einsum(seen: Seen) -> Tag | None:
    equation, operands = seen.args[0], tensors_in(seen.args[1:])
    if len(operands) == 1:
        return through(seen, operands, lambda x: torch.einsum(equation, x))
    if len(operands) != 2:
        return _of_one(seen, operands, lambda *given: torch.einsum(equation, *given))
    multiply, terms = partial(torch.einsum, equation), letters_of(equation, operands[0].ndim, operands[1].ndim)
    a, b = operands
    if terms is None:
        return _product(seen, a, b, multiply)
    sizes = {
        letter: size
        for term, x in zip(terms[:2], operands, strict=True)
        for letter, size in zip(term, x.shape, strict=True)
    }
    return _product(seen, a, b, multiply, ways_of(*terms, sizes))


def _product(seen: Seen, a: Tensor, b: Tensor, multiply: Callable, ways: Ways = Ways()) -> Tag | None:  # noqa: B008
    """A product of two tensors that sums over an axis: a linear map, or a product of two activations."""
    tags = [seen.tag(a), seen.tag(b)]
    if all(tag.kind == Kind.ACTIVATION for tag in tags):
        if a.is_complex() or b.is_complex():
            return None
        return _activations(seen, a, b, ways, lambda: _with_frozen_side(seen, a, b, multiply))
    return as_map(_linear_in(seen, (a, b), 0 if tags[0].has_paths else 1, multiply))


def _activations(seen: Seen, a: Tensor, b: Tensor, ways: Ways, as_factor: Callable[[], Tag | None]) -> Tag | None:
    """A product of two activations: attention, scores, or a product of which one side is frozen (as_factor)."""
    tags, recorder = [seen.tag(a), seen.tag(b)], seen.recorder
    left, right = (
        None if way is None else _with_its_keys(way, x, tag) for way, x, tag in zip(ways, (a, b), tags, strict=False)
    )
    ways = Ways(left, right, ways.scores)
    side = _weights_side(*tags)
    by_tags = Verdict(Role.SCORES) if side is None or ways[side] is None else Verdict(Role.ATTENTION, side)
    sides = tuple(None if way is None else _as_weighted(way, number) for number, way in enumerate(ways[:2]))
    to_scores = None
    if ways.scores is not None:
        to_queries, to_keys = ways.scores[:2]
        to_scores = lambda a, b: (to_queries(a), to_keys(b).mT)  # noqa: E731
    read_as = None if by_tags.role == Role.SCORES else ways[by_tags.side]
    if read_as is not None and read_as.is_unclear:
        raise unclear_axes(seen.call, (a, b))
    softmax = [tag.mixes and tag.level == Level.SOFTMAX for tag in tags]
    if side is not None and ways[side] is None and softmax[side] and tags[1 - side].opaque is None:
        raise ConfigError(
            f"{seen.call}: nothing shows how it applies attention weights; write it as a product of matrices"
        )
    role, side = recorder.verdict(Product(seen, (a, b), sides, by_tags, to_scores))
    if role == Role.FACTOR:
        tag = as_factor()
        if tag is not None and recorder.key_of(seen) in recorder.unclear:
            tag.unclear = seen.call
        if tag is not None and to_scores and recorder.key_of(seen) in recorder.slots:
            tag.scores = Scores(*to_scores(a, b), recorder.key_of(seen))
        return tag
    if role == Role.SCORES:
        tag = seen.value_only(tags, Level.PRODUCT)
        scores = Scores(*to_scores(a, b), recorder.key_of(seen)) if to_scores and not recorder.keeps_tape else None
        tag.opaque, tag.mixes, tag.scores = tag.opaque or seen.call, True, scores
        tag.form, tag.logits, tag.unshifted = "", None, None
        return tag
    way, logits, scores = ways[side], tags[side].logits, tags[side].scores
    assert way is not None  # else it is not read as attention
    p, v = (a, b) if side == 0 else (b, a)
    of_p = None
    if logits is not None and logits.shape == p.shape:
        of_p = partial(way.to_weights, logits)
    p = way.to_weights(p)
    if tags[side].form == "exp" and not have_unit_sums(p):  # exponentials that are not divided by their sum
        of_p = None
    return weighted_values(seen, lambda: p, v, way.to_values, way.back, scores and scores[:2], of_p, reads=[p])


def _with_its_keys(way: Moves, p: Tensor, tag: Tag) -> Moves | None:
    """The layout with all axes that are summed over as keys, if a softmax is over all of them. None for several axes of
    features without a softmax, as the decays of a scan have."""
    if way.is_wide and tag.level != Level.SOFTMAX:
        return None
    every = way.with_all_keys
    if every is not None and not have_unit_sums(way.to_weights(p)) and have_unit_sums(every.to_weights(p)):
        return every
    return way


def unclear_axes(call: Call, tensors: Sequence[Tensor]) -> ConfigError:
    """The refusal of a product whose axis of queries may be one of several."""
    shapes = " and ".join(str(tuple(x.shape)) for x in tensors)
    return ConfigError(
        f"{call}: multiplies {shapes}, where heads share keys or values, and nothing shows which axis counts heads and "
        "which tokens; give another number of tokens, or write it as a product of matrices"
    )


def have_unit_sums(p: Tensor) -> bool:
    """Whether the rows of P sum to 1, or to 0 where a query sees no key."""
    sums = p.sum(-1)
    return bool((((sums - 1).abs() < 0.01) | (sums == 0)).all())


def _as_weighted(way: Moves, side: int) -> Weighted:
    return Weighted(lambda *given: way.to_weights(given[side]), lambda *given: way.to_values(given[1 - side]), way.back)


def _with_frozen_side(seen: Seen, a: Tensor, b: Tensor, multiply: Callable) -> Tag | None:
    """A product that mixes something other than tokens; the less linear side is frozen, if both are alike as in _mul.

    A side that is a product itself is carried before a linear map of the tokens, because it holds the states: those of
    a scan, which c reads in c h, or k^T v, which the queries read.
    """
    left, right = seen.tag(a), seen.tag(b)
    pairs = (left, right), (right, left)
    carried = [tag.opaque is None and (tag.has_paths or not other.has_paths) for tag, other in pairs]
    if not any(carried):
        tag = seen.value_only([left, right])
        return _without_scores(replace(tag, level=min(Level.OTHER, tag.level)))
    is_last = [(tag.level != Level.SCALED, *_order(tag, x)) for tag, x in ((left, a), (right, b))]
    number = 0 if carried[0] and not (carried[1] and is_last[0] >= is_last[1]) else 1

    def made(number: int) -> Tag:
        (state, frozen), tag = pairs[number], _linear_in(seen, (a, b), number, multiply)
        tag.level = max(Level.SCALED, state.level)
        if tag.node is not None:
            tag.node.frozen = f"factor{_made_by(frozen)}"
        return _without_scores(tag)

    return _halves(seen, made(0), made(1)) if all(carried) and _are_alike(seen, a, b) else made(number)


def _without_scores(tag: Tag) -> Tag:
    """The tag of a product that mixes no tokens: a state again, whatever scores and softmax are in its factors."""
    return replace(tag, mixes=False, scores=None, logits=None, form="")


def _weights_side(left: Tag, right: Tag) -> int | None:
    """Which side of a product is attention weights: 0 the left, 1 the right; None if neither is.

    Scores used without a softmax count as weights only on the left, as in (q k^T) v. On the right, the product of keys
    and values in q (k^T v) would be taken for weights.
    """
    is_weights = [tag.mixes or tag.level == Level.SOFTMAX or tag.form == "exp" for tag in (left, right)]
    if is_weights[0] and (not is_weights[1] or left.level >= right.level):
        return 0
    return 1 if is_weights[1] and right.level > Level.PRODUCT else None
