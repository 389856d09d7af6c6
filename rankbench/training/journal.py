"""Writing to the run's folder during training: rows of metrics.csv and layers.csv, and checkpoints."""

import csv
import io
import time
from collections.abc import Callable
from pathlib import Path

from rankbench.config.keys import ConfigError
from rankbench.runs.files import LARGEST_TABLE, append, bounded, naming, sync, write_text
from rankbench.runs.run import Run
from rankbench.training.layers import DYNAMICS, dynamics
from rankbench.training.seeds_side_by_side import METRICS, Training


class Journal:
    """Writes the rows and checkpoints of a training, and counts its seconds, evaluations included.

    write: hands the rows of metrics.csv to the trackers; report: shows progress. Both are set before the first row.
    upto: the last step whose rows a continued run keeps; -1 for a run that begins.
    """

    write: Callable[[list[dict]], None]
    report: Callable[[int, list[dict]], None]

    def __init__(self, training: Training, run: Run) -> None:
        self.training, self.run, self.trainer = training, run, training.cfg.trainer
        progress = training.progress
        # a step that is not measured yet will have its rows written again
        self.upto = progress.step - (not progress.measured) if training.saved_step is not None else -1
        self.metrics = StepsFile(run.folder / "metrics.csv", METRICS, self.upto, progress.rows)
        self.layers = None
        if self.trainer.dynamics_every:
            self.layers = StepsFile(run.folder / "layers.csv", DYNAMICS, self.upto, progress.rows)

    def start_clock(self) -> None:
        """Count seconds from now on, in addition to those of the checkpoint."""
        self._began = time.perf_counter() - self.training.progress.seconds

    def begin(self) -> None:
        """Add the rows of step 0."""
        self._add_metrics()
        self._add_layers()

    def measure(self) -> None:
        """Add the rows of this step, if it has any, and retire the seeds that are done."""
        progress = self.training.progress
        last = progress.step == self.training.num_steps
        evaluates = progress.step % self.trainer.eval_every == 0 or last
        every = self.trainer.dynamics_every
        measures_layers = self.layers is not None and every is not None and (progress.step % every == 0 or last)
        progress.measured = True
        if evaluates or measures_layers:
            self._read_clock()
        if measures_layers:
            self._add_layers()
        if evaluates:
            rows = self._add_metrics()
            self.report(progress.step, rows)
            self.training.retire(rows)

    def save(self) -> None:
        """Write a checkpoint."""
        self._read_clock()
        with self.training.paused():
            self.sync_rows()  # before the checkpoint that counts them
            self.training.save(self.run)

    def sync_rows(self) -> None:
        """Put the rows safely on disk, and note their number for the checkpoint."""
        for rows in filter(None, (self.metrics, self.layers)):
            with naming(rows.path):
                sync(rows.path)
            self.training.progress.rows[rows.path.name] = rows.num_rows

    def _read_clock(self) -> None:
        self.training.machine.finish()
        self.training.progress.seconds = time.perf_counter() - self._began

    def _add_metrics(self) -> list[dict]:
        rows = self.training.evaluate()
        self.metrics.add(rows)
        self.write(rows)
        return rows

    def _add_layers(self) -> None:
        if self.layers is not None:
            with self.training.paused():
                self.layers.add(dynamics(self.training))


class StepsFile:
    """A CSV file of a run that grows line by line; each row begins with its step. Opening it for a resumed run drops
    the rows after the checkpoint's step, `upto`.

    counted: number of rows that the checkpoint counts, by the file's name; ConfigError if the file has another number.
    """

    def __init__(self, path: Path, columns: list[str], upto: float, counted: dict[str, int]) -> None:
        self.path, self.columns = path, columns
        kept, lines = [], ""
        if self.path.exists():
            with bounded(self.path, LARGEST_TABLE).open(newline="") as old:
                # a kill can leave half a line, but only after the checkpoint; whole lines have all the columns
                try:
                    whole = [row for row in csv.DictReader(old) if None not in row.values()]
                    kept = [row for row in whole if int(row["step"]) <= upto]
                    lines = self._lines(kept)
                except (ValueError, KeyError, csv.Error) as error:
                    reason = f"{type(error).__name__}: {str(error)[:100]}"
                    raise ConfigError(
                        f"{path}: not readable as a table of steps ({reason}); train the run again in another folder"
                    ) from None
        self.num_rows = len(kept)
        if self.num_rows != counted.get(path.name, self.num_rows):
            raise ConfigError(
                f"{path}: has {self.num_rows} rows up to step {upto}, but the checkpoint there counts "
                f"{counted[path.name]}; train the run again in another folder"
            )
        # columns that an older version did not measure stay empty
        write_text(self.path, ",".join(columns) + "\n" + lines)

    def _lines(self, rows: list[dict]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def add(self, rows: list[dict]) -> None:
        """Append rows and hand them to the operating system, so that a killed process does not lose them."""
        append(self.path, self._lines(rows))
        self.num_rows += len(rows)
