"""How far a training has come, and whether what a checkpoint says of it can be."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

NOT_A_STATE = (LookupError, TypeError, ValueError, AttributeError)  # errors of `Training.restore`


@dataclass
class Progress:
    """Progress of a run; a checkpoint holds it together with the weights and the optimiser's state."""

    step: int = 0
    seconds: float = 0.0
    status: list[str] = field(default_factory=list)  # per seed: training | finished | reached | diverged
    last_step: list[int] = field(default_factory=list)  # per seed
    final: dict[int, dict[str, float]] = field(default_factory=dict)  # per seed: its numbers in summary.json
    rows: dict[str, int] = field(default_factory=dict)  # number of rows in metrics.csv and layers.csv at the checkpoint
    measured: bool = True  # whether this step's rows, if it has any, are among `rows`

    @property
    def training(self) -> list[int]:
        """Indices of the seeds that are still training."""
        return [index for index, status in enumerate(self.status) if status == "training"]


def check_progress(progress: Progress, num_seeds: int, num_steps: int) -> None:
    """Raise ValueError or TypeError if this cannot be the progress of num_seeds seeds over num_steps steps."""
    if not set(progress.status) <= {"training", "finished", "reached", "diverged"}:
        raise ValueError(f"status {progress.status}")
    if len(progress.status) != num_seeds or [int(step) for step in progress.last_step] != progress.last_step:
        raise ValueError(f"{len(progress.status)} seeds")
    if not 0 <= progress.step <= num_steps or not math.isfinite(progress.seconds):
        raise ValueError(f"step {progress.step} of {num_steps}")
    for number in (*progress.rows.values(), *(value for final in progress.final.values() for value in final.values())):
        float(number)  # raises for a text


def check_shapes(tensors: dict[str, Tensor], shapes: dict[str, torch.Size | tuple[int, ...]]) -> None:
    """Raise ValueError, naming the first tensor whose shape differs."""
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{name} of shape {tuple(tensors[name].shape)}, not {tuple(shape)}")
