"""Passes through a model in the middle of its training, which then goes on as if there had been none."""

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map_only

from rankbench.tape.calls import as_python

DICTS, SEQUENCES = (dict, OrderedDict, defaultdict, Counter), (list, deque)  # a subclass may refuse to be filled again


@contextmanager
def undisturbed(model: nn.Module, hooks: bool = False, cloned: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Eval mode, no gradients, no autocast, no compiled code. Each call of the model gets clones of its inputs.

    Afterwards all that a pass can change is as before: modes, buffers, the attributes of modules (with the entries of
    their lists, dicts, sets and queues, and their generators), and the random numbers of torch, NumPy and Python.
    hooks: whether the user's forward hooks are called. torch's own, which make weights, always are. cloned: the
    parameters that a pass changes in place, as `changed_by` finds them.
    """
    tensors, modules = [*model.parameters(), *model.buffers()], list(model.modules())
    clones: dict[int, Tensor] = {id(x): nn.Parameter(x.detach().clone(), x.requires_grad) for x in cloned}
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(torch.random.fork_rng(sorted({x.device.index for x in tensors if x.is_cuda})))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.autocast(tensors[0].device.type, enabled=False))
        stack.enter_context(as_python())
        attributes = [vars(module) for module in modules]
        held = [*attributes, *(value for values in attributes for value in values.values())]
        for value in [*held, *_forward_hooks(None)]:
            if (restore := _restoring(value)) is not None:
                stack.callback(restore)
        for value in held:
            _put_clones(value, clones)
        for module in modules:
            # set one by one, because train() and eval() may be overridden to do more than that
            module.training = False
        for registered in [] if hooks else [hooks for module in (None, *modules) for hooks in _forward_hooks(module)]:
            for number in [number for number, hook in registered.items() if _is_users(hook)]:
                del registered[number]
        cloning = model.register_forward_pre_hook(_with_clones, prepend=True, with_kwargs=True)
        stack.callback(cloning.remove)
        yield


@contextmanager
def changed_by(model: nn.Module) -> Iterator[list[nn.Parameter]]:
    """Find the parameters that passes inside change in place, as nn.Embedding(max_norm=1) does, and put them back.

    The list is complete at the end. Meanwhile copies of all parameters are on the CPU.
    """
    parameters = [weight for weight in model.parameters() if type(weight) is nn.Parameter and not weight.is_meta]
    before = [(weight.data, weight._version, weight.detach().to("cpu", copy=True)) for weight in parameters]
    changed: list[nn.Parameter] = []
    try:
        yield changed
    finally:
        for weight, (data, version, values) in zip(parameters, before, strict=True):
            is_same = weight._version == version and weight.data_ptr() == data.data_ptr()
            if not is_same or not torch.equal(weight.detach().cpu(), values):
                weight.data = data.copy_(values)
                changed.append(weight)


def hooked(model: nn.Module) -> list[str]:
    """Names of the submodules with forward hooks of the user; `every module` for hooks on all."""
    modules = {"every module": None} | {name or type(model).__name__: module for name, module in model.named_modules()}
    return [
        name
        for name, module in modules.items()
        if any(_is_users(hook) for registered in _forward_hooks(module) for hook in registered.values())
    ]


def _forward_hooks(module: nn.Module | None) -> list[dict[int, Callable]]:
    """The hooks on a module's calls by number, before and after; None: those on every module's."""
    if module is None:
        return [torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks]
    return [module._forward_pre_hooks, module._forward_hooks]


def _is_users(hook: Callable) -> bool:
    """Whether neither a hook nor a class that it comes from is torch's own."""
    while isinstance(hook, partial):
        hook = hook.func
    makers = [getattr(hook, "__module__", None), *(origin.__module__ for origin in type(hook).__mro__)]
    return not any(str(name).partition(".")[0] == "torch" for name in makers)


def _restoring(value: Any) -> Callable[[], object] | None:
    """A function that puts back the entries of a container, or the state of a generator; None for anything else."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if type(value) not in (*DICTS, *SEQUENCES, set):
        return None
    entries = value.copy()

    def restore() -> None:
        value.clear()
        (value.extend if type(value) in SEQUENCES else value.update)(entries)

    return restore


def _put_clones(container: Any, clones: dict[int, Tensor]) -> None:
    """Put clones in place of the tensors in a container, other than parameters. clones: by the tensor's identity."""
    if type(container) not in (*DICTS, *SEQUENCES):
        return
    for place, x in list(container.items() if type(container) in DICTS else enumerate(container)):
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and id(x) not in clones:
            clone = x.detach().clone()
            clones |= {id(x): clone, id(clone): clone}
        if id(x) in clones:
            container[place] = clones[id(x)]


def _with_clones(_: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    return tree_map_only(Tensor, Tensor.clone, (args, kwargs))
