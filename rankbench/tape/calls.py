"""torch's functions: their names, what kind of call each is, and the tensors in their arguments."""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import resolve_name

from rankbench.config.keys import ConfigError

# Calls that take numbers out of torch, or put them where the tape cannot follow them.
EXITS = {"numpy", "tolist", "item", "__float__", "__int__", "__array__", "__set__"}
# Calls that copy whole numbers, or some of them, or put them into others.
COPIES = {"contiguous", "clone", "to", "long", "int", "reshape", "flatten", "index_select", "getitem", "type", "detach"}
COPIES |= {"setitem"}
# Calls that describe a tensor, without reading or making numbers.
DESCRIBES = {"shape", "dtype", "device", "ndim", "size", "dim", "stride", "numel", "is_contiguous", "is_nested"}
DESCRIBES |= {"is_floating_point", "is_complex"}
# Elementwise functions: of one tensor; of several, but for sums; all.
ACTIVATIONS = """
    relu relu6 leaky_relu elu selu celu gelu silu mish softplus hardswish erf hardtanh hardsigmoid tanh sigmoid
    softsign tanhshrink clamp clamp_min clamp_max abs pow square prelu logsigmoid log_sigmoid hardshrink softshrink
    threshold sin cos _threshold rrelu tan atan arctan sinh cosh asinh arcsinh sinc erfc expm1 log1p sign round
    floor ceil trunc frac nan_to_num special_erf
"""
JOINS = {"mul", "div", "where", "masked_fill", "maximum", "minimum", "fmax", "fmin"}
ELEMENTWISE = {*ACTIVATIONS.split(), *JOINS, "add", "sub", "rsub", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal"}
ELEMENTWISE |= {"gt", "ge", "lt", "le", "eq", "ne", "contiguous", "clone", "to", "type", "type_as"}
ELEMENTWISE |= {"float", "double", "half", "bfloat16"}
# Modules without which nothing is compiled.
COMPILES = {"torch._dynamo", "torch.nn.attention.flex_attention"}
ALIASES = {
    **dict.fromkeys(("__add__", "__radd__", "__iadd__"), "add"),
    **dict.fromkeys(("__sub__", "__isub__", "subtract"), "sub"),
    **dict.fromkeys(("__mul__", "__rmul__", "__imul__", "multiply"), "mul"),
    **dict.fromkeys(("__truediv__", "__itruediv__", "divide", "true_divide"), "div"),
    **dict.fromkeys(("__matmul__", "bmm", "mm", "mv", "linalg_matmul"), "matmul"),
    **dict.fromkeys(("concat", "concatenate"), "cat"),
    **{"__rsub__": "rsub", "__rmatmul__": "rmatmul", "__neg__": "neg", "negative": "neg", "__pow__": "pow"},
    **{"__getitem__": "getitem", "__setitem__": "setitem", "clip": "clamp"},
    **{"special_softmax": "softmax", "special_expit": "sigmoid"},
}
CHANGES_IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"}


def tensors_in(x: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists, dicts and slices."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        x = x.values()
    elif isinstance(x, slice):
        x = (x.start, x.stop, x.step)
    elif not isinstance(x, (tuple, list)):
        return []
    found: list[Tensor] = []
    for part in x:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list, dict, slice)):
            found += tensors_in(part)
    return found


def named_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of floats in what a module returns, each with the name that `output=` gives it."""
    if isinstance(output, Tensor):
        named = [("output", output)]
    elif isinstance(output, Mapping):
        named = [
            (key if number == 0 else f"{key}.{number}", x)
            for key, value in output.items()
            for number, x in enumerate(tensors_in(value))
        ]
    elif isinstance(output, (tuple, list)):
        named = [(str(number), x) for number, x in enumerate(tensors_in(output))]
    else:
        named = [(name, x) for name, value in getattr(output, "__dict__", {}).items() for x in tensors_in(value)]
    return [(name, x) for name, x in named if x.is_floating_point() and x.numel()]


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether one tensor is a view of the other, or both of a third one."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@cache
def name_of(func: Any) -> tuple[str, bool, str]:
    """The function's name shared by all its forms, whether it changes its first argument, and its full name."""
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # a property, as x.T
        name = getattr(func.__self__, "__name__", name)
    in_place, full_name = name in CHANGES_IN_PLACE, resolve_name(func) or name
    if isinstance(func, torch._ops.OpOverload):  # of torch.ops, as torch.library.custom_op makes them
        return "operator", in_place, full_name
    if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
        name, in_place = name.removesuffix("_"), True
    return ALIASES.get(name, name), in_place, full_name


def in_order(args: tuple, kwargs: dict | None) -> tuple[tuple, dict]:
    """The arguments of a call with its tensors first, also if they were given by name."""
    kwargs = dict(kwargs or {})
    if not args and "condition" not in kwargs:
        args = tuple(kwargs.pop(key) for key in ("input", "tensor", "tensors") if key in kwargs)
    if len(args) == 1 and "other" in kwargs:
        args = (*args, kwargs.pop("other"))
    return args, kwargs


