"""The tape's linear program, and its replay on sums of paths.

A recorded pass leaves nodes behind. Each node is linear in its parents, because a product of two activations is frozen
on one side. A replay gives every node its slots, S_0, S_1, ...: slot k is the sum of all paths with k heads.
An attention call moves each slot by one; constants enter slot 0.

Shapes: T slots held (rows), B batch, H head, N query token, M key token, D and F widths, K head width.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

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
    """A linear map from the parents' slots to a node's. new: whether the node's rows share no memory with theirs.
    fills: whether a parent without slots counts as zeros."""

    new: ClassVar[bool] = True
    fills: ClassVar[bool] = True

    def __call__(self, sweep: "Replay", inputs: Sequence[Any], own: Sequence[bool]) -> Slots:
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


def nodes_of(target: Node | Tensor) -> list[Node]:
    """The nodes that the target depends on, itself included, in the order of their calls; none of a constant.

    ConfigError if a tensor that one of them froze was changed in place afterwards.
    """
    if not isinstance(target, Node):
        return []
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
class Replay:
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
                result = node.step(self, self.filled(node, inputs), own)
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
    def filled(node: Node, inputs: list[Slots | None]) -> list[Slots | None]:
        """The inputs, with zeros for absent ones if the step needs all of them."""
        if not node.step.fills or None not in inputs:
            return inputs
        present = next(x for x in inputs if x is not None)
        return [
            Slots(present.low, present.rows.new_zeros(1, *parent.shape)) if x is None else x
            for x, parent in zip(inputs, node.parents, strict=True)
        ]

    def low(self, x: Slots, constant: Tensor | None) -> int:
        """The first slot of the sum of x and this constant."""
        return 0 if constant is not None and self.constants else x.low
