"""Where inputs are touched: how, and at which token of each."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.tape.touch import changed_at


class Way(NamedTuple):
    """How inputs are touched: by how many standard deviations, 0 for not at all; in which inputs of tokens one is
    exchanged for another; whether at one of the first tokens; whether at all numbers along the last of three axes;
    which inputs are left alone; how far from the usual token, or pixel; how far apart those of two inputs are;
    whether at the last number of the last of three axes, not the first."""

    scale: float
    exchanged: frozenset[int] = frozenset()
    early: bool = False
    rows: bool = False
    left_out: frozenset[int] = frozenset()
    beside: int = 0
    stride: int = 1
    last: bool = False


class Mark(NamedTuple):
    """Where an input is touched. sequences: the axis that is known to count them."""

    shape: tuple[int, ...]
    at: tuple[int, ...]
    has_features: bool
    sequences: int | None = None

    def axes_of(self, at: Sequence[int], size: int) -> tuple[int, ...]:
        """The axes, of the first two, along which the touched token may be that at these indices among so many. A scan
        before has spread the touch to the end, and a convolution to both sides."""
        index = middle(at, size)
        shifted = [
            axis for axis in self._axes if index == self.at[axis] or size - index == self.shape[axis] - self.at[axis]
        ]
        return self.exact_axes_of(at, size) or tuple(shifted)

    def exact_axes_of(self, at: Sequence[int], size: int) -> tuple[int, ...]:
        """Those that are as long, too."""
        index = middle(at, size)
        return tuple(axis for axis in self._axes if (self.shape[axis], self.at[axis]) == (size, index))

    @property
    def _axes(self) -> list[int]:
        if len(self.shape) > 3:
            return []
        return [axis for axis in range(min(2, len(self.shape))) if axis != self.sequences]

    def sequences_in(self, new: Tensor, old: Tensor) -> int | None:
        """The axis of this input that counts sequences, from a state that its touch has reached through the whole
        network: along sequences it stands where it stood, and along tokens at several. None if that does not tell."""
        touched = [changed_at(new, old, axis) for axis in range(new.dim())]
        alone = [(size, at[0]) for at, size in zip(touched, new.shape, strict=True) if len(at) == 1 and size > 1]
        fits = [axis for axis in range(min(2, len(self.shape))) if (self.shape[axis], self.at[axis]) in alone]
        is_told = len(alone) == len(fits) == 1 and 1 not in self.shape[:2]  # one token, or sequence, is not told
        return fits[0] if is_told else None


def middle(at: Sequence[int], size: int) -> int:
    """The index of the touched token, from all indices to which the touch was carried."""
    return at[0] if at[-1] == size - 1 else at[len(at) // 2]


def place_of(shape: Sequence[int], number: int, way: Way) -> tuple[int, ...]:
    """The number of an input that is touched: `way.beside` from its usual place, along whichever axis counts tokens."""
    axes = range(1 if len(shape) < 4 else 2, len(shape))
    place = tuple(
        min(max(0, at + way.beside * (axis in axes)), shape[axis] - 1)
        for axis, at in enumerate(_usual_place(shape, number * way.stride, way.early))
    )
    return (*place[:2], shape[2] - 1) if way.last and len(shape) == 3 else place


def _usual_place(shape: Sequence[int], number: int, early: bool) -> tuple[int, ...]:
    """A place off the diagonal, so that sequences and tokens differ, and at another token for each input. early: at one
    of the first tokens, not one of the last, whichever axis is theirs."""
    if early:
        first = [1, number + (number > 0), *[0] * len(shape)] if len(shape) > 1 else [number]
        return tuple(min(at, size - 1) for at, size in zip(first, shape, strict=False))
    last = [size - 1 for size in shape]
    if len(shape) == 2 or len(shape) == 3:
        last[1] = max(0, shape[1] - 2 - number) if shape[1] > 2 + number else max(0, shape[1] - 2)
    if len(shape) == 1:
        last[0] = max(0, shape[0] - 2 - number)
    if len(shape) == 3:
        last[2] = 0
    if len(shape) > 3:
        last[1] = 0
    return tuple(last)


def is_tokens(x: Tensor) -> bool:
    """Whether whole numbers may be tokens: of more than two kinds, which masks have, and no list of positions."""
    if x.is_floating_point() or x.dtype == torch.bool or x.dim() not in (1, 2) or x.shape[-1] < 2:
        return False
    return x.unique().numel() > 2 and not bool((x == torch.arange(x.shape[-1], device=x.device)).all())


def without_tokens(inputs: Sequence[Tensor], held: frozenset[int] = frozenset()) -> frozenset[int]:
    """Inputs that may be numbers of a sequence and not of its tokens, as a time or a class is: those of fewer axes,
    where others have tokens with features, or tokens of which embeddings will make such. held: which are, anyway."""
    axes = [0 if number in held else x.dim() + is_tokens(x) for number, x in enumerate(inputs)]
    return held | {number for number, size in enumerate(axes) if 0 < size < 3 <= max(axes)}


def cached(inputs: Sequence[Tensor]) -> frozenset[int]:
    """Inputs that may be keys and values of earlier tokens, of which one number is one head's alone, beside others:
    those of four axes, an even number of each shape; with their masks."""
    of_four = {number: x for number, x in enumerate(inputs) if x.dim() == 4 and x.is_floating_point()}
    masks = frozenset(number for number, x in of_four.items() if is_mask(x))
    counts = Counter(x.shape for number, x in of_four.items() if number not in masks)
    found = frozenset(number for number in of_four.keys() - masks if counts[of_four[number].shape] % 2 == 0)
    are_beside = any(0 < x.dim() < 4 and x.dtype != torch.bool for x in inputs)
    return found | masks if found and are_beside else frozenset()


def another(x: Tensor, at: tuple[int, ...]) -> Tensor:
    """Another token of the same sequence; the token itself if all are alike."""
    others = x[at[:-1]][x[at[:-1]] != x[at]]
    return others[0] if len(others) else x[at]


def is_mask(x: Tensor) -> bool:
    """Whether a tensor of floats holds nothing but 0, 1 and the least numbers, as masks do."""
    least = torch.finfo(x.dtype).min
    return bool(((x == 0) | (x == 1) | (x <= least / 2)).all())
