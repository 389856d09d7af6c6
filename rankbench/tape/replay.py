"""The tape's linear program, and its replay on sums of paths.

A recorded pass leaves nodes behind. Each node is linear in its parents, because a product of two activations is frozen
on one side. A replay gives every node its slots, S_0, S_1, ...: slot k is the sum of all paths with k heads.
An attention call moves each slot by one; constants enter slot 0.

Shapes: T slots held (rows), B batch, H head, N query token, M key token, D and F widths, K head width.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankbench.config.keys import ConfigError


class Call(NamedTuple):
    """A call of a torch function during the recorded pass."""

    index: int  # type: ignore[assignment]  # hides the method of tuples
    function: str
    module: str  # dotted name of the submodule that called it; empty for the recorded module itself

    def __str__(self) -> str:
        return f"call {self.index}, {self.function} in {self.module or 'the module itself'}"


class Frozen(NamedTuple):
    """A factor of a call's paths, frozen at its value in the recorded pass."""

    call: Call
    part: str

    @property
    def kind(self) -> str:
        """The part without the number and the place of the call that made it, hence the same in every layer."""
        return re.sub(r"of call \d+, (\S+) in .*", r"of \1", self.part)


class Slots(NamedTuple):
    """Slots `low`, `low` + 1, ... of a node; all others are empty. rows: (T, *shape of the node's value)."""

    low: int
    rows: Tensor

    @property
    def high(self) -> int:
        """The first slot after the rows."""
        return self.low + len(self.rows)

    def dense(self, low: int, high: int) -> Tensor:
        """Rows of the slots low .. high - 1, zeros where they are empty."""
        if (low, high) == (self.low, self.high):
            return self.rows
        rows = self.rows.new_zeros(high - low, *self.rows.shape[1:])
        rows[self.low - low : self.high - low] = self.rows
        return rows


