"""The nearest or farthest point of a set on the sphere (Amsel, Yehudai and Bruna, Benefits of rank in attention).

Shapes: B batch, N token, D dimension.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError, key
from rankbench.tasks.task import Batch

MODES = {"nearest": 1.0, "farthest": -1.0}


@dataclass(frozen=True)
class NearestNeighbor:
    """Among unit vectors, find the one with the largest (nearest) or smallest (farthest) inner product with a query.

    queries=self: each of `points` independent uniform points is a query and may be its own answer (with nearest it
    always is). queries=separate: `points` orthonormal points, uniform among such sets, and after them the query, a
    token uniform on the sphere; only its target is scored (the others are nan). The answer is the point's coordinates.
    On the circle, mode=farthest, queries=self, the points (1, 0), (0, 1) and (-.6, .8) give

        inputs: (1, 0) (0, 1) (-.6, .8)        targets: (-.6, .8) (1, 0) (1, 0)

    The papers sum squared errors over coordinates: their error is `dimension` times the loss. Predicting 0 has the
    error 1.
    """

    name: str = key("Name of the task.")
    dimension: int = key("Number of coordinates of a point.", at_least=2, why="in 1 dimension a sphere is two points")
    points: int = key("Number of points in a set.", at_least=2, why="a nearest point needs at least 2 to choose from")
    mode: str = key("Which point answers a query.", choices=MODES)
    queries: str = key("Queries: every point, or one token after orthonormal points.", choices=("self", "separate"))
    train_size: int | None = key("Size of the training set. null: fresh points at every step.", unit="sets", at_least=1)
    test_size: int = key("Size of the test set.", unit="sets", at_least=1)

    input_kind: ClassVar[str] = "coordinates"
    target_kind: ClassVar[str] = "numbers"
    padded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.queries == "separate" and self.points > self.dimension:
            raise ConfigError(
                f"task.points={self.points}: no more than task.dimension={self.dimension} points can be orthonormal; "
                "use fewer, or task.queries=self"
            )

    @property
    def num_inputs(self) -> int:
        return self.dimension

    num_outputs = num_inputs

    @property
    def length(self) -> int:
        return self.points + (self.queries == "separate")

    @property
    def error_scale(self) -> float:
        """Factor that turns the loss into the papers' error."""
        return float(self.dimension)

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        if self.queries == "self":
            points_BND = on_sphere((num_sequences, self.points), self.dimension, generator)
            return Batch(points_BND, self.answers(points_BND, points_BND))
        points_BND = orthonormal(num_sequences, self.points, self.dimension, generator)
        query_B1D = on_sphere((num_sequences, 1), self.dimension, generator)
        unscored_BND = torch.full_like(points_BND, float("nan"))
        answer_B1D = self.answers(points_BND, query_B1D)
        return Batch(torch.cat([points_BND, query_B1D], 1), torch.cat([unscored_BND, answer_B1D], 1))

    def answers(self, points_BMD: Tensor, queries_BND: Tensor) -> Tensor:
        """Answer of each query, (B, N, D); the first of equally good points."""
        best_BN = (MODES[self.mode] * queries_BND @ points_BMD.mT).argmax(-1)
        return points_BMD.gather(1, best_BN[..., None].expand(-1, -1, self.dimension))


def on_sphere(shape: tuple[int, ...], dimension: int, generator: torch.Generator) -> Tensor:
    """Independent uniform points of the unit sphere, (*shape, D), float64."""
    normal = torch.randn(*shape, dimension, generator=generator, dtype=torch.float64)
    return normal / normal.norm(dim=-1, keepdim=True)


def orthonormal(num_sets: int, points: int, dimension: int, generator: torch.Generator) -> Tensor:
    """Sets of orthonormal points, (B, N, D), float64; their distribution (Haar) is invariant under rotations.

    In the QR factorisation of a normal matrix, the signs of Q depend on the algorithm. With R's diagonal made positive
    the factor is unique and rotates with the matrix (Mezzadri 2007).
    """
    normal_BDN = torch.randn(num_sets, dimension, points, generator=generator, dtype=torch.float64)
    q_BDN, r_BNN = torch.linalg.qr(normal_BDN)
    return (q_BDN * r_BNN.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.contiguous()
