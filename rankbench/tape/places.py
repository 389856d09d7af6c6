"""Where the touched token of each input is found again: at which index of which axis."""

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from rankbench.tape.marks import Mark, Way
from rankbench.tape.reading import Axes, ReadCall
from rankbench.tape.touch import along
from rankbench.tape.touching import Touching


class Placed(Touching):
    """A touched pass whose attention calls show where the touched tokens are. sequences: the axis that is known to
    count them, by number of the input."""

    def __init__(self, module: Callable, submodule: str | None, way: Way, sequences: Mapping[int, int]) -> None:
        super().__init__(module, submodule, way)
        self.sequences = sequences
        self.token_axes: dict[int, int] = {}  # of inputs, as attention calls show them
        self.calls: list[ReadCall] = []

    def marked(self, number: int, shape: Sequence[int], at: tuple[int, ...], has_features: bool) -> Mark:
        return super().marked(number, shape, at, has_features)._replace(sequences=self.sequences.get(number))

    def input_of(self, at: Sequence[int], size: int) -> int | None:
        """Number of the only input that is touched at the same token; None if there is none, or several."""
        if not 0 < len(at) < size:
            return None
        fits: dict[int, tuple[int, ...]] = {}
        for number, mark in enumerate(self.marks):
            if mark is not None and (axes := mark.axes_of(at, size)):
                known = self.token_axes.get(number)
                if known is None or known in axes:
                    fits[number] = axes
        exact = {
            number: axes
            for number, mark in enumerate(self.marks)
            if number in fits and mark is not None and (axes := mark.exact_axes_of(at, size))
        }
        for number, axes in exact.items():
            if len(axes) == 1:
                self.token_axes.setdefault(number, axes[0])
        chosen = list(exact or fits)
        return chosen[0] if len(chosen) == 1 else None

    def inputs_of(self, at: Sequence[int], size: int) -> set[int]:
        """Numbers of the inputs whose tokens are touched at these indices, each alone, as in a sum of two inputs, or
        else all together, as where a convolution has carried the touch to its neighbours."""
        each = {self.input_of([index], size) for index in at}
        return {number for number in (each if None not in each else {self.input_of(at, size)}) if number is not None}

    def places_of(self, shape: Sequence[int], axis: int) -> list[int]:
        """Where inputs of tokens of this shape are touched along an axis, if they are; of the turned one, too."""
        marks = [mark for mark in self.marks if mark is not None and axis < min(2, len(mark.shape))]
        places = [mark.at[axis] for mark in marks if mark.shape == tuple(shape)]
        return places + [mark.at[1 - axis] for mark in marks if mark.shape == tuple(shape)[::-1]]

    @property
    def sequence(self) -> tuple[int, int]:
        """Which of how many sequences is touched."""
        for number, mark in enumerate(self.marks):
            if mark is not None:
                batch = self.axes_of_input(number).batch
                batch = 0 if batch is None else batch
                return mark.at[batch], mark.shape[batch]
        return 0, 0

    @property
    def width_of_token(self) -> int:
        """Of images, how many pixels side by side make a token, if these form a square; else 1."""
        if not self.calls or all(mark is None or len(mark.shape) < 4 for mark in self.marks):
            return 1
        read = next((x for run in reversed(self.calls[0].runs) for x in self.entered.get(run, ())), None)
        number = 1 if read is None else read.numel() // (read.shape[-1] * self.sequence[1])
        return max(1, max(mark.shape[-1] for mark in self.marks if mark is not None) // max(1, math.isqrt(number)))

    def leaves_rows(self, call: ReadCall) -> bool:
        """Whether P has more leading indices than heads of all sequences: windows, or heads that the touch missed."""
        return math.prod(call.shape[:-2]) > call.lead.heads * self.sequence[1]

    def may_be_of_features(self, call: ReadCall) -> bool:
        """Whether the keys of a call may be features or groups of them, of which the first alone is touched."""
        widths = [mark.shape[2] for mark in self.marks if mark is not None and mark.at[2:] == (0,)]
        return call.touched == (0,) and any(width % call.num_keys == 0 for width in widths)

    def axes_of_input(self, number: int) -> Axes:
        """The axis of tokens of an input: that along which attention calls saw its touch."""
        mark = self.marks[number]
        if mark is None:
            return Axes(self.sequences.get(number), ())
        if len(mark.shape) > 3:
            return Axes(0, ())
        ends = [(call.touched, call.num_keys) for call in self.calls if call.keys_of == number]
        found = {mark.axes_of(at, size) for at, size in ends if 0 < len(at) < size}
        axes = {axis for axes in found for axis in axes if len(axes) == 1}
        if len(axes) != 1:
            return Axes(mark.sequences, ())
        (tokens,) = axes
        return Axes(1 - tokens if len(mark.shape) - mark.has_features > 1 else None, (tokens,))

    def holds_one_token(self, leads: Tensor) -> bool:
        """Whether the touched leading indices are those of one touched token of each input, and of its sequence, apart
        or flattened."""
        marks = [mark for mark in self.marks if mark is not None and len(mark.shape) < 4]
        places = {place for mark in marks for place in zip(mark.at[:2], mark.shape, strict=False)}
        places |= {(call.touched_queries[-1], call.num_queries) for call in self.calls if call.touched_queries}
        number, count = self.sequence
        flat = {(number * size + at, count * size) for at, size in places}
        flat |= {(at * count + number, size * count) for at, size in places}
        apart = 0  # axes that hold the token or its sequence
        for axis, size in enumerate(leads.shape):
            found = {(index, size) for index in along(leads, axis).nonzero()[:, 0].tolist()}
            if size > 1 and 0 < len(found) <= len(marks):
                if found <= flat:
                    return True
                apart += found <= places
        return apart > 1
