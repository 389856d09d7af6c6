"""The seeds of one forward pass: their weights, their scores, their gradients."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.tasks.task import Score


class Piece(NamedTuple):
    """The seeds of one forward pass, and their weights by name: views of the parameters, for which gradients are taken.

    The weights of a single seed are not stacked, which saves a small network a tenth of its step.
    """

    seeds: slice
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, parameters: dict[str, Tensor], seeds: slice) -> "Piece":
        """Take the piece of these seeds from the stacked parameters."""
        index = seeds.start if seeds.stop - seeds.start == 1 else seeds
        # detached last: of a tensor that it sees to be a view, torch's compiler makes a graph for each place in memory
        return cls(seeds, {name: weight[index].detach().requires_grad_() for name, weight in parameters.items()})

    def stacked(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the gradients of the piece's weights the leading axis of the stacked parameters, (S, ...)."""
        is_single = self.seeds.stop - self.seeds.start == 1
        return tuple(gradient[None] for gradient in gradients) if is_single else gradients


def joined(scores: Iterable[Score]) -> Score:
    """Join the scores of the pieces of a stack into those of the whole stack."""
    return Score(*map(torch.cat, zip(*scores, strict=True)))


def clipped(gradients: tuple[Tensor, ...], largest: float) -> tuple[Tensor, ...]:
    """Scale stacked gradients down, seed by seed, to a Euclidean norm of at most `largest` over all parameters."""
    norm_S = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factor_S = (largest / norm_S).clamp(max=1.0)
    return tuple(gradient * factor_S.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients)
