"""A touched pass that refuses weights of a softmax over tokens that no sum applies: such attention would be unseen."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import DESCRIBES, name_of, tensors_in
from rankbench.tape.choosing import Choosing
from rankbench.tape.marks import Way
from rankbench.tape.plain import Plain
from rankbench.tape.recording import Seen
from rankbench.tape.touch import changed_at, is_partly, touched_at


class Weighing(Choosing):
    """A touched pass, compared with the plain one."""

    def __init__(
        self, module: Callable, submodule: str | None, base: Plain, way: Way, sequences: Mapping[int, int]
    ) -> None:
        super().__init__(module, submodule, base, way, sequences)
        self.unsummed = WeakTensorKeyDictionary()  # weighted states, before they are summed: the call

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

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = name_of(func)[0]
        is_sum = name == "sum" and "dtype" not in (kwargs or {}) and (len(args) > 1 or "dim" in (kwargs or {}))
        for x in tensors_in([args, kwargs]) if name not in DESCRIBES and not is_sum else ():
            if x in self.unsummed:
                raise ConfigError(
                    f"{self.unsummed[x]}: weighs states with a softmax that depends on other tokens than theirs, and "
                    f"{name} comes before any sum, so that heads are not seen; write it as a product of matrices, or "
                    "as (p * v).sum(dim)"
                )
        return super().__torch_function__(func, types, args, kwargs)
