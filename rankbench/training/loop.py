"""Training a run: one visible loop over steps, the files that it writes, and how it stops and resumes."""

import csv
import io
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rankbench.config import TrainConfig
from rankbench.keys import ConfigError
from rankbench.progress import bar
from rankbench.runs.files import (
    LARGEST_TABLE,
    WriteError,
    append,
    bounded,
    naming,
    sync,
    write_json,
    write_text,
)
from rankbench.runs.machine import Machine, explaining_memory
from rankbench.runs.run import FORMAT, Run
from rankbench.tasks import Task, build_task
from rankbench.training.compiling import is_compiled
from rankbench.training.seeds_side_by_side import DYNAMICS, METRICS, NOT_A_STATE, Training
from rankbench.training.writers import writing

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 5  # between lines of the log where there is no progress bar


class Interrupted(Exception):
    """A signal asked training to stop; a checkpoint has been written."""


def train(cfg: TrainConfig, run: Run, command: list[str] | None = None) -> dict:
    """Train every seed of `cfg` in `run`'s folder, or continue the run there; returns the contents of summary.json.

    command: the command line for the run's record; None for that of this process.

    On a CPU a run that is stopped at any moment and continued ends bit for bit with the metrics (except wall-clock
    columns) and weights of an uninterrupted run. So does a finished one that is given more steps, if its learning rates
    do not depend on their number. Raises ConfigError if the folder holds a run of another config.
    """
    machine = Machine.prepare(cfg)
    with run.locked(), explaining_memory(machine):
        return _train(cfg, run, machine, command)


def _train(cfg: TrainConfig, run: Run, machine: Machine, command: list[str] | None) -> dict:
    seeds = list(range(cfg.seed, cfg.seed + cfg.replicas))
    if run.status in ("finished", "diverged") and not run.is_lengthened(cfg):
        return _trained_already(cfg, run, seeds)
    task = build_task(cfg.task)
    environment = machine.record(command) | {"compiled": is_compiled(cfg, task, machine)}
    run.check_begun(cfg, environment)
    if run.status in ("finished", "diverged"):
        log.info("%s is lengthened; what it was is in %s", run.folder, run.set_aside())
    run.begin(cfg, environment)
    training = _opened(cfg, task, run, machine, seeds)
    resumed = training.saved_step is not None
    # the rows of a step that is still to be measured come again
    upto = training.progress.step - (not training.progress.measured) if resumed else -1
    counted = training.progress.rows
    metrics = StepsFile(run.folder / "metrics.csv", METRICS, upto, counted)
    watched = StepsFile(run.folder / "layers.csv", DYNAMICS, upto, counted) if cfg.trainer.dynamics_every else None

    def sync_rows() -> None:
        for rows in (metrics, watched):
            if rows is not None:
                with naming(rows.path):
                    sync(rows.path)
                training.progress.rows[rows.path.name] = rows.num_rows

    num_steps, trainer = training.num_steps, cfg.trainer
    with (
        writing(cfg, run, upto) as write,
        recording_failure(run, training),
        stopping_on_signals() as asked_to_stop,
        progress_bar(num_steps, training.progress.step) as report,
    ):
        began, before = time.perf_counter(), training.progress.seconds

        def read_clock() -> None:
            machine.finish()
            training.progress.seconds = before + time.perf_counter() - began

        def log_rows(rows: list[dict]) -> None:
            metrics.add(rows)
            write(rows)

        def measure() -> None:
            step, last = training.progress.step, training.progress.step == num_steps
            evaluates = step % trainer.eval_every == 0 or last
            watches = watched is not None and (step % trainer.dynamics_every == 0 or last)
            training.progress.measured = True
            if evaluates or watches:
                read_clock()
            if watches:
                with training.paused():
                    watched.add(training.dynamics())
            if evaluates:
                rows = training.evaluate()
                log_rows(rows)
                report(step, rows)
                training.retire(rows)

        def save() -> None:
            read_clock()
            with training.paused():
                sync_rows()  # before the checkpoint that counts them
                training.save(run)

        if not resumed:
            log_rows(training.evaluate())
            if watched is not None:
                with training.paused():
                    watched.add(training.dynamics())
        if not training.progress.measured:
            measure()
        while training.progress.training and training.progress.step < num_steps:
            training.update()
            step = training.progress.step
            if step == num_steps:  # a longer training goes on from here, and may not measure at this step
                training.progress.measured = False
                save()
            measure()
            if step < num_steps and (asked_to_stop or step % trainer.checkpoint_every == 0):
                save()
            if asked_to_stop:
                raise Interrupted(f"stopped at step {step} of {num_steps}")
        if training.saved_step != training.progress.step:  # every seed has left, or there was no step
            save()
        training.retire([], last=True)
        sync_rows()
        run.save_weights(training.weights())
        summary = training.summary("diverged" if set(training.progress.status) == {"diverged"} else "finished")
        summary["files"] = run.checksums(("metrics.csv", "layers.csv", "checkpoint.safetensors"))
        write_json(run.folder / "summary.json", summary)
    if not trainer.keep_state:
        run.drop_state()
    return summary


