"""The steps of the tape's linear program: what each kind of call does to the slots of its parents.

Shapes: T slots held (rows), B batch, H head, N query token, M key token, D and F widths, K head width.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rankbench.tape.replay import Replay, Slots, Step


@dataclass(eq=False)
class Source(Step):
    """The tensor where paths begin: slot 0 is its value."""

    value: Tensor
    new: ClassVar[bool] = False

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        return Slots(0, self.value[None] if sweep.source else torch.zeros_like(self.value[None]))


@dataclass(eq=False)
class Affine(Step):
    """x W^T + b over the last axis. columns: those of the result that are needed; the others are left undefined."""

    weight_FD: Tensor
    bias: Tensor | None = None
    columns: slice | None = None

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
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
    fills: ClassVar[bool] = False

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
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
    """(act(z) - act(0)) / z elementwise, act'(0) where z = 0: with it frozen, act(z) = act(0) + gate * z is affine.
    is_same: whether it is one function for all numbers of z."""

    def __init__(self, function: Callable[[Tensor], Tensor], z: Tensor, is_same: bool = True) -> None:
        self.function, self.is_same = function, is_same
        self.z: Any = z  # until the gate is made of it
        self.gate: Any = None

    def __call__(self) -> Tensor:
        """The gate, computed when it is first needed."""
        if self.gate is None:
            with torch.inference_mode(False), torch.enable_grad():
                made = self.function(self.z)
                zero = made.new_zeros(() if self.is_same else made.shape, requires_grad=True)
                at_zero = self.function(zero)
                (slope,) = torch.autograd.grad(at_zero.sum(), zero)
            ratio = made.sub_(at_zero.detach()).div_(self.z)
            self.gate, self.z = torch.where(self.z == 0, slope, ratio), None
        return self.gate


@dataclass(eq=False)
class Scaled(Step):
    """factor x + constant, elementwise with broadcasting; x / factor where `divides`."""

    factor: Tensor | float | Callable[[], Tensor]
    constant: Tensor | None = None
    divides: bool = False

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
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

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
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
    """Any function that is linear in all of its tensors jointly, or affine: constant + linear. one_by_one: torch can
    run it on several rows at the same time only with a warning of its slowness."""

    function: Callable[..., Tensor]
    affine: bool = False
    one_by_one: bool = False
    new: ClassVar[bool] = False

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        low, high = min(x.low for x in inputs), max(x.high for x in inputs)
        rows = [x.dense(low, high) for x in inputs]
        result = self._of_rows(rows)
        if not self.affine:
            return Slots(low, result)
        constant = self.function(*(torch.zeros_like(x[0]) for x in rows))
        return _with_constant(sweep, Slots(low, result - constant), constant)

    def _of_rows(self, rows: Sequence[Tensor]) -> Tensor:
        if not self.one_by_one:
            with contextlib.suppress(RuntimeError):  # of a call that torch cannot run on several rows at all
                return torch.func.vmap(self.function)(*rows)
        return torch.stack([self.function(*values) for values in zip(*rows, strict=True)])


@dataclass(eq=False)
class Mixed(Step):
    """Attention P v for every head, (*batch, M, K) to (*batch, N, K), one slot further: each path gains a head.

    weights: returns P, (*batch, N, M). bias: returns the part of v that comes from the values' bias. grouped: whether
    groups of query heads share the heads of v.
    """

    weights: Callable[[], Tensor]
    bias: Callable[[], Tensor] | None = None
    grouped: bool = False

    def __call__(self, sweep: Replay, inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
        values, bias = self.values(sweep, inputs[0])
        p = self.weights()
        mixed = Slots(values.low + sweep.shift, self.mix(p, values.rows))
        if bias is None:
            return mixed
        return Sum(mixed.rows.dtype)(sweep, [mixed, Slots(0, self.mix(p, bias[None]))], [True, True])

    def values(self, sweep: Replay, v: Slots) -> tuple[Slots, Tensor | None]:
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


def _with_constant(sweep: Replay, x: Slots, constant: Tensor | None) -> Slots:
    if constant is None or not sweep.constants:
        return x
    rows = x.dense(0, x.high)
    rows[0] += constant
    return Slots(0, rows)


def _aligned(rows: Tensor, ndim: int) -> Tensor:
    """Rows whose values have `ndim` axes: axes of size 1 are added in front, as in broadcasting."""
    return rows.reshape(len(rows), *[1] * (ndim + 1 - rows.ndim), *rows.shape[1:])
