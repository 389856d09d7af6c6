"""Which points of a set are corners of its convex hull (Dong et al. 2021, sec. 4.3, after Vinyals et al. 2015).

Shapes: B batch, N point.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.spatial import ConvexHull as Hull
from scipy.spatial import QhullError

from rankbench.config import ConfigError
from rankbench.tasks.task import Batch


@dataclass(frozen=True)
class ConvexHull:
    """Points uniform in a square of side `scale` with a corner at the origin, all of a set shifted by one normal vector
    of standard deviation `shift_sd`; class 1 for a vertex of the set's convex hull, 0 for the others.

    The paper has scale 1 and shift_sd 1, the authors' code 10 and 3.3. A vertex is an extreme point: one that no
    segment between two other places of the set contains. So the ends of points in a line are vertices, points on an
    edge are not, and equal points share their label. The four corners and the middle of a square: 1 1 1 1 0.
    """

    name: str
    points: int
    scale: float
    shift_sd: float
    train_size: int | None
    test_size: int

    input_kind: ClassVar[str] = "coordinates"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False
    num_inputs: ClassVar[int] = 2
    num_outputs: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if self.points < 4:
            raise ConfigError(f"task.points={self.points}: fewer than 4 points are all vertices of their hull")
        if not 0 < self.scale < float("inf"):
            raise ConfigError(f"task.scale={self.scale}: the side of a square, a number above 0")
        if not 0 <= self.shift_sd < float("inf"):
            raise ConfigError(f"task.shift_sd={self.shift_sd}: a standard deviation, a number from 0")
        for key, size in (("train_size", self.train_size), ("test_size", self.test_size)):
            if size is not None and size < 1:
                raise ConfigError(f"task.{key}={size}: at least one set of points is needed")

    @property
    def length(self) -> int:
        return self.points

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        square = torch.rand(num_sequences, self.points, 2, generator=generator, dtype=torch.float64)
        shift = torch.randn(num_sequences, 1, 2, generator=generator, dtype=torch.float64)
        points_BN2 = self.scale * square + self.shift_sd * shift
        return Batch(points_BN2, torch.tensor([hull_labels(points) for points in points_BN2.numpy()]))


def hull_labels(points_N2: np.ndarray) -> list[int]:
    """1 for each point at a vertex of the convex hull, else 0, by Qhull (Barber et al. 1996) with its tolerance: points
    that rounding alone keeps off an edge lie on it."""
    # adding 0 makes the two zeros one place
    places_M2, place_N = np.unique(points_N2 + 0.0, axis=0, return_inverse=True)
    labels_M = np.zeros(len(places_M2), dtype=int)
    try:
        labels_M[Hull(places_M2).vertices] = 1
    except QhullError:  # all in a line, or fewer than three places: np.unique has sorted them along it
        labels_M[[0, -1]] = 1
    return labels_M[place_N].tolist()
