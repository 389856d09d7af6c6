"""What was read of a network: which of its products are attention, over which axes, and what else is told of them.

Shapes: B sequence, H head, N query token, M key token, R sequence or window, K head width.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.tape.replay import Call
from rankbench.tape.tags import Site, Verdict, Visit


class Lead(NamedTuple):
    """Roles of the axes of P in front of its queries and keys: those of the heads; the others are of sequences, or of
    the windows of a sequence.

    flattened: how the first axis holds both, with the heads inside (R H) or outside (H R); empty if heads have axes of
    their own.
    """

    heads: int
    axes: tuple[int, ...] = ()
    flattened: str = ""

    def split(self, x: Tensor, rows: int | None = None) -> Tensor:
        """x (*lead, N, M) as (R, H, N, M). rows: R, for values whose heads are shared."""
        lead, ends = x.shape[:-2], x.shape[-2:]
        if self.flattened:
            is_inside, first = self.flattened == "inside", -1 if rows is None else rows // math.prod(lead[1:])
            sizes = (first, self.heads if rows is None else -1)
            x = x.unflatten(0, sizes if is_inside else sizes[::-1]).movedim(1 if is_inside else 0, -3)
            return x.flatten(0, -4)
        last = range(len(lead) - len(self.axes), len(lead))
        heads = math.prod(lead[axis] for axis in self.axes)
        return x.movedim(self.axes, tuple(last)).reshape(-1, heads, *ends)

    def without(self, axes: Collection[int], shape: Sequence[int]) -> "Lead":
        """The same, less some axes of heads. shape: of P in front of its queries."""
        kept = tuple(axis for axis in self.axes if axis not in axes)
        return self if kept == self.axes else Lead(math.prod(shape[axis] for axis in kept), kept)

    def numbers(self, lead: torch.Size) -> Tensor:
        """The head that each index of these axes belongs to, from 0."""
        if self.flattened:
            numbers = torch.arange(lead[0])
            numbers = numbers % self.heads if self.flattened == "inside" else numbers // (lead[0] // self.heads)
            return numbers.view(-1, *[1] * (len(lead) - 1)).expand(lead)
        numbers = torch.zeros(lead, dtype=torch.long)
        for axis in self.axes:
            along = torch.arange(lead[axis]).view([-1 if other == axis else 1 for other in range(len(lead))])
            numbers = numbers * lead[axis] + along
        return numbers


@dataclass(frozen=True, eq=False)
class ReadCall:
    """An attention call.

    kind: softmax; sigmoid, relu, ...: the function that made P of scores; signed: made of a softmax, with rows that are
    no probabilities; linear: scores themselves. is_sure: whether the touch showed that the call mixes tokens.
    is_cross: whether queries and keys are other tokens; None: not known. keys_of, queries_of: number of the input whose
    tokens these are, None if not known. hidden_RM: keys to which no query gives weight. depth: 1 if no other attention
    call leads to this one. runs: the submodules around it. twin: an earlier call with the same P beside this one: the
    two are one. touched_queries: None if queries are not known. number: of the call in the pass, from 1.
    """

    key: Site
    call: Call
    kind: str
    is_sure: bool
    lead: Lead
    shape: tuple[int, ...]
    is_cross: bool | None
    keys_of: int | None
    queries_of: int | None
    hidden_RM: Tensor | None
    depth: int
    runs: tuple[Visit, ...]
    row_sum: float
    touched: tuple[int, ...]  # keys
    touched_queries: tuple[int, ...] | None
    number: int
    twin: Site | None = None

    @property
    def is_self(self) -> bool:
        """Whether queries and keys are the same tokens; if the touch did not tell, whether there are as many."""
        return self.num_queries == self.num_keys and not self.is_cross

    @property
    def words(self) -> str:
        """The kind, in words."""
        return f"{self.kind}, cross" if self.is_cross else self.kind

    @property
    def num_rows(self) -> int:
        """How many P each head has: of sequences, or of windows."""
        return math.prod(self.shape[:-2]) // max(1, self.lead.heads)

    @property
    def num_queries(self) -> int:
        return self.shape[-2]

    @property
    def num_keys(self) -> int:
        return self.shape[-1]


UNREACHED = "no input reaches it, and no softmax of scores made its weights"  # why a product is no attention
NO_TOKENS = "sums over an axis that does not count tokens"
OF_ITSELF = "weights of each token by itself, as in a dynamic convolution"


class Factor(NamedTuple):
    """Products of two activations that count as a frozen factor, and why they are no heads."""

    call: Call
    shape: tuple[int, ...]
    why: str


class Axes(NamedTuple):
    """Axes of a tensor: that of its sequences, and those of its tokens, in their order; None and () if not known."""

    batch: int | None
    tokens: tuple[int, ...]

    def arranged(self, x: Tensor) -> Tensor:
        """x with its sequences first and its tokens next; several axes of tokens become one."""
        if self.batch is None or not self.tokens:
            return x
        rest = [axis for axis in range(x.dim()) if axis != self.batch and axis not in self.tokens]
        moved = x.permute(self.batch, *self.tokens, *rest)
        return moved.flatten(1, len(self.tokens))


class Input(NamedTuple):
    """An argument that is a tensor: its name, and the axes that were found."""

    name: str
    shape: tuple[int, ...]
    axes: Axes
    is_touched: bool


class Output(NamedTuple):
    """A tensor of floats that the network returns. axes: None if not known. passed: the attention calls on the way to
    it, a bit for each number. is_submodule: whether it is the result of a submodule instead. is_apart: whether no
    sequence changes those of others."""

    name: str
    shape: tuple[int, ...]
    axes: Axes | None
    passed: int
    is_submodule: bool
    is_apart: bool


class State(NamedTuple):
    """A run of a submodule whose result has the shape of its input; digests of both, equal for equal tensors. passed:
    as in Output, of the result."""

    shape: tuple[int, ...]
    axes: Axes | None
    entered: tuple
    left: tuple
    passed: int


@dataclass(frozen=True, eq=False)
class Reading:
    """How a network was read on some inputs.

    verdicts: the role of every product of two activations. calls: attention calls in their order. factors: products
    that look like attention and are none. states: axes of submodules' results of the same shape as their inputs.
    mixing: submodules that mix tokens by something that is no attention, the innermost.
    """

    verdicts: Mapping[Site, Verdict]
    calls: tuple[ReadCall, ...]
    factors: tuple[Factor, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    states: Mapping[Visit, State]
    uncovered: tuple[Call, ...] = ()
    mixing: tuple[str, ...] = ()

    @cached_property
    def by_key(self) -> dict[Site, ReadCall]:
        return {call.key: call for call in self.calls}

    def leading_to(self, output: Output) -> list[ReadCall]:
        """The attention calls on the way to a tensor."""
        return [call for call in self.calls if output.passed >> call.number & 1]
