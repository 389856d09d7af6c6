"""Following the submodules of a module through a forward pass, unrecorded."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rankbench.tape.calls import tensors_in
from rankbench.tape.tags import Visit


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
