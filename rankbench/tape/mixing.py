"""Which axes of a state count tokens, and which submodules mix these by something that is no attention."""

from collections.abc import Sequence

from torch import Tensor

from rankbench.tape.following import first_state
from rankbench.tape.plain import Plain
from rankbench.tape.probe import Touched
from rankbench.tape.reading import Axes, ReadCall
from rankbench.tape.tags import Visit
from rankbench.tape.touch import LEAK, changed_at, is_partly, is_spread, touched_at


def axes_of(touched: Touched, new: Tensor, old: Tensor, run: Visit | None = None) -> Axes | None:
    """Axes of a state: that of tokens is as long as, and touched at the same index as, the keys of an attention call.
    None where the touch does not tell. run: the submodule whose own calls show it, if it has any."""
    calls = (touched.inside(run) if run is not None else []) or touched.calls
    number, num_sequences = touched.sequence
    at = [touched_at(new, old, axis) for axis in range(new.dim())]
    partly = [axis for axis, of_axis in enumerate(at) if is_partly(of_axis, new.shape[axis])]
    ends = [axis for axis in partly if (at[axis], new.shape[axis]) == ([number], num_sequences)]
    tokens = [
        axis
        for axis in partly
        if any((call.num_keys, list(call.touched)) == (new.shape[axis], at[axis]) for call in calls if call.touched)
    ]
    if len(partly) == 2 and len(ends) == 1:  # what is no sequence is a token, even within windows
        tokens = [axis for axis in partly if axis not in ends]
    if len(tokens) == 1 and tokens != ends:
        batch = [axis for axis in ends if axis not in tokens][:1]
        alone = [axis for axis in range(new.dim() - 1) if new.shape[axis] == 1 and axis not in tokens]
        return Axes(next(iter(batch or alone), None), tuple(tokens))
    if num_sequences == 1 and is_spread(new, old):  # of a single sequence, no axis is touched in part
        ends = [axis for axis in range(new.dim() - 1) if new.shape[axis] == 1]
    if len(ends) != 1 or (tokens and tokens != ends):
        return None
    if is_spread(new, old) and new.dim() > 2:  # what is no attention has mixed all tokens
        sizes = {size for call in calls if call.is_self for size in (call.num_keys, call.num_queries)}
        left = [axis for axis in range(new.dim() - 1) if axis not in ends and new.shape[axis] in sizes]
        return Axes(ends[0], tuple(left)) if len(left) < 2 else None
    # attention within windows: their keys are not the state's tokens; or a state without tokens
    return Axes(ends[0], tuple(axis for axis in partly if axis != ends[0] and axis < new.dim() - 1))


def pixels_of(new: Tensor, old: Tensor) -> tuple[tuple[int, ...], int] | None:
    """The axes of the pixels of a map, and that of their features, behind these or in front; None where the touch does
    not tell."""
    axes = range(1, old.dim())
    of_features = [
        axis for axis in axes if old.shape[axis] > 1 and not is_partly(touched_at(new, old, axis), old.shape[axis])
    ]
    if of_features not in ([axes[0]], [axes[-1]]):
        return None
    return tuple(axis for axis in axes if axis not in of_features), of_features[0]


def mixing(touched: Touched, joined: Sequence[str] = ()) -> tuple[str, ...]:
    """The innermost submodules that mix tokens by something that is no attention: the touch leaves them at more tokens
    than it entered, although attention puts it back to one. joined: those of `joining` and `holding`."""
    plain, found = touched.base, []
    for run, (entered, left, _) in plain.passages.items():
        other = touched.passages.get(run)
        if other is None or other.left.shape != left.shape or run in touched.begun_anew:
            continue
        axes = axes_of(touched, other.left, left, run)
        attended = {call.touched for call in touched.inside(run) if call.is_cross is not False}
        for axis in () if axes is None else axes.tokens:
            reached, changed = (set(f(other.left, left, axis)) for f in (touched_at, changed_at))
            places = []
            for new, old in zip(other.entered, entered, strict=True):
                if new.shape != old.shape or old.dim() <= axis or old.shape[axis] != left.shape[axis]:
                    continue
                is_state, at = old.is_floating_point(), places_in(touched, new, old, axis)
                places.append(tuple(at))
                # a norm makes some leaks of its input large
                reached.difference_update(touched_at(new, old, axis, LEAK**2) if is_state else at)
                changed.difference_update(changed_at(new, old, axis) if is_state else at)
            # what enters may be what the states attend to
            is_told = any(is_partly(at, left.shape[axis]) for at in places) and attended.isdisjoint(places)
            if is_told and (reached or changed):
                found.append(run.name)
    found += [call.call.module or "the module itself" for call in touched.calls if _widens(touched, call)]
    found += [call.module or "the module itself" for call in sorted(touched.chosen)]
    found += filter(None, joined)
    # in front of a submodule with attention; one token is not mixed
    begun = [run for run in touched.begun_anew if all(1 not in x.shape[:2] for x in plain.entered[run])]
    around = [enclosing(run, plain) for run in begun]
    found += [other.name for other in around if other is not None and _enters_at_some(other, touched)]
    if begun and not found:
        found.append("the module itself" if around[0] is None else around[0].name)
    around = [enclosing(run, plain) for run in plain.leaves if _widens_as_a_leaf(run, touched)]
    found += ["the module itself" if run is None else run.name for run in around]
    if not found and (joined or _widens_by_itself(touched)):
        found.append("the module itself")
    names = dict.fromkeys(found)
    return tuple(name for name in names if not any(inner.startswith(f"{name}.") for inner in names))


