"""Vertices of the convex hull of a set of points (Dong et al. 2021, sec. 4.3, after Vinyals et al. 2015).

Shapes: B batch, N point.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.spatial import ConvexHull as Hull
from scipy.spatial import QhullError

from rankbench.keys import key
from rankbench.tasks.task import Batch


@dataclass(frozen=True)
class ConvexHull:
    """Label each point of a set: class 1 for a vertex of the set's convex hull, 0 for the others.

    Points are uniform in a square of side `scale` with a corner at the origin. Each set is shifted by one normal vector
    of standard deviation `shift_sd`. A vertex is an extreme point: no segment between two other points of the set
    contains it. So the ends of points on a line are vertices, points on an edge are not, and equal points share their
    label. The four corners and the middle of a square: 1 1 1 1 0.
    """

    name: str = key("Name of the task.")
    points: int = key("Number of points in a set.", at_least=4, why="fewer points are all vertices of their hull")
    scale: float = key("Side of the square that points are drawn from. The authors' code: 10.", above=0)
    shift_sd: float = key("Standard deviation of the normal shift of a set. The authors' code: 3.3.", at_least=0)
    train_size: int | None = key("Size of the training set. null: fresh sets at every step.", unit="sets", at_least=1)
    test_size: int = key("Size of the test set.", unit="sets", at_least=1)

    input_kind: ClassVar[str] = "coordinates"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False
    num_inputs: ClassVar[int] = 2
    num_outputs: ClassVar[int] = 2

    @property
    def length(self) -> int:
        return self.points

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        square = torch.rand(num_sequences, self.points, 2, generator=generator, dtype=torch.float64)
        shift = torch.randn(num_sequences, 1, 2, generator=generator, dtype=torch.float64)
        points_BN2 = self.scale * square + self.shift_sd * shift
        return Batch(points_BN2, torch.tensor([hull_labels(points) for points in points_BN2.numpy()]))


def hull_labels(points_N2: np.ndarray) -> list[int]:
    """1 for each point at a vertex of the convex hull, else 0, by Qhull (Barber et al. 1996).

    Within Qhull's tolerance for rounding, a point beside an edge counts as on it.
    """
    # adding 0 makes -0 and 0 equal
    distinct_M2, distinct_index_N = np.unique(points_N2 + 0.0, axis=0, return_inverse=True)
    labels_M = np.zeros(len(distinct_M2), dtype=int)
    try:
        labels_M[Hull(distinct_M2).vertices] = 1
    except QhullError:  # fewer than three distinct points, or all on a line, along which np.unique has sorted them
        labels_M[[0, -1]] = 1
    return labels_M[distinct_index_N].tolist()
