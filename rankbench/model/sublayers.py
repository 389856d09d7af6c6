"""Sub-layers: attention or an MLP, with its skip, its norm and the norm's place.

    post:  norm(a x + b f(x))    pre:  a x + b f(norm(x))    peri:  a x + b norm'(f(norm(x)))    none:  a x + b f(x)
    ngpt:  norm(a x + b norm'(f(x)))

f is attention or a map of each token by itself (an MLP); a is the factor of the skip, 0 without one; b is the factor of
the branch. `Sublayer.apply` is the only place where this algebra is written. It runs on tokens, on sums of paths, on
residual coordinates and on Lipschitz constants alike, because its caller passes in what the part, the norm and a
weighted sum do to them. A sub-layer can be surrounded by `Streams`: several states of a token side by side. It reads a
weighted sum of them and writes to them.

Shapes: B batch, N query token, D width, S stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from rankbench.model.attention import Heads
from rankbench.model.mlp import MLP
from rankbench.model.norm import Norm

Tokens = TypeVar("Tokens")


class Streams(NamedTuple):
    """States x_1 .. x_S of a token, (..., S D), around a sub-layer. The sub-layer gets sum_j read_j x_j; with its
    output y the states become x_i' = sum_j mix_ij x_j + write_i y.

    Every entry is a number or a learned scalar. beside: whether the part also reads x_S, concatenated after
    the tokens.
    """

    read: Sequence[float] | Tensor
    mix: Sequence[Sequence[float]] | Tensor
    write: Sequence[float] | Tensor
    beside: bool = False

    def gathered(self, x: Tensor) -> Tensor:
        """What the sub-layer reads, (..., D)."""
        return combined(self.read, x)

    def mixed(self, x: Tensor) -> Tensor:
        """The states without the sub-layer's output, (..., S D)."""
        return torch.cat([combined(row, x) for row in self.mix], -1)

    def written(self, y: Tensor) -> Tensor:
        """The sub-layer's share of the states, (..., S D)."""
        return torch.cat([weight * y for weight in self.write], -1)

    def last(self, x: Tensor) -> Tensor:
        """x_S, (..., D)."""
        return x.chunk(len(self.read), -1)[-1]


def combined(weights: Sequence[float] | Tensor, x: Tensor) -> Tensor:
    """Weighted sum of the states that lie side by side in x; (..., D)."""
    states = x.chunk(len(weights), -1)
    if isinstance(weights, Tensor):
        total: Any = sum(weight * state for weight, state in zip(weights.unbind(), states, strict=True))
        return total
    used = [state if weight == 1 else weight * state for weight, state in zip(weights, states, strict=True) if weight]
    return sum(used[1:], used[0]) if used else torch.zeros_like(states[0])


@dataclass(frozen=True, eq=False)  # torch's compiler asks for the hash of one that it has not filled yet
class Sublayer:
    """One sub-layer of layer `layer` (from 1). place: post | pre | peri | ngpt | none, none if and only if there is no
    norm.

    branch_norm: with place peri and ngpt, the norm after the part.
    """

    kind: ClassVar[str]  # attention | mlp
    layer: int
    part: Heads | MLP
    norm: Norm | None
    place: str
    skip: float
    branch: float
    branch_norm: Norm | None = None
    streams: Streams | None = None

    @property
    def name(self) -> str:
        """Prefix of the names of its parameters and dropout masks: layers.0.attention."""
        return f"layers.{self.layer - 1}.{self.kind}"

    def apply(
        self,
        x: Tokens,
        part: Callable[[Tokens], Tokens],
        norm: Callable[[Tokens], Tokens] | None,
        add: Callable[[float, Tokens, float, Tokens], Tokens],
        branch_norm: Callable[[Tokens], Tokens] | None = None,
    ) -> Tokens:
        """Apply the sub-layer to tokens of any representation; add(a, x, b, y) computes a x + b y.

        With streams, the representation is tensors whose last axis holds the states.
        """
        if self.streams is not None:
            return self._between(self.streams, x, part, norm, add, branch_norm)
        y = part(self.before(x, norm))
        if self.place in ("peri", "ngpt"):
            assert branch_norm is not None  # as the place says
            y = branch_norm(y)
        return self.after(add(self.skip, x, self.branch, y), norm)

    def _between(
        self, streams: Streams, x: Any, part: Callable[[Any], Any], norm: Any, add: Any, branch_norm: Any
    ) -> Any:
        part_of_both = part if not streams.beside else lambda read: part(torch.cat([read, streams.last(x)], -1))
        y = replace(self, streams=None).apply(streams.gathered(x), part_of_both, norm, add, branch_norm)
        return add(1.0, streams.mixed(x), 1.0, streams.written(y))

    def before(self, x: Tokens, norm: Callable[[Tokens], Tokens] | None) -> Tokens:
        """Input of the part."""
        return x if norm is None or self.place not in ("pre", "peri") else norm(x)

    def after(self, x: Tokens, norm: Callable[[Tokens], Tokens] | None) -> Tokens:
        """Output of the sub-layer, from the sum of skip and branch."""
        return x if norm is None or self.place not in ("post", "ngpt") else norm(x)

    def __call__(
        self,
        x_BND: Tensor,
        present_BN: Tensor | None = None,
        kernel: str = "table",
        weights_BHNM: Tensor | None = None,
        output_BND: Tensor | None = None,
    ) -> Tensor:
        """Output of the sub-layer on tokens; kernel as in Attention.forward.

        weights_BHNM, output_BND: dropout's masks of the attention weights and of the part's output; None: no dropout.
        """

        def part(read_BND: Tensor) -> Tensor:
            y_BND = self.f(read_BND, present_BN, kernel, weights_BHNM)
            return y_BND if output_BND is None else y_BND * output_BND

        return self.apply(x_BND, part, self.norm, weighted_sum, self.branch_norm)

    def f(
        self,
        read_BND: Tensor,
        present_BN: Tensor | None = None,
        kernel: str = "table",
        dropout_BHNM: Tensor | None = None,
    ) -> Tensor:
        """Output of the part, from its input tokens."""
        if isinstance(self.part, Heads):
            return self.part(read_BND, present_BN, dropout_BHNM, kernel)
        return self.part(read_BND)


@dataclass(frozen=True, eq=False)
class AttentionSublayer(Sublayer):
    """Attention with its surroundings."""

    kind = "attention"
    part: Heads


@dataclass(frozen=True, eq=False)
class MlpSublayer(Sublayer):
    """An MLP with its surroundings."""

    kind = "mlp"
    part: MLP


AnySublayer = AttentionSublayer | MlpSublayer


def weighted_sum(a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
    """a x + b y, without the products by 0 and 1."""
    y = y if b == 1.0 else b * y
    if a == 1.0:
        return x + y
    return a * x + y if a else y
