"""What joins tokens to fewer, as a convolution with a stride, a pool or merged patches do: two neighbours go into it
apart and come out, or are attended to, as one. Only passes in which either of them is touched can show it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rankbench.config.keys import ConfigError
from rankbench.tape.mixing import axes_of, places_in
from rankbench.tape.plain import Changed, Plain
from rankbench.tape.probe import Touched
from rankbench.tape.tags import Visit
from rankbench.tape.touch import touched_at


def joined(plain: Plain, touched: Touched, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """The submodules that join tokens; "" is the module itself, in front of all of them."""
    if not touched.way.scale or not _may_join(plain, touched):
        return []
    found = []
    for other in _beside(plain, touched, args, kwargs):
        found += _by_submodules(plain, touched, other)
        found += _by_attention(plain, touched, other)
    return found


def _may_join(plain: Plain, touched: Touched) -> bool:
    """Whether tokens get fewer, or are turned, on the way through the network."""
    sizes = {size for call in touched.calls for size in (call.num_queries, call.num_keys)}
    marks = [mark for mark in touched.marks if mark is not None and len(mark.shape) < 4]
    turned = [
        each.entered[0].dim() == each.left.dim() and each.entered[0].shape[1:-1] != each.left.shape[1:-1]
        for each in plain.passages.values()
    ]
    return len(sizes) > 1 or any(turned) or any(sizes.isdisjoint(mark.shape) for mark in marks)


def _beside(plain: Plain, touched: Touched, args: tuple, kwargs: dict[str, Any]) -> list[Touched]:
    """Passes in which a token next to the touched one is touched, on either side."""
    passes = []
    for step in (1, -1):
        way = touched.way._replace(beside=step * touched.width_of_token)
        other = Touched(plain.module, plain.submodule, plain, way, touched.sequences)
        other.own_rows = touched.own_rows
        with suppress(Changed, ConfigError):  # it may stand at a token that cannot be told, as one on the diagonal
            other.passed(args, kwargs)
            pairs = [x for x in zip(touched.marks, other.marks, strict=True) if x[0] is not None and len(x[0].at) > 1]
            if pairs and all(one != another for one, another in pairs):
                passes.append(other)
    return passes


def _by_submodules(plain: Plain, touched: Touched, beside: Touched) -> list[str]:
    """Those that two tokens enter apart and leave as one, along an axis whose size they change."""
    others = {call.key: call for call in beside.calls}
    found = []
    for run, passage in plain.passages.items():
        left = passage.left
        states = [each.passages[run].left for each in (touched, beside) if run in each.passages]
        if [x.shape for x in states] != [left.shape] * 2 or left.dim() != passage.entered[0].dim():
            continue
        # attention inside puts the touch back to its queries
        inside = [(call, others[call.key]) for call in touched.calls if run in call.runs and call.key in others]
        if not all(_are_apart(call.touched_queries, other.touched_queries) for call, other in inside):
            continue
        at = [[touched_at(x, left, axis) for x in states] for axis in range(left.dim())]
        is_one = all(one and other and not _are_apart(one, other) for one, other in at)
        if is_one and any(left.shape[axis] != size for axis, size in _apart(plain, touched, beside, run)):
            found.append(run.name)
    return found


def _by_attention(plain: Plain, touched: Touched, beside: Touched) -> list[str]:
    """Those around an attention call that holds two tokens as one key or one query, the innermost that they enter
    apart; "" if they enter none apart."""
    others = {call.key: call for call in beside.calls}
    # behind a call of one query, as that of a class token, all tokens are one by attention
    last = min((call.depth for call in touched.calls if call.num_queries == 1), default=len(touched.calls))
    is_told = touched.width_of_token == 1  # pixels side by side may be one token from the start
    found = []
    for call in touched.calls:
        if (other := others.get(call.key)) is None:
            continue
        ends = [
            (call.touched, other.touched, call.num_keys),
            (call.touched_queries, other.touched_queries, call.num_queries),
        ]
        # all of them are touched behind what spreads each token to all
        few = [(one, another) for one, another, size in ends if one and another and (len(one) < size or size == 1)]
        is_one = not all(_are_apart(one, another) for one, another in few)
        if is_one and call.depth <= last and not touched.leaves_rows(call):
            around = [run.name for run in reversed(call.runs) if _apart(plain, touched, beside, run)]
            found += around[:1] or [""] * is_told
        is_told |= bool(few)
    return found


def _apart(plain: Plain, touched: Touched, beside: Touched, run: Visit) -> list[tuple[int, int]]:
    """The axes of tokens along which two touches stand apart where they enter a submodule, with their sizes; none if
    one of the states that it reads holds them together."""
    read = [each.entered.get(run, ()) for each in (plain, touched, beside)]
    inside = [call for call in touched.calls if run in call.runs] or touched.calls
    found = []
    for old, one, other in zip(*read, strict=False):
        axes: Sequence[int] = (0, 1)
        if old.is_floating_point():
            axes = getattr(axes_of(one, old, inside, touched.sequence), "tokens", ()) if one.shape == old.shape else ()
        at = [(axis, places_in(touched, one, old, axis), places_in(beside, other, old, axis)) for axis in axes]
        apart = [(axis, old.shape[axis]) for axis, *each in at if _are_apart(*each)]
        if not apart and any(x and y for _, x, y in at):
            return []
        found += apart
    return found


def _are_apart(one: Sequence[int] | None, other: Sequence[int] | None) -> bool:
    return bool(one) and bool(other) and set(one or ()).isdisjoint(other or ())
