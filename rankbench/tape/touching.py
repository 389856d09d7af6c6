"""A pass in which one number of each input is changed a little."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankbench.tape.calls import tensors_in
from rankbench.tape.marks import Mark, Way, another, is_mask, is_tokens, place_of
from rankbench.tape.plain import Plain
from rankbench.tape.recording import Seen
from rankbench.tape.tags import Tag


class Touching(Plain):
    """A pass with changed numbers, which spread as the network spreads them."""

    has_sizes = False

    def __init__(self, module: Callable, submodule: str | None, way: Way) -> None:
        super().__init__(module, submodule)
        self.way = way
        self.marks: list[Mark | None] = []  # of each input
        self.data: set[int] = set()  # inputs that are touched, or would be
        self.copied: set[int] = set()  # inputs of tokens of which an embedding looked up a copy, or a part
        self.places: dict[int, int] = {}  # of token inputs: number by place in memory
        self.given: list = []

    def prepared(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.given = [args, kwargs]
        for x in tensors_in(self.given):
            number = sum(mark is not None for mark in self.marks)
            self.marks.append(None)
            if not x.numel() or not x.dim():
                continue
            if x.is_floating_point() and not is_mask(x) and len(self.marks) - 1 in self.way.left_out:
                self.data.add(len(self.marks) - 1)
                continue
            if x.is_floating_point() and not is_mask(x) and len(self.marks) - 1 not in self.way.exchanged:
                at = place_of(x.shape, number, self.way)
                at = at[:2] if self.way.rows and x.dim() == 3 else at
                self._touch(x, at)
                self.marks[-1] = self.marked(len(self.marks) - 1, x.shape, at, True)
            elif len(self.marks) - 1 in self.way.exchanged:
                at = place_of(x.shape, number, self.way)
                x[at] = another(x, at)
                self.marks[-1] = self.marked(len(self.marks) - 1, x.shape, at, False)
            elif not x.is_floating_point() and x.dtype != torch.bool:
                self.places[x.untyped_storage().data_ptr()] = len(self.marks) - 1
        return args, kwargs

    def marked(self, number: int, shape: Sequence[int], at: tuple[int, ...], has_features: bool) -> Mark:
        """Where the input of this number is touched."""
        self.data.add(number)
        return Mark(tuple(shape), at, has_features)

    @property
    def unseen(self) -> frozenset[int]:
        """Inputs that may be tokens, of which no embedding was seen: they are copied before, say. Where another input
        has two axes, one number for each sequence is no token, but its length or class."""
        leaves = tensors_in(self.given)
        most = max((len(mark.shape) for mark in self.marks if mark is not None), default=0)
        return frozenset(
            number
            for number, (x, mark) in enumerate(zip(leaves, self.marks, strict=True))
            if (mark is None or number in self.copied) and is_tokens(x) and not x.dim() == 1 < most
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
                number = sum(mark is not None for mark in self.marks[:index])
                at = place_of(given.shape, number, self.way)
                self._touch(result, at[::-1] if is_turned else at)
                self.marks[index] = self.marked(index, given.shape, at, False)
        return tag
