"""A pass in which one number of each input is changed a little, and where the touched tokens are found again: at which
index of which axis."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from rankbench.tape.calls import tensors_in
from rankbench.tape.marks import Mark, Way, another, is_mask, is_tokens, place_of
from rankbench.tape.plain import Plain
from rankbench.tape.reading import Axes, ReadCall
from rankbench.tape.recording import Seen
from rankbench.tape.tags import Tag
from rankbench.tape.touch import along, touched_at


class Touching(Plain):
    """A pass with changed numbers, which spread as the network spreads them. base: the plain pass. sequences: the axis
    that is known to count them, by number of the input."""

    has_sizes = False

    def __init__(self, base: Plain, way: Way, sequences: Mapping[int, int] = MappingProxyType({})) -> None:
        super().__init__(base.module, base.submodule)
        self.base, self.way, self.sequences = base, way, sequences
        self.marks: dict[int, Mark] = {}  # of the inputs that are touched, by number
        self.data: set[int] = set()  # inputs that are touched, or would be
        self.copied: set[int] = set()  # inputs of tokens of which an embedding looked up a copy, or a part
        self.places: dict[int, int] = {}  # of token inputs: number by place in memory
        self.given: list = []
        self.token_axes: dict[int, int] = {}  # of inputs, as attention calls show them
        self.calls: list[ReadCall] = []

    def prepared(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.given = [args, kwargs]
        for number, x in enumerate(tensors_in(self.given)):
            if not x.numel() or not x.dim():
                continue
            at = place_of(x.shape, len(self.marks), self.way)
            is_data = x.is_floating_point() and not is_mask(x)
            if is_data and number in self.way.left_out:
                self.data.add(number)
            elif number in self.way.exchanged:
                x[at] = another(x, at)
                self._mark(number, x.shape, at, False)
            elif is_data:
                at = at[:2] if self.way.rows and x.dim() == 3 else at
                self._touch(x, at)
                self._mark(number, x.shape, at, True)
            elif not x.is_floating_point() and x.dtype != torch.bool:
                self.places[x.untyped_storage().data_ptr()] = number
        return args, kwargs

    def _mark(self, number: int, shape: Sequence[int], at: tuple[int, ...], has_features: bool) -> None:
        self.data.add(number)
        self.marks[number] = Mark(tuple(shape), at, has_features, self.sequences.get(number))

    @property
    def unseen(self) -> frozenset[int]:
        """Inputs that may be tokens, of which no embedding was seen: they are copied before, say. Where another input
        has two axes, one number for each sequence is no token, but its length or class."""
        most = max((len(mark.shape) for mark in self.marks.values()), default=0)
        return frozenset(
            number
            for number, x in enumerate(tensors_in(self.given))
            if (number not in self.marks or number in self.copied) and is_tokens(x) and not x.dim() == 1 < most
        )

    def _touch(self, x: Tensor, at: tuple) -> None:
        noise = torch.randn(x[at].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        deviation = x.double().std().nan_to_num(1.0).item() or 1.0
        x[at] += (self.way.scale * deviation * (noise.sign() + noise)).to(x)

    def embedded(self, seen: Seen) -> Tag:
        tag, result = super().embedded(seen), seen.result
        for x in tensors_in([seen.args, seen.kwargs]):
            if x.is_floating_point() or not self.tokens.hold(x):
                continue
            index = self.places.get(self.tokens.origin_of(x))
            if index is None or result.dim() < 2:
                continue
            self.data.add(index)
            if index in self.way.left_out:
                continue
            given = tensors_in(self.given)[index]
            is_turned = x.dim() == 2 and (x.shape, x.stride()) == (given.shape[::-1], given.stride()[::-1])
            is_given = (x.shape, x.stride()) == (given.shape, given.stride())
            if x.data_ptr() != given.data_ptr() or result.shape[:-1] != x.shape or not (is_turned or is_given):
                self.copied.add(index)
            else:
                at = place_of(given.shape, sum(number < index for number in self.marks), self.way)
                self._touch(result, at[::-1] if is_turned else at)
                self._mark(index, given.shape, at, False)
        return tag

    # --- where the touched tokens are found again --------------------------------------------------------------------

    def input_of(self, at: Sequence[int], size: int) -> int | None:
        """Number of the only input that is touched at the same token; None if there is none, or several."""
        if not 0 < len(at) < size:
            return None
        axes_of = {number: mark.axes_of(at, size) for number, mark in self.marks.items()}
        fits = [number for number, axes in axes_of.items() if axes and self.token_axes.get(number, axes[0]) in axes]
        exact = {number: axes for number in fits if (axes := self.marks[number].exact_axes_of(at, size))}
        for number, axes in exact.items():
            if len(axes) == 1:
                self.token_axes.setdefault(number, axes[0])
        chosen = list(exact) or fits
        return chosen[0] if len(chosen) == 1 else None

    def inputs_of(self, at: Sequence[int], size: int) -> set[int]:
        """Numbers of the inputs whose tokens are touched at these indices, each alone, as in a sum of two inputs, or
        else all together, as where a convolution has carried the touch to its neighbours."""
        each = {self.input_of([index], size) for index in at}
        return {number for number in (each if None not in each else {self.input_of(at, size)}) if number is not None}

    def places_of(self, shape: Sequence[int], axis: int) -> list[int]:
        """Where inputs of tokens of this shape are touched along an axis, if they are; of the turned one, too."""
        marks = [mark for mark in self.marks.values() if axis < min(2, len(mark.shape))]
        places = [mark.at[axis] for mark in marks if mark.shape == tuple(shape)]
        return places + [mark.at[1 - axis] for mark in marks if mark.shape == tuple(shape)[::-1]]

    @property
    def sequence(self) -> tuple[int, int]:
        """Which of how many sequences is touched."""
        if not self.marks:
            return 0, 0
        number = min(self.marks)
        mark, batch = self.marks[number], self.axes_of_input(number).batch or 0
        return mark.at[batch], mark.shape[batch]

    def reads_cached(self) -> bool:
        """Whether attention may read all inputs of four axes that are left alone: heads and tokens, in either order."""

        def may_read(call: ReadCall, sequences: int, heads: int, tokens: int, _: int) -> bool:
            return call.num_keys >= tokens and math.prod(call.shape[:-2]) % (sequences * heads) == 0

        left_out = (x.shape for number, x in enumerate(tensors_in(self.given)) if number in self.way.left_out)
        orders = [(shape, (*shape[:1], *shape[2:0:-1], *shape[3:])) for shape in left_out if len(shape) == 4]
        return all(any(may_read(call, *shape) for call in self.calls for shape in either) for either in orders)

    @property
    def width_of_token(self) -> int:
        """Of images, how many pixels side by side make a token, if these form a square; else 1."""
        if not self.calls or all(len(mark.shape) < 4 for mark in self.marks.values()):
            return 1
        read = next((x for run in reversed(self.calls[0].runs) for x in self.entered.get(run, ())), None)
        number = 1 if read is None else read.numel() // (read.shape[-1] * self.sequence[1])
        return max(1, max(mark.shape[-1] for mark in self.marks.values()) // max(1, math.isqrt(number)))

    def leaves_rows(self, call: ReadCall) -> bool:
        """Whether P has more leading indices than heads of all sequences: windows, or heads that the touch missed."""
        return math.prod(call.shape[:-2]) > call.lead.heads * self.sequence[1]

    def may_be_of_features(self, call: ReadCall) -> bool:
        """Whether the keys of a call may be features or groups of them, of which the first alone is touched."""
        widths = [mark.shape[2] for mark in self.marks.values() if mark.at[2:] == (0,)]
        return call.touched == (0,) and any(width % call.num_keys == 0 for width in widths)

    def holds_parts_of_features(self, x: Tensor, old: Tensor) -> bool:
        """Whether the first axis of a state counts the tokens of all sequences, one of which is touched alone, and the
        second one parts of their features: those of a state (B, N, D) around, or of an input."""
        around = [tuple(state.shape) for run in self.stack for state in self.base.entered.get(run, ())]
        around += [mark.shape for mark in self.marks.values()]
        of_tokens = [shape for shape in around if len(shape) == 3 and shape[2] == x.shape[1] * x.shape[2] > x.shape[2]]
        return len(touched_at(x, old, 0)) == 1 and any(shape[0] * shape[1] == len(x) for shape in of_tokens)

    def axes_of_input(self, number: int) -> Axes:
        """The axis of tokens of an input: that along which attention calls saw its touch."""
        mark = self.marks.get(number)
        if mark is None:
            return Axes(self.sequences.get(number), ())
        if len(mark.shape) > 3:
            return Axes(0, ())
        calls = [call for call in self.calls if call.keys_of == number and 0 < len(call.touched) < call.num_keys]
        found = {(mark.axes_of(call.touched, call.num_keys), call.num_rows) for call in calls}
        has_sequences = len(mark.shape) - mark.has_features > 1  # each of which has as many rows of P
        axes = {
            axis
            for axes, rows in found
            for axis in axes
            if len(axes) == 1 and not (has_sequences and rows % mark.shape[1 - axis])
        }
        if len(axes) != 1:
            return Axes(mark.sequences, ())
        (tokens,) = axes
        return Axes(1 - tokens if has_sequences else None, (tokens,))

    def holds_one_token(self, leads: Tensor) -> bool:
        """Whether the touched leading indices are those of one touched token of each input, and of its sequence, apart
        or flattened."""
        marks = [mark for mark in self.marks.values() if len(mark.shape) < 4]
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
