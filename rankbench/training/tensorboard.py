"""TensorBoard event files of a training run, for those who watch it there. They hold what metrics.csv holds."""

from importlib.util import find_spec
from pathlib import Path

from rankbench.keys import ConfigError

SCALARS = ("loss", "accuracy", "learning_rate", "tokens_per_second")


def check_tensorboard() -> None:
    """ConfigError where the package that writes event files is not installed."""
    if find_spec("tensorboard") is None:
        raise ConfigError("trainer.tensorboard=true: needs the extra: pip install 'rankbench[tensorboard]'")


class EventFiles:
    """<run>/events/seed=<seed>: an event file a seed and start of the run, scalars tagged `<split>/<column>`.

    Continued from a checkpoint, TensorBoard is told to forget what came after it.
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
        """Rows of metrics.csv."""
        for row in rows:
            for name in SCALARS:
                if name in row:
                    self.writers[row["seed"]].add_scalar(f"{row['split']}/{name}", row[name], row["step"])
