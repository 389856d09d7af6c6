"""TensorBoard event files of a training run. They hold the same numbers as metrics.csv."""

from importlib.util import find_spec
from pathlib import Path

from rankbench.keys import ConfigError

SCALARS = ("loss", "accuracy", "learning_rate", "tokens_per_second")


def check_tensorboard() -> None:
    """Raise ConfigError if the package that writes event files is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError("trainer.tensorboard=true: needs the extra: pip install 'rankbench[tensorboard]'")


class EventFiles:
    """Event files in <run>/events/seed=<seed>, one for each start of the run; scalars are tagged `<split>/<column>`.

    When a run resumes from a checkpoint, TensorBoard discards the later steps.
    """

    def __init__(self, folder: Path, seeds: list[int], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writers = {
            seed: SummaryWriter(str(folder / "events" / f"seed={seed}"), purge_step=step + 1 if step else None)
            for seed in seeds
        }

    def __enter__(self) -> "EventFiles":
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.writers.values():
            writer.close()

    def add(self, rows: list[dict]) -> None:
        """Write rows of metrics.csv."""
        for row in rows:
            for name in SCALARS:
                if name in row:
                    self.writers[row["seed"]].add_scalar(f"{row['split']}/{name}", row[name], row["step"])