class Step:
    """A linear map from the parents' slots to a node's. `new`: whether the node's rows share no memory with theirs."""

    new: ClassVar[bool] = True

    def __call__(self, sweep: "Sweep", inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        """inputs: Slots; None for a parent without (only of a Sum). own: whether an input's rows may be overwritten."""
        raise NotImplementedError


@dataclass(eq=False)
class Node:
    """A value of the recorded pass that is linear in its parents.

    parents: nodes, or constant tensors, which enter slot 0. held: tensors of the recorded pass that the step reads,
    each with the version that it had then. shape: of the call's result; of the node's value if a step of several
    parents reads it.
    """

    index: int
    call: Call
    parents: tuple["Node | Tensor", ...]
    step: Step
    shape: torch.Size
    frozen: str | None = None
    held: list[tuple[Tensor, int]] = field(default_factory=list)


def version(x: Tensor) -> int:
    """How often the tensor was changed in place; 0 for inference tensors, which do not count it."""
    return 0 if x.is_inference() else x._version


def nodes_of(target: Node) -> list[Node]:
    """The nodes that the target depends on, itself included, in the order of their calls.

    ConfigError if a tensor that one of them froze was changed in place afterwards.
    """
    nodes, waiting = {target}, [target]
    while waiting:
        for parent in waiting.pop().parents:
            if isinstance(parent, Node) and parent not in nodes:
                nodes.add(parent)
                waiting.append(parent)
    for node in nodes:
        if any(version(tensor) != then for tensor, then in node.held):
            raise ConfigError(
                f"{node.call}: a tensor that this call reads was later changed in place, so its value is lost; "
                "change the module to write to a new tensor there"
            )
    return sorted(nodes, key=lambda node: node.index)


@dataclass
class Sweep:
    """One replay of the tape.

    shift: number of rows by which an attention call moves its paths; 0 keeps all lengths in one row. constants: whether
    biases and other constants enter. source: whether the tensor where paths begin has its value, or zeros.
    value_biases: "head" counts a value bias as passing the head, like all that it is added to; "source" adds it to slot
    0 after the head.
    """

    shift: int = 1
    constants: bool = True
    source: bool = True
    value_biases: str = "head"

    def run(self, nodes: list[Node], begin: tuple[Node, Slots] | None = None) -> Slots | None:
        """The slots of the last node; None if it has none."""
        slots = None if begin is None else begin[1]
        for _, _, slots in self.steps(nodes, begin):  # noqa: B007
            pass
        return slots

    @torch.no_grad()
    def steps(
        self, nodes: list[Node], begin: tuple[Node, Slots] | None = None
    ) -> Iterator[tuple[Node, list[Slots | None], Slots | None]]:
        """Each node with its parents' slots and its own, in the order of the calls; None where there are none.

        begin: a node with its slots, from which to continue; paths that do not pass it do not count.
        """
        uses: Counter[Any] = Counter(parent for node in nodes for parent in node.parents if isinstance(parent, Node))
        viewed = {parent for node in nodes if not node.step.new for parent in node.parents if uses.get(parent, 0) > 1}
        slots: dict[Node, Slots | None] = {}
        fresh: set[Node] = set()  # nodes whose rows share memory with nothing else that is alive
        first = -1
        if begin is not None:
            slots[begin[0]], first = begin[1], begin[0].index
        for node in nodes:
            if node.index <= first:
                continue
            parents = [parent for parent in node.parents if isinstance(parent, Node)]
            inputs = [self._slots(parent, slots) for parent in node.parents]
            uses.subtract(parents)
            are_distinct = len(set(parents)) == len(parents)
            own = [
                isinstance(x, Node) and are_distinct and uses[x] == 0 and x in fresh and x not in viewed
                for x in node.parents
            ]
            result = None
            if not node.parents or any(x is not None for x in inputs):
                result = node.step(self, self._filled(node, inputs), own)
                if node.step.new or (own and all(own)):
                    fresh.add(node)
            slots[node] = result
            yield node, inputs, result
            for parent in parents:
                if uses[parent] == 0:
                    slots.pop(parent, None)

    def _slots(self, parent: Node | Tensor, slots: dict[Node, Slots | None]) -> Slots | None:
        if isinstance(parent, Node):
            return slots.get(parent)
        return Slots(0, parent[None]) if self.constants else None

    @staticmethod
    def _filled(node: Node, inputs: list[Slots | None]) -> list[Slots | None]:
        """The inputs, with zeros for absent ones if the step needs all of them."""
        if isinstance(node.step, Sum) or None not in inputs:
            return inputs
        present = next(x for x in inputs if x is not None)
        return [
            Slots(present.low, present.rows.new_zeros(1, *parent.shape)) if x is None else x
            for x, parent in zip(inputs, node.parents, strict=True)
        ]

    def low(self, x: Slots, constant: Tensor | None) -> int:
        """The first slot of the sum of x and this constant."""
        return 0 if constant is not None and self.constants else x.low


def _aligned(rows: Tensor, ndim: int) -> Tensor:
    """Rows whose values have `ndim` axes: axes of size 1 are added in front, as in broadcasting."""
    return rows.reshape(len(rows), *[1] * (ndim + 1 - rows.ndim), *rows.shape[1:])


@dataclass(eq=False)
class Source(Step):
    """The tensor where paths begin: slot 0 is its value."""

    value: Tensor
    new: ClassVar[bool] = False

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        return Slots(0, self.value[None] if sweep.source else torch.zeros_like(self.value[None]))


@dataclass(eq=False)
class Affine(Step):
    """x W^T + b over the last axis. columns: those of the result that are needed; the others are left undefined."""

    weight_FD: Tensor
    bias: Tensor | None = None
    columns: slice | None = None

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        (x,) = inputs
        low, columns = sweep.low(x, self.bias), self.columns or slice(None)
        rows = x.rows.new_empty(x.high - low, *x.rows.shape[1:-1], len(self.weight_FD))
        weight_DF, below = self.weight_FD[columns].T, x.low - low
        if rows.numel():
            torch.mm(x.rows.flatten(0, -2), weight_DF, out=rows[below:].flatten(0, -2)[:, columns])
        if below:
            rows[:below, ..., columns] = 0
        if self.bias is not None and sweep.constants:
            rows[0, ..., columns] += self.bias[columns] if self.bias.ndim == 1 else self.bias[..., columns]
        return Slots(low, rows)


@dataclass(eq=False)
class Sum(Step):
    """a x + b y in this dtype, with broadcasting."""

    dtype: torch.dtype
    factors: tuple[float, float] = (1, 1)

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        terms = [term for term in zip(inputs, self.factors, own, strict=True) if term[0] is not None]
        low, high = min(x.low for x, *_ in terms), max(x.high for x, *_ in terms)
        shape = np.broadcast_shapes(*(x.rows.shape[1:] for x, *_ in terms))

        def takes_all(x: Slots, is_own: bool) -> bool:
            fits = (x.low, x.high, x.rows.dtype) == (low, high, self.dtype) and x.rows.shape[1:] == shape
            return is_own and fits and 0 not in x.rows.stride()

        # the rows to add to: those of a term that has all slots and is not needed any more, else new ones
        terms.sort(key=lambda term: not takes_all(term[0], term[2]))
        (x, factor, is_own), *others = terms
        if takes_all(x, is_own):
            rows = x.rows if factor == 1 else x.rows.mul_(factor)
        else:
            rows, others = x.rows.new_zeros(high - low, *shape, dtype=self.dtype), terms
        for y, weight, _ in others:
            rows[y.low - low : y.high - low].add_(_aligned(y.rows, len(shape)), alpha=weight)
        return Slots(low, rows)


class Gate:
    """(act(z) - act(0)) / z elementwise, act'(0) where z = 0: with it frozen, act(z) = act(0) + gate * z is affine."""

    def __init__(self, function: Callable[[Tensor], Tensor], z: Tensor) -> None:
        self.function = function
        self.z: Any = z  # until the gate is made of it
        self.gate: Any = None

    def __call__(self) -> Tensor:
        """The gate, computed when it is first needed."""
        if self.gate is None:
            with torch.inference_mode(False), torch.enable_grad():
                zero = self.z.new_zeros(1, requires_grad=True)
                at_zero = self.function(zero)
                (slope,) = torch.autograd.grad(at_zero.sum(), zero)
            ratio = self.function(self.z).sub_(at_zero.detach()).div_(self.z)
            self.gate, self.z = torch.where(self.z == 0, slope, ratio), None
        return self.gate


@dataclass(eq=False)
class Scaled(Step):
    """factor x + constant, elementwise with broadcasting; x / factor where `divides`."""

    factor: Tensor | float | Callable[[], Tensor]
    constant: Tensor | None = None
    divides: bool = False

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        (x,) = inputs
        factor = self.factor() if callable(self.factor) else self.factor
        shape, rows = x.rows.shape[1:], x.rows
        if isinstance(factor, Tensor):
            shape = np.broadcast_shapes(shape, factor.shape)
            rows = _aligned(rows, len(shape))
        fits = rows.shape[1:] == shape and torch.result_type(rows, factor) == rows.dtype
        in_place = own[0] and fits and 0 not in rows.stride()
        out = rows if in_place else None
        scaled = Slots(x.low, torch.div(rows, factor, out=out) if self.divides else torch.mul(rows, factor, out=out))
        return _with_constant(sweep, scaled, self.constant)


@dataclass(eq=False)
class Normed(Step):
    """scale (x - mean) weight + shift with the scale of the recorded pass; the mean only if `centred`."""

    scale: Tensor
    axes: tuple[int, ...]
    centred: bool
    weight: Tensor | None
    shift: Tensor | None

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        (x,) = inputs
        low = sweep.low(x, self.shift)
        factor = self.scale if self.weight is None else self.scale * self.weight
        if low == x.low and own[0] and 0 not in x.rows.stride():
            rows = body = x.rows
        else:
            rows = x.rows.new_empty(x.high - low, *x.rows.shape[1:])
            body = rows[x.low - low :]
            rows[: x.low - low] = 0
        if self.centred:
            torch.sub(x.rows, x.rows.mean(self.axes, keepdim=True), out=body).mul_(factor)
        else:
            torch.mul(x.rows, factor, out=body)
        if self.shift is not None and sweep.constants:
            rows[0] += self.shift
        return Slots(low, rows)


@dataclass(eq=False)
class Through(Step):
    """Any function that is linear in all of its tensors jointly, or affine: constant + linear. one_by_one: torch cannot
    run it on several rows at the same time."""

    function: Callable[..., Tensor]
    affine: bool = False
    one_by_one: bool = False
    new: ClassVar[bool] = False

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        low, high = min(x.low for x in inputs), max(x.high for x in inputs)
        rows = [x.dense(low, high) for x in inputs]
        if self.one_by_one:
            result = torch.stack([self.function(*values) for values in zip(*rows, strict=True)])
        else:
            result = torch.func.vmap(self.function)(*rows)
        if not self.affine:
            return Slots(low, result)
        constant = self.function(*(torch.zeros_like(x[0]) for x in rows))
        return _with_constant(sweep, Slots(low, result - constant), constant)


@dataclass(eq=False)
class Mixed(Step):
    """Attention P v for every head, (*batch, M, K) to (*batch, N, K), one slot further: each path gains a head.

    weights: returns P, (*batch, N, M). bias: returns the part of v that comes from the values' bias. grouped: whether
    groups of query heads share the heads of v.
    """

    weights: Callable[[], Tensor]
    bias: Callable[[], Tensor] | None = None
    grouped: bool = False

    def __call__(self, sweep: Sweep, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        values, bias = self.values(sweep, inputs[0])
        p = self.weights()
        mixed = Slots(values.low + sweep.shift, self.mix(p, values.rows))
        if bias is None:
            return mixed
        return Sum(mixed.rows.dtype)(sweep, [mixed, Slots(0, self.mix(p, bias[None]))], [True, True])

    def values(self, sweep: Sweep, v: Slots) -> tuple[Slots, Tensor | None]:
        """The slots that pass the heads, and the values' bias if it does not pass them as a path."""
        if sweep.value_biases == "head" or self.bias is None or not sweep.constants:
            return v, None
        bias = self.bias()
        rows = v.dense(0, v.high).clone()
        rows[0] -= bias
        return Slots(0, rows), bias

    def mix(self, p: Tensor, rows: Tensor) -> Tensor:
        """P times every row, as one product: P (*batch, N, M) times (*batch, M, T K)."""
        folded = rows.movedim(0, -2).flatten(-2)
        if not self.grouped:
            mixed = p @ folded
        else:
            groups = rows.shape[-3]
            mixed = (p.unflatten(-3, (groups, -1)).flatten(-3, -2) @ folded).unflatten(-2, (-1, p.shape[-2]))
            mixed = mixed.flatten(-4, -3)
        return mixed.unflatten(-1, (len(rows), -1)).movedim(-2, 0)


def by_head(rows: Tensor, numbers: Tensor, heads: int) -> Tensor:
    """Outputs of attention, (T, *lead, N, K), with all heads but one set to zero: (T H, *lead, N, K). numbers: the head
    that each index of the leading axes belongs to."""
    every = torch.arange(heads).view(-1, *[1] * numbers.dim())
    only = (numbers == every).to(rows)[..., None, None]
    return (rows[:, None] * only).flatten(0, 1)


def _with_constant(sweep: Sweep, x: Slots, constant: Tensor | None) -> Slots:
    if constant is None or not sweep.constants:
        return x
    rows = x.dense(0, x.high)
    rows[0] += constant
    return Slots(0, rows)
