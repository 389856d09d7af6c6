"""Trainings to which something happens in the middle."""

from collections.abc import Callable

import pytest

from rankbench.config.schema import TrainConfig
from rankbench.runs.run import Run
from rankbench.training.loop import train
from rankbench.training.seeds_side_by_side import Training


def during_step(patch: pytest.MonkeyPatch, number: int, happen: Callable[[], object]) -> None:
    """Have this happen while that step is computed."""
    update = Training.update

    def update_and_more(self: Training) -> None:
        update(self)
        if self.progress.step == number:
            happen()

    patch.setattr(Training, "update", update_and_more)


def train_until_saved(cfg: TrainConfig, run: Run, step: int) -> None:
    """Train, and stop as soon as the checkpoint of that step is saved."""
    save = Training.save

    def save_and_stop(self: Training, run: Run) -> None:
        save(self, run)
        if self.progress.step == step:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Training, "save", save_and_stop)
        train(cfg, run)
