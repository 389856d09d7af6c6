"""Which attention reads other tokens than its own. The indices of the touch may agree by chance, as those of all of 10
tokens and half of 20 do, or differ by chance, as those of tokens and of keys that join two of them do."""

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from rankbench.tape.probe import Touched
from rankbench.tape.reading import ReadCall
from rankbench.tape.touch import touched_at


def told_apart(touched: Touched) -> list[ReadCall]:
    """The calls of a touched pass, with those to other tokens told from those to their own."""
    selves = {call.key for call in touched.calls if _reads_what_it_was_made_of(call, touched)}
    calls = [replace(call, is_cross=False) if call.key in selves else call for call in touched.calls]
    others = _of_other_inputs(touched) if any(call.is_cross is False for call in calls) else set()
    return [
        replace(call, is_cross=True, keys_of=None) if call.is_cross is False and call.key in others else call
        for call in calls
    ]


def _reads_what_it_was_made_of(call: ReadCall, touched: Touched) -> bool:
    """Whether keys, more or fewer than the queries, are made of the same state as these: the only one that a submodule
    without other calls reads."""
    if not (call.is_cross and call.touched and call.touched_queries) or call.num_keys == call.num_queries:
        return False
    for run in reversed(call.runs):
        if len(touched.inside(run)) > 1:
            return False
        states = [(new, old) for new, old in touched.states_into(run) if not new.equal(old)]
        if len(states) == 1:
            return any(
                new.shape[axis] == call.num_queries and touched_at(new, old, axis) == [*call.touched_queries]
                for new, old in _flat(*states[0])
                for axis in (0, 1)
            )
    return False


def _flat(new: Tensor, old: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both; of images, with their pixels in one axis, channels behind or in front."""
    if new.dim() < 4:
        yield new, old
    else:
        yield new.flatten(2).mT, old.flatten(2).mT
        yield new.flatten(1, -2), old.flatten(1, -2)


def _of_other_inputs(touched: Touched) -> set:
    """The calls of which an input touches queries and no keys, and none touches a query and its own token among the
    keys, when each of several inputs is touched alone."""
    own, apart = set(), set()
    for number in touched.marks if len(touched.marks) > 1 else ():
        others = frozenset(touched.marks) - {number}
        alone = touched.another(touched.way._replace(left_out=touched.way.left_out | others), {})
        if alone is None:
            return set()
        reached = [call for call in alone.calls if {*(call.touched_queries or ())} - {*alone.own_rows.values()}]
        own |= {call.key for call in reached if call.is_cross is False}
        apart |= {call.key for call in reached if not call.touched}
    return apart - own
