"""The first pass that reads a network: it keeps what a touched one is compared with."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.tape.calls import refuse_unreadable, tensors_in
from rankbench.tape.following import first_state, following
from rankbench.tape.recording import Product, Recorder, Seen
from rankbench.tape.replay import Call
from rankbench.tape.rules import RULES
from rankbench.tape.tags import Level, Role, Site, Tag, Verdict, Visit


class Kept(NamedTuple):
    """The factors of a product, and its result; of factors that a softmax made, its input."""

    tensors: tuple[Tensor, ...]
    result: Tensor
    logits: tuple[Tensor | None, ...]


class Size(NamedTuple):
    """Of a call's result."""

    call: Call
    sum: Tensor
    sum_of_magnitudes: Tensor
    eps: float  # of its dtype


class Changed(Exception):
    """The products depend on the touched number."""


def first_of(result: Any) -> Tensor:
    """The tensor that a call returned, or the first of several."""
    return result if isinstance(result, Tensor) else result[0]


class Passage(NamedTuple):
    """What a submodule that may be a layer reads (states, and inputs of tokens), and its result."""

    entered: tuple[Tensor, ...]
    left: Tensor
    passed: int


class Plain(Recorder):
    """The first pass, which keeps what the touched one is compared with; or another one."""

    has_sizes = True  # of calls, to name the first that differs between two passes

    def __init__(self, module: Callable, submodule: str | None = None) -> None:
        super().__init__(module, RULES, wanted={0})  # no node has the number 0: nothing is kept
        self.kept: dict[Site, Kept] = {}
        self.compared: dict[int, list[Tensor]] = {}  # by call: activations of which whole numbers were made
        self.weighed: dict[Call, tuple[Tensor, Tensor]] = {}
        self.sizes: list[Size] = []
        self.entered: dict[Visit, tuple[Tensor, ...]] = {}
        self.passages: dict[Visit, Passage] = {}
        self.leaves: dict[Visit, Passage] = {}  # submodules that hold no others: those of `_is_leaf`
        self.is_listed = _listed(module) if isinstance(module, nn.Module) else set()
        self.stack: list[Visit] = []
        self.submodule = submodule
        self.arguments: tuple[tuple, dict] = (), {}
        self.output: Any = None
        self.wanted_result: Tensor | None = None  # of the submodule
        self.outside: list[tuple[Call, Tensor]] = []  # tensors that no recorded call made, and what reads them

    def tag(self, x: Any) -> Tag:
        is_new = isinstance(x, Tensor) and self.tags.get(x) is None and not isinstance(x, nn.Parameter)
        if is_new and x.is_floating_point() and not x.is_nested:
            with torch._C.DisableTorchFunction():
                self.outside.append((self.call, x.detach().clone()))
        return super().tag(x)

    def passed(self, args: tuple, kwargs: dict) -> None:
        """Run the module, and keep all its states and its result."""
        self.arguments = args, kwargs
        if not isinstance(self.module, nn.Module):
            self.output = self.run(args, kwargs)
            return
        refuse_unreadable(self.module)  # they take no hooks
        entered: dict[Visit, Tensor] = {}

        def begun(run: Visit, _: nn.Module, given: Any) -> None:
            if run.name not in self.is_listed:
                if self._is_leaf(run, floats := [x for x in tensors_in(given) if x.is_floating_point()]):
                    entered[run] = floats[0].clone()
                return
            if (x := first_state(given)) is not None and x.dim() > 2:
                self.enter(run, x)
            read = [x for x in tensors_in(given) if (x.is_floating_point() and x.dim() > 2) or self.tokens.hold(x)]
            self.entered[run] = tuple(x.clone() for x in read)  # the submodule may change them

        def ended(run: Visit, _: nn.Module, result: Any) -> None:
            y = first_state(result)
            if run.name == self.submodule:
                self.wanted_result = y
            if self.entered.get(run) and y is not None:
                self.passages[run] = Passage(self.entered[run], y.clone(), self.tag(y).passed)
            if (x := entered.pop(run, None)) is None or y is None or (tag := self.tags.get(y)) is None:
                return
            are_weights = tag.compares or tag.level == Level.SOFTMAX
            if not are_weights and x.dim() == y.dim() and y.numel() <= 4 * x.numel():  # logits are many more
                self.leaves[run] = Passage((x,), y.clone(), tag.passed)

        with following(self.module, begun, ended) as self.stack:
            self.output = self.run(args, kwargs)

    def _is_leaf(self, run: Visit, read: list[Tensor]) -> bool:
        """Whether a submodule that holds no others reads one state, in front of all attention, as in a stem, or
        anywhere if the module itself holds it."""
        if len(read) != 1 or read[0].dim() < 3 or (tag := self.tags.get(read[0])) is None:
            return False
        return not tag.compares and (not tag.passed or "." not in run.name)

    @property
    def states(self) -> dict[Visit, Passage]:
        """The passages that keep the shape of a state."""
        return {run: each for run, each in self.passages.items() if each.entered[0].shape == each.left.shape}

    def enter(self, run: Visit, x: Tensor) -> None:
        """Called with what a submodule that may be a layer reads, before it runs."""

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.num_calls
        result = super().__torch_function__(func, types, args, kwargs)
        made = tensors_in(result) if self.num_calls > before else []
        if any((tag := self.tags.get(y)) and tag.counted for y in made):
            self.compares([x for x in tensors_in([args, kwargs]) if x.is_floating_point()], made)
        has_size = self.has_sizes and made and "empty" not in self.call.function  # else whatever was in memory
        if has_size and (x := made[0]).is_floating_point() and x.layout == torch.strided and not x.is_nested:
            numbers = x.detach().nan_to_num()
            size = torch.linalg.vector_norm(numbers, 1, dtype=torch.float64)
            self.sizes.append(Size(self.call, numbers.sum(dtype=torch.float64), size, torch.finfo(x.dtype).eps))
        return result

    def compares(self, given: list[Tensor], made: list[Tensor]) -> None:
        """Called with what a call read and made, if it made whole numbers or truth values of activations."""
        self.compared[self.call.index] = [x.clone() for x in given]

    def takes(self, seen: Seen, x: Tensor, function: Callable[[Tensor], Tensor]) -> bool:
        self.compared[seen.call.index] = [x.clone()]
        return False

    def verdict(self, product: Product) -> Verdict:
        if product.by_tags.role == Role.ATTENTION and not all(x.numel() for x in product.tensors):
            shapes = " and ".join(str(tuple(x.shape)) for x in product.tensors)
            raise ConfigError(f"{product.seen.call}: attention without numbers, of {shapes}; give tokens")
        factors = () if product.is_kernel else product.tensors
        logits = tuple(None if (x := self.tag(factor).logits) is None else x.clone() for factor in factors)
        result = first_of(product.seen.result).clone()
        self.kept[self.key_of(product.seen)] = Kept(tuple(x.clone() for x in product.tensors), result, logits)
        return product.by_tags

    def weighs(self, seen: Seen, p: Tensor, v: Tensor) -> None:
        self.weighed[seen.call] = p.clone(), v.clone()


def _listed(module: nn.Module) -> set[str]:
    """Names of the submodules that may be layers: those in lists, and those that hold others."""
    names = {name for name, submodule in module.named_modules() if name and any(True for _ in submodule.children())}
    for name, submodule in module.named_modules():
        if isinstance(submodule, (nn.ModuleList, nn.Sequential)):
            names |= {f"{name}.{child}".lstrip(".") for child, _ in submodule.named_children()}
    return names
