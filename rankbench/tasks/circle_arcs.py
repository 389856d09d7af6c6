"""Two points that move around a circle, opposite each other (Dong et al. 2021, sec. 4.2).

Shapes: T step, N token (2).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rankbench.config.keys import key
from rankbench.tasks.task import Batch


@dataclass(frozen=True)
class CircleArcs:
    """Predict the positions of both points one step later from their positions now: regression, by teacher forcing.

    Token 1 starts at (-radius, 0) and runs along the lower arc, token 2 at (radius, 0) along the upper one, both
    counter-clockwise, `points` steps to half a turn. The training set is every step once, and is also the test set.
    With radius .3 and 2 points the steps are

        (-.3, 0) (.3, 0) -> (0, -.3) (0, .3)        (0, -.3) (0, .3) -> (.3, 0) (-.3, 0)
    """

    name: str = key("Name of the task.")
    points: int = key("Number of steps along each arc, which is half a turn.", at_least=2)
    radius: float = key("Radius of the circle.", above=0)

    input_kind: ClassVar[str] = "coordinates"
    target_kind: ClassVar[str] = "numbers"
    padded: ClassVar[bool] = False
    num_inputs: ClassVar[int] = 2
    num_outputs: ClassVar[int] = 2
    length: ClassVar[int] = 2
    test_size: ClassVar[None] = None

    @property
    def train_size(self) -> int:
        return self.points

    def positions(self, steps_T: Tensor) -> Tensor:
        """Positions of the tokens after each number of steps, (T, 2, 2), float64. They move on past an arc's end."""
        angle_T = steps_T.double() * (math.pi / self.points)
        upper_T2 = self.radius * torch.stack([angle_T.cos(), angle_T.sin()], dim=-1)
        return torch.stack([-upper_T2, upper_T2], dim=-2)

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        """Steps in random order; none repeats before all have occurred."""
        rounds = math.ceil(num_sequences / self.points)
        steps_T = torch.cat([torch.randperm(self.points, generator=generator) for _ in range(rounds)])[:num_sequences]
        return Batch(self.positions(steps_T), self.positions(steps_T + 1))
