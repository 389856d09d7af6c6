"""Trainings to which something happens in the middle, and what they leave in the end."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from rankbench.config.schema import TrainConfig
from rankbench.runs.run import WEIGHTS, Run
from rankbench.training.loop import train
from rankbench.training.seeds_side_by_side import Training

CLOCKS = ("seconds", "tokens_per_second")  # columns of metrics.csv that differ from one training to the next


def timeless(run: Run, table: str = "metrics") -> list[list[str]]:
    """A table of the training, as it is written, without the columns that tell wall-clock time."""
    with (run.folder / f"{table}.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    kept = [column for column, name in enumerate(rows[0]) if name not in CLOCKS]
    return [[row[column] for column in kept] for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """Content of every file of a folder, by name, hidden ones too."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def assert_same_run(run: Run, reference: Run) -> None:
    """The same rows, weights and summary, bit for bit, and the same files: none is half written."""
    files, wanted = ({path.name for path in each.folder.iterdir() if path.is_file()} for each in (run, reference))
    assert files == wanted
    for table in ("metrics", "layers"):
        assert f"{table}.csv" not in wanted or timeless(run, table) == timeless(reference, table)
    assert (run.folder / WEIGHTS).read_bytes() == (reference.folder / WEIGHTS).read_bytes()
    summary, expected = run.summary(), reference.summary()
    for clock in ("seconds", "files"):  # files: checksums, also of the clocks in metrics.csv
        del summary[clock], expected[clock]
    assert summary == expected


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