def enclosing(run: Visit, plain: Plain) -> Visit | None:
    """The run of the submodule that holds this one; None in the module itself."""
    name = run.name
    while name := name.rpartition(".")[0]:
        if found := [other for other in plain.entered if other.name == name]:
            return found[min(run.time, len(found) - 1)]
    return None


def _enters_at_some(run: Visit, touched: Touched) -> bool:
    """Whether the touch enters a submodule, and at some tokens alone: what mixes them all is inside."""
    states = [(new, old) for new, old in touched.states_into(run) if not new.equal(old)]
    return bool(states) and not any(is_spread(new, old) for new, old in states)


def _widens(touched: Touched, call: ReadCall) -> bool:
    """Whether the values of an attention call are touched at more tokens than what its submodule reads, as where a
    convolution made them. Those of a window are not compared."""
    pairs = next(filter(None, map(touched.states_into, reversed(call.runs))), [])
    rows = [_rows(*pair) for pair in pairs]
    each = [
        {index for new, old in rows for index in touched_at(new, old, axis) if old.shape[axis] <= call.num_keys}
        for axis in (0, 1)
    ]
    # overlapping windows hold one token at several of their keys, each window at one
    most = int(touched.values_held[call.key].sum(-1).max())
    return 0 < max(map(len, each)) < min(len(call.touched), most)


def _rows(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
    """Both states, with the pixels of maps in their second axis."""
    found = pixels_of(new, old) if old.dim() > 3 else None
    if found is None:
        return new, old
    flat_new, flat_old = (x.movedim(found[1], -1).flatten(1, -2) for x in (new, old))
    return flat_new, flat_old


def _widens_as_a_leaf(run: Visit, touched: Touched) -> bool:
    """Whether the touch leaves a submodule of `Plain.leaves` at more tokens than it entered."""
    leaf, other = touched.base.leaves[run], touched.leaves.get(run)
    if other is None or other.left.shape != leaf.left.shape or other.entered[0].shape != leaf.entered[0].shape:
        return False
    axes = axes_of(touched, other.left, leaf.left, run)
    for axis in () if axes is None else axes.tokens:
        size = leaf.left.shape[axis]
        read = touched_at(other.entered[0], leaf.entered[0], axis, LEAK**2)
        left = touched_at(other.left, leaf.left, axis)
        if leaf.entered[0].shape[axis] == size and is_partly(read, size) and len(left) > len(read):
            return True
    return False


def _widens_by_itself(touched: Touched) -> bool:
    """Whether attention, or what the module returns, is touched at more tokens than the inputs are, among as many."""
    marks = [mark for mark in touched.marks.values() if len(mark.shape) < 4]
    if len(marks) < len(touched.marks):
        return False
    sizes = {mark.shape[axis] for mark in marks for axis in range(min(2, len(mark.shape))) if axis != mark.sequences}
    most = len(marks) + len({*touched.own_rows.values()})
    each = [call for call in touched.calls if call.num_keys in sizes and not touched.leaves_rows(call)]
    if any(is_partly(call.touched, call.num_keys) and len(call.touched) > most for call in each):
        return True
    new, old = first_state(touched.output), first_state(touched.base.output)
    if new is None or old is None or new.shape != old.shape or old.dim() < 3:
        return False
    axes = axes_of(touched, new, old)
    return axes is not None and any(
        old.shape[axis] in sizes and len({*touched_at(new, old, axis), *changed_at(new, old, axis)}) > most
        for axis in axes.tokens
    )


def places_in(touched: Touched, new: Tensor, old: Tensor, axis: int) -> list[int]:
    """Where a tensor that a submodule reads is touched along an axis: a state, or tokens that it embeds."""
    return touched_at(new, old, axis) if old.is_floating_point() else touched.places_of(old.shape, axis)
