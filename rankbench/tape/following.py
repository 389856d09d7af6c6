"""What is followed through a forward pass: the submodules, unrecorded; the inputs that may be tokens; states."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankbench.tape.calls import COPIES, tensors_in
from rankbench.tape.replay import Call
from rankbench.tape.tags import Kind, Tag, Visit

MAPS = ("linear", "addmm", "mm", "conv1d", "conv2d", "conv3d")  # with one matrix for all heads
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "tensordot")
OF_INPUT = torch.Size()  # `Tag.state` of the numbers of an input, which no map has made features of yet


@contextmanager
def following(
    module: nn.Module,
    begun: Callable[[Visit, nn.Module, Any], None],
    ended: Callable[[Visit, nn.Module, Any], None],
) -> Iterator[list[Visit]]:
    """Follow all submodules in a forward pass; yield the list of runs in progress. begun(run, submodule, arguments),
    ended(run, submodule, result): called unrecorded, so that the calls of the module keep their numbers."""
    running: list[Visit] = []
    counts: Counter[str] = Counter()

    def enter(name: str, submodule: nn.Module, args: tuple, kwargs: dict) -> None:
        running.append(Visit(name, counts[name]))
        counts[name] += 1
        with torch._C.DisableTorchFunction():
            begun(running[-1], submodule, (args, kwargs))

    def leave(submodule: nn.Module, args: tuple, kwargs: dict, result: Any) -> None:
        with torch._C.DisableTorchFunction():
            ended(running.pop(), submodule, result)

    with ExitStack() as hooks:
        for name, submodule in module.named_modules():
            if name:
                hook = submodule.register_forward_pre_hook(partial(enter, name), with_kwargs=True)
                hooks.callback(hook.remove)
                hooks.callback(submodule.register_forward_hook(leave, with_kwargs=True).remove)
        yield running


def first_state(x: Any) -> Tensor | None:
    """The first tensor of floats."""
    return next((tensor for tensor in tensors_in(x) if tensor.is_floating_point()), None)


def state_of(call: Call, result: Tensor, tags: Sequence[Tag]) -> torch.Size | None:
    """`Tag.state` of what a call made. tags: of what it read."""
    function = call.function.rpartition(".")[2]
    of_activations = [tag.state for tag in tags if tag.kind == Kind.ACTIVATION]
    states = {state for state in of_activations if state is not None}
    is_map, of_several = function in MAPS, len(of_activations) > 1
    if function == "embedding" and not states:
        return result.shape
    if len(states) != 1 or (is_map and of_several) or function in PRODUCTS:
        return None
    (state,) = states
    if state == OF_INPUT:
        features_last = result.movedim(1, -1) if function.startswith("conv") else result
        return features_last.shape if is_map else state
    if result.shape[:-1] == state[:-1]:
        return result.shape
    if is_map or (function in ("cat", "stack") and of_several):  # of parts of the features, or heads of their own
        return None
    if result.shape[-1:] == state[-1:]:
        return result.shape
    return state if result.numel() == state.numel() else None


class TokenInputs:
    """Inputs of whole numbers, and the copies that are made of them, by place in memory."""

    def __init__(self) -> None:
        self._inputs: dict[int, tuple[Tensor, int]] = {}  # with the place of the input

    def add(self, x: Tensor) -> None:
        """Follow an input."""
        place = x.untyped_storage().data_ptr()
        self._inputs[place] = x, place

    def hold(self, x: Any) -> bool:
        """Whether a tensor is one of the inputs, or a copy of it, or shares its memory."""
        is_plain = isinstance(x, Tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        return is_plain and x.numel() > 0 and x.untyped_storage().data_ptr() in self._inputs

    def origin_of(self, x: Tensor) -> int:
        """Place in memory of the input that a tensor of `hold` is, or is a copy of."""
        return self._inputs[x.untyped_storage().data_ptr()][1]

    def follow(self, name: str, given: list[Tensor], result: Any) -> None:
        """Remember the result of a call that copies an input."""
        read = [x for x in given if not x.is_floating_point() and self.hold(x)] if name in COPIES else []
        if len(read) == 1 and isinstance(result, Tensor) and not result.is_floating_point():
            self._inputs.setdefault(result.untyped_storage().data_ptr(), (result, self.origin_of(read[0])))
