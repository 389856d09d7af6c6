"""Vertices of the convex hull of a set of points (Dong et al. 2021, sec. 4.3, after Vinyals et al. 2015).

Shapes: B batch, N point.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor

from rankbench.config.keys import key
from rankbench.tasks.task import Batch

MARGIN = 1e-6  # radians, and share of the largest coordinate
MOST_BY_ANGLES = 40  # points of a set; Qhull is faster for more, because every pair has an angle
SETS_AT_A_TIME = 1000  # the angles of 1,000 sets of 40 points take 40 MB


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
        return Batch(points_BN2, labels_of_sets(points_BN2))


def labels_of_sets(points_BN2: Tensor) -> Tensor:
    """`hull_labels` of each set, (B, N), many sets at once where their points are in general position."""
    label = _labels_by_angles if points_BN2.shape[1] <= MOST_BY_ANGLES else _labels_one_by_one
    return torch.cat([torch.from_numpy(label(sets.numpy())) for sets in points_BN2.split(SETS_AT_A_TIME)])


def _labels_one_by_one(points_BN2: np.ndarray) -> np.ndarray:
    return np.array([hull_labels(points_N2) for points_N2 in points_BN2])


def _labels_by_angles(points_BN2: np.ndarray) -> np.ndarray:
    """Labels of sets, (B, N), from the directions in which each point sees the others.

    A point is a vertex if and only if all others lie within less than a half turn, so that the largest angle between
    neighbouring directions to them is more than pi. A set in which an angle is too close to pi, or two points are too
    close to each other, goes to Qhull. In the other sets, every point is MARGIN^2 of the coordinates' size away from a
    tie, which is 100 times Qhull's tolerance.
    """
    apart_BNN2 = points_BN2[:, None] - points_BN2[:, :, None]
    own = np.arange(points_BN2.shape[1])
    angles_BNN = np.arctan2(apart_BNN2[..., 1], apart_BNN2[..., 0])
    distance_BNN = np.abs(apart_BNN2).max(-1)
    distance_BNN[:, own, own] = np.inf
    angles_BNN[:, own, own] = angles_BNN[:, own, own - 1]  # no direction to itself: repeat another point's direction
    angles_BNN.sort(-1)
    whole_turn_BN1 = angles_BNN[..., :1] + 2 * np.pi
    largest_BN = np.diff(angles_BNN, axis=-1, append=whole_turn_BN1).max(-1)
    labels_BN = (largest_BN > np.pi).astype(int)
    unclear_B = (np.abs(largest_BN - np.pi) < MARGIN).any(-1)
    unclear_B |= distance_BNN.min((1, 2)) < MARGIN * np.abs(points_BN2).max((1, 2))
    if unclear_B.any():
        labels_BN[unclear_B] = _labels_one_by_one(points_BN2[unclear_B])
    return labels_BN


def hull_labels(points_N2: np.ndarray) -> list[int]:
    """1 for each point at a vertex of the convex hull, else 0, by Qhull (Barber et al. 1996).

    Within Qhull's tolerance for rounding, a point next to an edge counts as on it.
    """
    # adding 0 makes -0 and 0 equal
    distinct_M2, distinct_index_N = np.unique(points_N2 + 0.0, axis=0, return_inverse=True)
    labels_M = np.zeros(len(distinct_M2), dtype=int)
    try:
        labels_M[scipy.spatial.ConvexHull(distinct_M2).vertices] = 1
    except scipy.spatial.QhullError:
        # fewer than three distinct points, or all on a line, along which np.unique has sorted them
        labels_M[[0, -1]] = 1
    return labels_M[distinct_index_N.ravel()].tolist()  # numpy 2.0 has an axis more
