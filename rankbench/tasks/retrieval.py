"""The largest value of a sequence in each of several directions (Yu et al. 2025, generalized D-retrieval tasks).

Shapes: B batch, N token (points, then the class token), C coordinate, D direction.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy
import torch

from rankbench.config.keys import ConfigError, key
from rankbench.tasks.task import Batch


@dataclass(frozen=True)
class Retrieval:
    """Points with independent normal coordinates, and after them a class token of zeros, which alone is scored.

    Its target is the largest first coordinate of all points, the largest second one, and so on for `directions`
    coordinates. They belong to different points, which the class token must find one by one: `directions` is the task's
    intrinsic dimension. With two points and two directions,

        inputs: (1, 0, 2) (-1, .5, 0) (0, 0, 0)        target: (1, .5)

    which is then shifted and scaled to have mean 0 and variance 1, so that predicting 0 has the error 1.
    """

    name: str = key("Name of the task.")
    dimension: int = key("Number of coordinates of a point.", at_least=1)
    directions: int = key("Number of coordinates whose largest value is wanted.", at_least=1)
    points: int = key("Number of points in a sequence.", at_least=2, why="a single point is the largest")
    train_size: int | None = key("Size of the training set. null: fresh points at every step.", unit="sets", at_least=1)
    test_size: int = key("Size of the test set.", unit="sets", at_least=1)

    input_kind: ClassVar[str] = "coordinates"
    target_kind: ClassVar[str] = "numbers"
    padded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.directions > self.dimension:
            raise ConfigError(
                f"task.directions={self.directions}: only task.dimension={self.dimension} coordinates; use fewer"
            )

    @property
    def num_inputs(self) -> int:
        return self.dimension

    @property
    def num_outputs(self) -> int:
        return self.directions

    @property
    def length(self) -> int:
        return self.points + 1

    @property
    def token_kinds(self) -> dict[str, tuple[int, ...]]:
        """The class token's position."""
        return {"class": (self.points,)}

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        shape = (num_sequences, self.length, self.dimension)
        inputs_BNC = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs_BNC[:, -1] = 0
        largest_BD = inputs_BNC[:, :-1, : self.directions].amax(1)
        mean, deviation = moments_of_maximum(self.points)
        targets_BND = torch.full((*shape[:2], self.directions), float("nan"), dtype=torch.float64)
        targets_BND[:, -1] = (largest_BD - mean) / deviation
        return Batch(inputs_BNC, targets_BND)


def moments_of_maximum(numbers: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of that many independent standard normal numbers."""
    x = np.linspace(-10, 10, 4001)
    at_most = scipy.special.ndtr(x) ** numbers
    mean = 10 - scipy.integrate.simpson(at_most, x=x)
    square = 100 - scipy.integrate.simpson(2 * x * at_most, x=x)
    return float(mean), math.sqrt(square - mean**2)
