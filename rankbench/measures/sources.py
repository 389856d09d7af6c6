"""Values in a network with their derivatives by the input and by what each operation before them adds.

Shapes: N token, D width, F output width, H head, M key token, S number of a source: an entry of the input, or of what
an operation adds.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Value(NamedTuple):
    """A value in the network: at the centre, and its derivatives there by each source, (..., S). Source 0 is the input,
    source e the output of operation e, in units of its W_e."""

    centre: Tensor
    slopes: dict[int, Tensor]

    def mapped(self, linear: Callable[[Tensor], Tensor], shift: Tensor | float = 0.0) -> "Value":
        """The value after a linear map that leaves a last axis S alone, and a constant."""
        return Value(linear(self.centre) + shift, {source: linear(slope) for source, slope in self.slopes.items()})


class Watched(NamedTuple):
    """Norms of a value's derivatives by each of its sources, (sources, ...): of the whole value, or of its blocks."""

    sources: list[int]
    norms: Tensor

    @classmethod
    def of(cls, value: Value, block_axes: int) -> "Watched":
        """block_axes: how many leading axes number the blocks; 0: the whole value."""
        norms = [_largest_singular_value(slope, block_axes) for slope in value.slopes.values()]
        return cls(list(value.slopes), torch.stack(norms))

    @property
    def at_centre(self) -> Tensor:
        """Norms of the Jacobian at the centre."""
        return self.norms[0]

    def slope(self, changes: Tensor) -> Tensor:
        """U_t, from c_e of each source (1 for the input)."""
        return torch.tensordot(changes[self.sources], self.norms, 1)


def _largest_singular_value(slope: Tensor, block_axes: int) -> Tensor:
    """The largest singular value of each block of derivatives (..., S), by the eigenvalues of the smaller Gram matrix:
    exact to rounding for the largest, in a fraction of an SVD's time."""
    if block_axes == slope.dim() - 1:
        return slope.norm(dim=-1)
    scale = torch.frexp(slope.abs().amax()).exponent.to(slope).exp2()  # so that squares neither overflow nor vanish
    matrices = slope.flatten(block_axes, -2) / scale
    gram = matrices @ matrices.mT if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT @ matrices
    if not gram.isfinite().all():
        return slope.new_full(slope.shape[:block_axes], math.inf)
    return torch.linalg.eigvalsh(gram)[..., -1].clamp(min=0).sqrt() * scale


def diagonal(weights: Tensor, seen_NM: Tensor | None = None) -> Tensor:
    """Derivatives (..., S) of a value by its own entries, times weights; seen_NM: only by those that are seen."""
    diagonal = torch.diag(weights.flatten())
    if seen_NM is not None:
        diagonal = diagonal[:, seen_NM.expand_as(weights).flatten()]
    return diagonal.view(*weights.shape, -1)


def times(factors: Tensor, x: Tensor) -> Tensor:
    """Entries times factors, with or without a last axis S."""
    return factors * x if x.dim() == factors.dim() else factors[..., None] * x


def through(weight: Tensor, bias: Tensor | None, x: Value) -> Value:
    """The value of every token after a linear map as nn.Linear has it."""
    return x.mapped(functools.partial(torch.einsum, "fd,nd...->nf...", weight), 0.0 if bias is None else bias)


def weighted_sum(a: float, x: Value, b: float, y: Value) -> Value:
    """a x + b y; y has all sources of x."""
    slopes = {source: b * slope for source, slope in y.slopes.items()}
    for source, slope in x.slopes.items():
        slopes[source] = slopes[source] + a * slope
    return Value(a * x.centre + b * y.centre, slopes)