def _trained_already(cfg: TrainConfig, run: Run, seeds: list[int]) -> dict:
    """The summary of a run that has ended."""
    run.begin(cfg, {})  # refuses another config's folder
    if not cfg.trainer.keep_state:  # it is no longer wanted, or the run was killed just before it was dropped
        run.drop_state()
    log.info("%s is trained already", run.folder)
    summary = run.summary()
    if [row["seed"] for row in summary["seeds"] if row["status"] == "diverged" or "test_loss" in row] != seeds:
        raise ConfigError(f"{run.folder / 'summary.json'}: not the summary of seeds {seeds}; train the run again")
    return summary


def _opened(cfg: TrainConfig, task: Task, run: Run, machine: Machine, seeds: list[int]) -> Training:
    """The training of the run's seeds, at the run's checkpoint if it has one."""
    try:
        training = Training(cfg, task, machine, seeds, run.is_compiled)
    except (MemoryError, RuntimeError):  # its sizes
        rows = [{"seed": seed, "status": "training", "steps": 0} for seed in seeds]
        write_json(run.folder / "summary.json", {"format": FORMAT, "status": "failed", "seeds": rows})
        raise
    if (state := run.state()) is not None:
        try:
            training.restore(*state)
        except NOT_A_STATE as error:
            raise ConfigError(
                f"{run.folder}/training_state.safetensors: not a state of this training ({type(error).__name__}: "
                f"{str(error)[:100]}); remove it to train the run from the beginning"
            ) from None
        log.info("continuing %s at step %d", run.folder, training.progress.step)
    return training


class StepsFile:
    """A CSV file of a run that grows line by line; each row begins with its step. Opening it for a resumed run drops
    the rows after the checkpoint's step, `upto`.

    counted: number of rows that the checkpoint counts, by the file's name; ConfigError if the file has another number.
    """

    def __init__(self, path: Path, columns: list[str], upto: int, counted: dict[str, int]) -> None:
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


@contextmanager
def recording_failure(run: Run, training: "Training") -> Iterator[None]:
    """Write `running` to summary.json, and `failed` if an error (no signal and no full disk) ends training."""
    write_json(run.folder / "summary.json", training.summary("running"))
    try:
        yield
    except (Interrupted, KeyboardInterrupt):
        raise
    except WriteError as error:
        if not run.folder.is_dir():
            raise ConfigError(
                f"out={run.folder}: the folder vanished during training, before step {training.progress.step} could be "
                "recorded; nothing is kept; the same command begins again"
            ) from None
        saved = training.saved_step
        kept = "it has no checkpoint yet" if saved is None else f"its checkpoint of step {saved} is kept"
        raise WriteError(f"{error}; the run stopped at step {training.progress.step}, {kept}") from None
    except BaseException:
        write_json(run.folder / "summary.json", training.summary("failed"))
        raise


@contextmanager
def stopping_on_signals() -> Iterator[list[int]]:
    """Yield a list that is filled when SIGINT, SIGTERM or SIGHUP arrives, so that the loop can stop between two steps.
    A SIGINT after that ends training at once. SIGHUP stays ignored under nohup."""
    received: list[int] = []
    kinds = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        kinds.append(signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def stop(number: int, _: object) -> None:
        received.append(number)
        # the others may come twice: a closed terminal and its shell both send SIGHUP
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    if threading.current_thread() is not threading.main_thread():  # our caller handles signals there
        yield received
        return
    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@contextmanager
def progress_bar(num_steps: int, step: int) -> Iterator[Callable[[int, list[dict]], None]]:
    """Yield a function that reports progress, in a bar or, where there is none, in a log line now and then."""
    progress = bar(total=num_steps, initial=step, unit="step")
    last_line = time.monotonic()

    def report(step: int, rows: list[dict]) -> None:
        nonlocal last_line
        test = [row for row in rows if row["split"] == "test"]
        accuracy, loss = (sum(row[key] for row in test) / len(test) for key in ("accuracy", "loss"))
        numbers = f"test accuracy {accuracy:.3f}, loss {loss:.3f} nats"
        if math.isnan(accuracy):  # a regression
            numbers = f"test loss {loss:.3g}"
        numbers += f" (mean of {len(test)} seeds)"
        progress.set_description(numbers, refresh=False)
        progress.update(step - progress.n)
        if progress.disable and (time.monotonic() - last_line > SECONDS_BETWEEN_LINES or step == num_steps):
            log.info("step %d/%d: %s", step, num_steps, numbers)
            last_line = time.monotonic()

    with progress:
        yield report
