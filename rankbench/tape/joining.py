"""What joins tokens to fewer, as a convolution with a stride, a pool or merged patches do: two neighbours go into it
apart and come out, or are attended to, as one. Only passes in which either of them is touched can show it."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from rankbench.tape.mixing import axes_of, places_in
from rankbench.tape.probe import Touched
from rankbench.tape.tags import Visit
from rankbench.tape.touch import is_partly, most_touched, touched_at

Places = dict[Visit, tuple[tuple[int, ...], int]]  # by submodule: a number of its state, and the axis of its tokens


def joined(touched: Touched) -> list[str]:
    """The submodules that join tokens; "" is the module itself, in front of all of them."""
    if not touched.way.scale or not _may_join(touched):
        return []
    one = _with_inputs_apart(touched)
    pairs = [(one, other) for other in _beside(one)]
    places = {run: at for run in touched.base.entered if (at := _place_in(run, touched)) is not None}
    while True:  # behind a convolution, say, the touches of two tokens overlap
        places = {run: at for run, at in places.items() if not any(_apart(*pair, run) for pair in pairs)}
        outer = {run: at for run, at in places.items() if not any(run.name.startswith(f"{x.name}.") for x in places)}
        if not outer:
            break
        pairs += _narrowed(touched, outer)
        places = {run: at for run, at in places.items() if run not in outer}
    found = []
    for pair in pairs:
        found += _by_submodules(*pair)
        found += _by_attention(*pair)
    return found


def _may_join(touched: Touched) -> bool:
    """Whether tokens get fewer, or are turned, on the way through the network."""
    sizes = {size for call in touched.calls for size in (call.num_queries, call.num_keys)}
    marks = [mark for mark in touched.marks.values() if len(mark.shape) < 4]
    turned = [
        each.entered[0].dim() == each.left.dim() and each.entered[0].shape[1:-1] != each.left.shape[1:-1]
        for each in touched.base.passages.values()
    ]
    return len(sizes) > 1 or any(turned) or any(sizes.isdisjoint(mark.shape) for mark in marks)


def _with_inputs_apart(touched: Touched) -> Touched:
    """Of several inputs, a pass in which no two are touched at neighbouring tokens, or beside it one would be touched
    where the other was, as if both were joined."""
    if len(touched.marks) < 2:
        return touched
    return touched.another(touched.way._replace(stride=2), {}) or touched


def _beside(touched: Touched) -> list[Touched]:
    """Passes in which a token next to the touched one is touched, on either side."""
    passes = []
    for step in (1, -1):
        other = touched.another(touched.way._replace(beside=step * touched.width_of_token), touched.own_rows)
        if other is None:
            continue
        moving = {number: mark for number, mark in touched.marks.items() if len(mark.at) > 1}
        if moving and all(mark != other.marks.get(number) for number, mark in moving.items()):
            passes.append(other)
    return passes


def _narrowed(touched: Touched, places: Places) -> list[tuple[Touched, Touched]]:
    """Pairs of passes in which the states of submodules are touched at these places, and at the tokens next to them; so
    are queries that no input reaches."""
    passes = []
    for step in (0, 1, -1):
        narrowed = {}
        for run, (at, axis) in places.items():
            index = min(max(0, at[axis] + step), touched.base.entered[run][0].shape[axis] - 1)
            narrowed[run] = (*at[:axis], index, *at[axis + 1 :])
        among = {call.key: call.num_queries for call in touched.calls}
        own_rows = {key: (row + step) % among[key] for key, row in touched.own_rows.items() if key in among}
        other = touched.another(touched.way, own_rows, narrowed)
        if other is not None:
            passes.append(other)
    return [(passes[0], other) for other in passes[1:]]


def _place_in(run: Visit, touched: Touched) -> tuple[tuple[int, ...], int] | None:
    """The number of a submodule's state that is touched most, and the axis of its tokens, if fewer tokens come out or
    are attended to; of an image only where its pixels have passed attention."""
    (new, *_), (old, *_) = touched.entered.get(run) or [None], touched.base.entered[run] or [None]
    if new is None or old is None or not old.is_floating_point() or new.shape != old.shape or new.equal(old):
        return None
    tokens = _token_axes(run, new, old, touched)
    if not tokens or (old.dim() > 3 and not is_behind_attention(run, touched)):
        return None
    size = prod(old.shape[axis] for axis in tokens)
    makes_fewer = run in touched.base.passages and _makes_fewer(run, touched, tokens)
    if not makes_fewer and all(call.num_keys >= size for call in touched.inside(run)):
        return None
    return most_touched(new, old), tokens[-1]


def _by_submodules(touched: Touched, beside: Touched) -> list[str]:
    """Those that two tokens enter apart and leave as one, along an axis whose size they change."""
    others = {call.key: call for call in beside.calls}
    found = []
    for run, passage in touched.base.passages.items():
        left = passage.left
        states = [each.passages[run].left for each in (touched, beside) if run in each.passages]
        if [x.shape for x in states] != [left.shape] * 2:
            continue
        # attention inside puts the touch back to its queries
        inside = [(call, others[call.key]) for call in touched.inside(run) if call.key in others]
        if not all(_are_apart(call.touched_queries, other.touched_queries) for call, other in inside):
            continue
        at = [[touched_at(x, left, axis) for x in states] for axis in range(left.dim())]
        is_one = all(one and other and not _are_apart(one, other) for one, other in at)
        axes = [axis for axis, _ in _apart(touched, beside, run)] if is_one else []
        if axes and _makes_fewer(run, touched, axes):
            found.append(run.name)
    return found


def _makes_fewer(run: Visit, touched: Touched, axes: Sequence[int]) -> bool:
    """Whether a submodule changes the size of its state along one of these axes; or makes fewer tokens of an image,
    whose pixels have passed attention."""
    entered, left = touched.base.passages[run].entered[0], touched.base.passages[run].left
    if left.dim() == entered.dim():
        return any(left.shape[axis] != entered.shape[axis] for axis in axes)
    pixels, tokens = (
        prod(old.shape[axis] for axis in _token_axes(run, new, old, touched) or ())
        for new, old in ((touched.entered[run][0], entered), (touched.passages[run].left, left))
    )
    return is_behind_attention(run, touched) and tokens < pixels


def is_behind_attention(run: Visit, touched: Touched) -> bool:
    """Whether the result of a submodule has passed attention outside of it."""
    passed = touched.passages[run].passed if run in touched.passages else 0
    return any(passed >> call.number & 1 and run not in call.runs for call in touched.calls)


def _token_axes(run: Visit, new: Tensor, old: Tensor, touched: Touched) -> Sequence[int] | None:
    """The axes of a state that count tokens, or those of an image behind its first that are touched in part; None if
    not known."""
    if old.dim() > 3:
        return [axis for axis in range(1, old.dim()) if is_partly(touched_at(new, old, axis), old.shape[axis])]
    axes = axes_of(touched, new, old, run)
    return None if axes is None else axes.tokens


def _by_attention(touched: Touched, beside: Touched) -> list[str]:
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
        is_one &= call.number > (beside.num_before or 0)  # else both passes are the same there
        if is_one and call.depth <= last and not touched.leaves_rows(call):
            around = [run.name for run in reversed(call.runs) if _apart(touched, beside, run)]
            found += around[:1] or [""] * is_told
        is_told |= bool(few)
    return found


def _apart(touched: Touched, beside: Touched, run: Visit) -> list[tuple[int, int]]:
    """The axes of tokens along which two touches stand apart where they enter a submodule, with their sizes; none if
    one of the states that it reads holds them together."""
    read = [each.entered.get(run, ()) for each in (touched.base, touched, beside)]
    found = []
    for old, one, other in zip(*read, strict=False):
        axes: Sequence[int] | None = None
        if old.is_floating_point():
            axes = _token_axes(run, one, old, touched) if one.shape == old.shape else ()
        axes = (0, 1) if axes is None else axes  # one of them
        at = [(axis, places_in(touched, one, old, axis), places_in(beside, other, old, axis)) for axis in axes]
        apart = [(axis, old.shape[axis]) for axis, *each in at if _are_apart(*each)]
        if not apart and any(x and y for _, x, y in at):
            return []
        found += apart
    return found


def _are_apart(one: Sequence[int] | None, other: Sequence[int] | None) -> bool:
    return bool(one) and bool(other) and set(one or ()).isdisjoint(other or ())
