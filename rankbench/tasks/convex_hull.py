"""Which points of a set are corners of its convex hull (Dong et al. 2021, sec. 4.3, after Vinyals et al. 2015).

Shapes: B batch, N point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from rankbench.config import ConfigError
from rankbench.tasks.task import Batch

Point = tuple[float, float]

# Beyond this share of its two products' sizes a float64 determinant has the right sign (Shewchuk 1997, ccwerrboundA).
SIGN_IS_CERTAIN = (3 + 16 * 2**-53) * 2**-53


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
        return Batch(points_BN2, torch.tensor([hull_labels(points) for points in points_BN2.tolist()]))


def hull_labels(points: Sequence[Sequence[float]]) -> list[int]:
    """1 for each point at a vertex of the convex hull, else 0; exact for every finite input, in O(N log N).

    Andrew 1979, monotone chain, with exact orientations.
    """
    places = [(x, y) for x, y in points]
    in_order = sorted(set(places))
    vertices = {*_chain(in_order), *_chain(in_order[::-1])}
    return [int(place in vertices) for place in places]


def _chain(in_order: list[Point]) -> list[Point]:
    """From one end to the other, only turning left."""
    chain: list[Point] = []
    for point in in_order:
        while len(chain) > 1 and not _turns_left(chain[-2], chain[-1], point):
            chain.pop()
        chain.append(point)
    return chain


def _turns_left(a: Point, b: Point, c: Point) -> bool:
    """Whether c lies strictly left of the line from a to b, exactly."""
    one, other = (b[0] - a[0]) * (c[1] - a[1]), (b[1] - a[1]) * (c[0] - a[0])
    if abs(one - other) > SIGN_IS_CERTAIN * (abs(one) + abs(other)):
        return one > other
    (ax, ay), (bx, by), (cx, cy) = ((Fraction(x), Fraction(y)) for x, y in (a, b, c))
    return (bx - ax) * (cy - ay) > (by - ay) * (cx - ax)