def einsum_in_pairs(args: tuple, is_made: Callable[[Tensor], bool]) -> Callable[[], Tensor] | None:
    """An einsum of two activations and others as products of two, which differs by rounding. None for other einsums,
    where "..." stands for axes, and of three activations, whose order would decide what is attention. is_made: whether
    a tensor is an activation."""
    equation, operands = args[0], tensors_in(args[1:])
    if len(operands) < 3 or sum(map(is_made, operands)) != 2 or "->" not in equation or "." in equation:
        return None
    return partial(_in_pairs, equation.replace(" ", ""), operands)


def _in_pairs(equation: str, operands: list[Tensor]) -> Tensor:
    """Each time the product of those two that has the fewest numbers."""
    given, _, out = equation.partition("->")
    terms = list(zip(given.split(","), operands, strict=True))
    sizes = {letter: size for term, x in terms for letter, size in zip(term, x.shape, strict=True)}
    while len(terms) > 2:

        def product_of(pair: tuple[int, int]) -> str:
            others = "".join(term for number, (term, _) in enumerate(terms) if number not in pair)
            letters = dict.fromkeys(terms[pair[0]][0] + terms[pair[1]][0])
            return "".join(letter for letter in letters if letter in others + out)

        pair = min(combinations(range(len(terms)), 2), key=lambda pair: prod(map(sizes.__getitem__, product_of(pair))))
        made, (first, x), (second, y) = product_of(pair), terms[pair[0]], terms[pair[1]]
        terms[pair[0]] = made, torch.einsum(f"{first},{second}->{made}", x, y)
        del terms[pair[1]]
    (first, x), (second, y) = terms
    return torch.einsum(f"{first},{second}->{out}", x, y)


def set_item(x: Tensor, index: Any, value: Tensor | float) -> Tensor:
    """A copy of x in which x[index] is value."""
    changed = x.clone()
    changed[index] = value
    return changed


def out_of_place(func: Callable, name: str, in_place: bool) -> Any:
    """The function, or its twin that makes a new tensor."""
    if not in_place or not func.__name__.endswith("_"):
        return func
    if name == "setitem":
        return set_item
    if name == "copy":
        return lambda x, source, *_: source.expand_as(x).to(x.dtype)
    return getattr(torch.Tensor, name, None) or getattr(torch, name, None) or getattr(nn.functional, name, func)


def name_of_module(module: Callable) -> str:
    """The name of its class, or of a function."""
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", str(module))


def refuse_unreadable(module: Callable, given: Sequence[Tensor] = ()) -> None:
    """ConfigError if a module or one of its submodules is TorchScript, or has no weights yet; or for sparse inputs."""
    if any(x.layout != torch.strided and not x.is_nested for x in given):
        raise ConfigError("inputs: a sparse tensor, whose numbers the tape does not see; give it dense")
    for name, submodule in module.named_modules() if isinstance(module, nn.Module) else ():
        if isinstance(submodule, torch.jit.ScriptModule):
            name = name or type(submodule).__name__
            raise ConfigError(f"{name}: TorchScript runs unseen by the tape; give the module as Python code")
        if any(nn.parameter.is_lazy(x) for x in submodule.parameters(recurse=False)):
            raise ConfigError(f"{name}: a lazy module has no weights before its first run; run it once")


def is_over_indices(call: object, given: list[Tensor], is_of_activations: Callable[[Tensor], bool]) -> bool:
    """Whether a call runs within torch.vmap over whole numbers and truth values that no activation made, as where
    flex_attention makes a mask of indices; ConfigError if it runs within torch.func on other numbers."""
    if not any(map(torch._C._functorch.is_functorch_wrapped_tensor, given)):
        return False
    if any(x.is_floating_point() or is_of_activations(_unwrapped(x)) for x in given):
        raise ConfigError(
            f"{call}: runs within torch.func (vmap, grad), unseen by the tape; write it without, for all sequences at "
            "once"
        )
    return True


def _unwrapped(x: Tensor) -> Tensor:
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x


def refuse_unseen(call: object, given: list[Tensor]) -> None:
    """ConfigError for a call that runs within torch.autocast or torch.inference_mode, or on nested tensors."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(f"{call}: runs within torch.autocast, whose casts the tape does not see; run it without")
    if any(x.is_nested for x in given):
        raise ConfigError(
            f"{call}: a nested tensor, whose numbers the tape does not see; give padded tensors and a mask"
        )
    if torch.is_inference_mode_enabled():
        raise ConfigError(
            f"{call}: runs within torch.inference_mode, which does not tell what is changed in place; use torch.no_grad"
        )


@contextmanager
def as_python() -> Iterator[None]:
    """Python code runs inside in place of what would hide it: a kernel for torch's encoder layers, which skips hooks
    and packs padded sequences, and what torch.compile compiles."""
    with ExitStack() as stack:
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if COMPILES & sys.modules.keys():  # importing the compiler takes a second
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield
