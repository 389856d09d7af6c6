"""Linear regression in context (Garg et al. 2022, What can transformers learn in-context?).

Shapes: B batch, E example, D dimension, N token.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError, key
from rankbench.tasks.task import Batch


@dataclass(frozen=True)
class LinearRegression:
    """Examples x_1, y_1, x_2, y_2 ... of one linear function per sequence; each number y is a token of its own.

    x and w are normal with covariance I, and y = w.x plus normal noise of standard deviation `noise`. A y is the first
    coordinate of its token. A network, which may see no later tokens, predicts each y at its x; tokens that hold a y
    are not scored (nan). In one dimension with w = 2, the examples x = 1, -3 give

        inputs: 1 2 -3 (-6 is left out: nothing follows it)        targets: 2 nan -6

    The paper divides squared errors by the dimension: its error is the loss over `dimension`. Predicting 0 has the
    error 1.
    """

    name: str = key("Name of the task.")
    dimension: int = key("Number of coordinates of an x.", at_least=1)
    points: int = key("Number of examples in a sequence. The last one asks for its y.", at_least=1)
    noise: float = key("Standard deviation of the noise on y.", at_least=0)
    start_dimension: int = key("Curriculum: number of coordinates that are not 0 at the beginning.", at_least=1)
    start_points: int = key("Curriculum: number of examples in a sequence at the beginning.", at_least=1)
    curriculum_every: int | None = key(
        "Curriculum: number of steps between additions of 2 examples and 1 coordinate. null: no curriculum.",
        at_least=1,
    )
    train_size: int | None = key("Size of the training set. null: fresh functions.", unit="sequences", at_least=1)
    test_size: int = key("Size of the test set.", unit="sequences", at_least=1)

    input_kind: ClassVar[str] = "coordinates"
    target_kind: ClassVar[str] = "numbers"
    padded: ClassVar[bool] = False
    num_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name in ("dimension", "points"):
            if (start := getattr(self, f"start_{name}")) > (whole := getattr(self, name)):
                raise ConfigError(f"task.start_{name}={start}: more than task.{name}={whole}, to which it grows")
        if self.curriculum_every is not None and self.train_size is not None:
            raise ConfigError(
                f"task.curriculum_every={self.curriculum_every}: only fresh sequences can grow; "
                "use task.train_size=null, or task.curriculum_every=null"
            )

    @property
    def num_inputs(self) -> int:
        return self.dimension

    @property
    def length(self) -> int:
        return 2 * self.points - 1

    @property
    def asks_for_next(self) -> bool:
        """Whether an x is followed by its y, which models must not see there."""
        return self.points > 1

    @property
    def error_scale(self) -> float:
        """Factor that turns the loss into the paper's error."""
        return 1 / self.dimension

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        return self._sample(num_sequences, self.points, self.dimension, generator)

    def sample_at(self, step: int, num_sequences: int, generator: torch.Generator) -> Batch:
        """Training sequences of one step of the curriculum."""
        if self.curriculum_every is None:
            return self.sample(num_sequences, generator)
        stage = step // self.curriculum_every
        points = min(self.points, self.start_points + 2 * stage)
        return self._sample(num_sequences, points, min(self.dimension, self.start_dimension + stage), generator)

    def _sample(self, num_sequences: int, points: int, dimension: int, generator: torch.Generator) -> Batch:
        shape = (num_sequences, points)
        x_BED = torch.zeros(*shape, self.dimension, dtype=torch.float64)
        x_BED[..., :dimension] = torch.randn(*shape, dimension, generator=generator, dtype=torch.float64)
        w_BD1 = torch.randn(num_sequences, self.dimension, 1, generator=generator, dtype=torch.float64)
        y_BE = (x_BED @ w_BD1).squeeze(-1)
        y_BE = y_BE + self.noise * torch.randn(*shape, generator=generator, dtype=torch.float64)
        inputs_BND = torch.zeros(num_sequences, 2 * points - 1, self.dimension, dtype=torch.float64)
        inputs_BND[:, 0::2] = x_BED
        inputs_BND[:, 1::2, 0] = y_BE[:, :-1]
        targets_BN1 = torch.full((num_sequences, 2 * points - 1, 1), float("nan"), dtype=torch.float64)
        targets_BN1[:, 0::2, 0] = y_BE
        return Batch(inputs_BND, targets_BN1)


def examples_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """The xs, (B, E, D), and ys, (B, E), of a batch."""
    return batch.inputs[:, 0::2], batch.targets[:, 0::2, 0]


def least_squares(x_BED: Tensor, y_BE: Tensor) -> Tensor:
    """Predict each y by the least-norm least-squares solution of the examples before it, (B, E); 0 for the first."""
    predicted_BE = torch.zeros_like(y_BE)
    for e in range(1, y_BE.shape[1]):
        w_BD1 = torch.linalg.pinv(x_BED[:, :e]) @ y_BE[:, :e, None]
        predicted_BE[:, e] = (x_BED[:, e : e + 1] @ w_BD1).flatten()
    return predicted_BE


def nearest_neighbours(x_BED: Tensor, y_BE: Tensor, number: int = 3) -> Tensor:
    """Predict each y by the mean y of the `number` nearest examples before it (or of all, if fewer), (B, E)."""
    predicted_BE = torch.zeros_like(y_BE)
    for e in range(1, y_BE.shape[1]):
        distance_BE = (x_BED[:, :e] - x_BED[:, e : e + 1]).norm(dim=-1)
        nearest_BK = distance_BE.topk(min(number, e), largest=False).indices
        predicted_BE[:, e] = y_BE.gather(1, nearest_BK).mean(1)
    return predicted_BE


def averaging(x_BED: Tensor, y_BE: Tensor) -> Tensor:
    """Predict each y by w.x with w the mean of x y over the examples before it, (B, E); w is unbiased."""
    sums_BED = (x_BED * y_BE[..., None]).cumsum(1)
    before_E1 = torch.arange(1, y_BE.shape[1], dtype=x_BED.dtype, device=x_BED.device)[:, None]
    predicted_BE = torch.zeros_like(y_BE)
    predicted_BE[:, 1:] = (sums_BED[:, :-1] / before_E1 * x_BED[:, 1:]).sum(-1)
    return predicted_BE


BASELINES = {"least squares": least_squares, "3 nearest neighbours": nearest_neighbours, "averaging": averaging}
