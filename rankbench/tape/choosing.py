"""A touched pass that sees tokens mixed without a sum of weighted tokens: chosen by comparing pairs of them, as nearest
neighbours are, or weighed by a softmax that no sum applies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import DESCRIBES, name_of, tensors_in
from rankbench.tape.marks import Way
from rankbench.tape.plain import Plain
from rankbench.tape.recording import Seen
from rankbench.tape.replay import Call
from rankbench.tape.tags import Scores, Site
from rankbench.tape.touch import changed_at, is_partly, touched_at, touched_in_part, touched_pairs
from rankbench.tape.touching import Touching

ADD = {"scatter_add", "scatter_reduce", "index_add", "index_reduce"}  # calls that add numbers at some indices


class Choosing(Touching):
    """A touched pass, compared with the plain one."""

    def __init__(self, base: Plain, way: Way, sequences: Mapping[int, int]) -> None:
        super().__init__(base, way, sequences)
        self.scores: dict[Site | None, list[list[int]]] = {}  # of products of queries and keys: those touched
        # of queries of this shape: the touched indices along axes that are touched in part
        self.parts: dict[tuple[Site | None, torch.Size], dict[int, list[int]]] = {}
        # calls that took tokens by indices, and what compared these tokens; chosen: less those that attention has read
        self.taken: dict[Call, Site | None] = {}
        self.chosen: dict[Call, Site | None] = {}
        self.indices: list[Tensor] = []  # by which tokens were taken
        self.unsummed = WeakTensorKeyDictionary()  # weighted states, before they are summed: the call

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = name_of(func)[0]
        named = kwargs or {}
        is_sum = name == "sum" and "dtype" not in named and (len(args) > 1 or "dim" in named or "axis" in named)
        for x in tensors_in([args, kwargs]) if name not in DESCRIBES and not is_sum else ():
            if x in self.unsummed:
                raise ConfigError(
                    f"{self.unsummed[x]}: weighs states with a softmax that depends on other tokens than theirs, and "
                    f"{name} comes before any sum, so that heads are not seen; write it as a product of matrices, or "
                    "as (p * v).sum(dim)"
                )
        result = super().__torch_function__(func, types, args, kwargs)
        if name in ADD:  # tokens to others, if not to their own places
            for index in tensors_in([args, kwargs]):
                counted = self.tag(index).counted
                is_put_back = any(torch.equal(index, other) for other in self.indices)
                if counted is not None and counted.compares and not is_put_back:
                    self.chosen[self.call] = None
        return result

    def compares(self, given: list[Tensor], made: list[Tensor]) -> None:
        """What whole numbers are made of pairs of tokens counts as made of scores."""
        for x, x0 in zip(given, self.base.compared.get(self.call.index, given), strict=False):
            touched = touched_pairs(x, x0) if x.shape == x0.shape else []
            for tag in map(self.tag, made) if touched else ():
                of_numbers = tag if tag.counted is None else tag.counted
                of_numbers.mixes, of_numbers.opaque = True, of_numbers.opaque or self.call
                if of_numbers.scores is None:
                    key = Site(self.call.module, self.call.function, self.call.index)
                    of_numbers.scores, self.scores[key] = Scores(x[..., :1], x.mT[..., :1], key), touched
                    self.parts[key, x.shape[:-1]] = touched_in_part(x, x0)

    def takes(self, seen: Seen, x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
        """Whether some tokens of x are taken more than once, or several for each index, as neighbours are: not if they
        are sorted, or left out, or keep their places."""
        of_indices = [tag.counted for y in tensors_in([seen.args, seen.kwargs]) if (tag := self.tag(y)).counted]
        if not x.numel() or not any(tag.compares for tag in of_indices):
            return False
        self.indices += [y for y in seen.others if not y.is_floating_point()]
        last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        numbers = function(torch.arange(last + 1, device=x.device).as_strided(x.shape, x.stride()))
        has_several = numbers.dim() > sum(stride > 0 for stride in x.stride())
        is_again = numbers.unique().numel() < numbers.numel() or has_several
        is_again = is_again and self._moves_tokens(seen, x, function)
        if is_again:
            scores = next((tag.scores for tag in of_indices if tag.scores is not None), None)
            self.chosen[seen.call] = None if scores is None else scores.key
            self.taken |= self.chosen
        return is_again

    def _moves_tokens(self, seen: Seen, x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
        """Whether a function that moves the numbers of x does so along an axis at few of whose indices the touch is."""
        (old,) = self.base.compared.get(seen.call.index, [x])
        axes = [axis for axis, size in enumerate(x.shape) if is_partly(touched_at(x, old, axis), size)]
        for axis in axes:
            places = torch.arange(x.shape[axis], device=x.device)
            places = places.view([-1 if other == axis else 1 for other in range(x.dim())])
            taken = function(places.expand(x.shape))
            if taken.dim() != x.dim() or taken.shape[axis] != x.shape[axis] or bool((taken != places).any()):
                return True
        return not axes

    def attends(self, tensors: Sequence[Tensor]) -> None:
        """Attention reads these: what was taken for them is not mixed unseen."""
        for call in frozenset().union(*(self.tag(x).taken for x in tensors)):
            self.chosen.pop(call, None)

    def parts_of(self, p: Tensor, v: Tensor, shape: torch.Size) -> dict[int, list[int]] | None:
        """The touched indices along those leading axes of P along which its queries are touched in part; None if that
        is not known. shape: of the queries. A query with keys of its own is one of them alone."""
        scores = self.tag(p).scores
        keys = [] if scores is None else [scores.key]
        for key in [*keys, *(self.taken[call] for call in self.tag(v).taken)]:
            if (key, shape) in self.parts:
                return self.parts[key, shape]
            if shape[-1] == 1 and (key, shape[:-1]) in self.parts and is_partly(self.scores[key][0], shape[-2]):
                return self.parts[key, shape[:-1]] | {len(shape) - 2: self.scores[key][0]}
        return None

    def weighs(self, seen: Seen, p: Tensor, v: Tensor) -> None:
        """Weights that change with other tokens than those that they weigh are attention, which a sum shows, as in
        (p * v).sum(1); weights of a mixture change with its own token alone."""
        p0, v0 = self.base.weighed.get(seen.call, (p, v))
        if not p.dim() or p.dim() != v.dim() or p.shape[-1] > 1 or p.shape != p0.shape or v.shape != v0.shape:
            return
        sums = [*(p.sum(axis) for axis in range(p.dim() - 1)), p.reshape(len(p), -1).sum(1)]
        are_whole = any(((x - x.round().clamp(min=1)).abs() < 0.001).all() for x in sums)
        if self.tag(p).form == "shares" and not are_whole:  # other quotients of exponentials than a softmax
            return
        of_others = any(
            size == p.shape[axis]
            and is_partly(touched_at(v, v0, axis), size)
            and set(touched_at(p, p0, axis)) - set(changed_at(v, v0, axis))
            for axis, size in enumerate(v.shape[:-1])
        )
        of_one_key = not torch.equal(v, v0) and any(
            p.shape[axis] > size == 1 and touched_at(p, p0, axis) for axis, size in enumerate(v.shape)
        )
        if of_others or of_one_key:
            self.unsummed[seen.result] = seen.call
