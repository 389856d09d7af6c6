"""A network as the graph of torch's smallest operators into which torch.export turns it, without submodules.

Each operator is called as the torch function of its name, because only functions can be followed.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter

OperatorOfATen = torch._ops.OpOverload

# Operators without a function of their own, or with other arguments than it.
FUNCTIONS: dict[str, Callable] = {
    "_softmax": lambda x, axis, _: x.softmax(axis),
    "_safe_softmax": lambda x, axis: x.softmax(axis).nan_to_num(0.0),
    "native_layer_norm": lambda *args: (F.layer_norm(*args),),
    "view": lambda x, shape: x.reshape(shape),
    "expand": lambda x, shape: x.expand(shape),
    "permute": lambda x, axes: x.permute(axes),
    "repeat": lambda x, sizes: x.repeat(sizes),
    "_to_copy": lambda x, dtype=None, **_: x.to(dtype) if dtype else x.clone(),
    "convolution": lambda x, weight, bias, stride, padding, *_: F.conv2d(x, weight, bias, stride, padding),
    "index": lambda x, indices: x[tuple(slice(None) if index is None else index for index in indices)],
    "slice": lambda x, axis=0, *bounds: x[(*[slice(None)] * axis, slice(*bounds))],
}


def function_of(operator: OperatorOfATen) -> Callable:
    """The torch function that an operator's name means."""
    name = operator._schema.name.removeprefix("aten::")
    named = (FUNCTIONS.get(name), *(getattr(place, name, None) for place in (torch, F, Tensor)))
    return next((function for function in named if callable(function)), operator)


class _InFunctions(Interpreter):
    def call_function(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        of_torch = isinstance(target, OperatorOfATen)
        given = {name: x for name, x in kwargs.items() if name not in ("layout", "pin_memory")} if of_torch else kwargs
        return super().call_function(function_of(target) if of_torch else target, args, given)


class _ByPosition(nn.Module):
    """A module whose arguments are given by their order, because torch.export reads their names from its signature."""

    def __init__(self, module: nn.Module, names: Iterable[str]):
        super().__init__()
        self.module, self.names = module, tuple(names)

    def forward(self, *given: Tensor) -> Any:
        return self.module(**dict(zip(self.names, given, strict=True)))


class Exported(nn.Module):
    """The exported graph of a module, called with its arguments by name. It returns the module's first result."""

    def __init__(self, module: nn.Module, inputs: dict[str, Any], batch: int):
        """batch: how many sequences the inputs hold. The graph takes any number, if the module's code does not count
        them in Python."""
        super().__init__()
        shapes = torch.export.ShapesCollection()
        for x in inputs.values():
            shapes[x] = {x.shape.index(batch): torch.export.Dim.AUTO}
        by_position, given = _ByPosition(module, inputs), tuple(inputs.values())
        program = torch.export.export(by_position, given, dynamic_shapes=shapes, strict=False)
        self.graph = program.run_decompositions().module(check_guards=False)

    def forward(self, **inputs: Tensor) -> Tensor:
        return _InFunctions(self.graph).run(*inputs.values(), enable_io_processing=False)[0]
