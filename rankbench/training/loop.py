"""Training a run: one visible loop over steps, and how it stops and resumes."""

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rankbench.config.keys import ConfigError
from rankbench.config.schema import TrainConfig
from rankbench.progress import bar
from rankbench.runs.files import WriteError, write_json
from rankbench.runs.machine import Machine, explaining_memory
from rankbench.runs.run import Run
from rankbench.runs.summary import FORMAT
from rankbench.runs.tables import mean_of_seeds
from rankbench.tasks import Task, build_task
from rankbench.tasks.task import Corpus
from rankbench.training.compiling import choose_step
from rankbench.training.journal import Journal
from rankbench.training.library import NoLibraryError
from rankbench.training.seeds_side_by_side import Training
from rankbench.training.state import NOT_A_STATE
from rankbench.training.writers import writing

log = logging.getLogger(__name__)

ASKED = {"true": ("torch.compile", "compiled graph"), "false": ("plain",)}  # kinds of step by trainer.compile
SECONDS_BETWEEN_LINES = 5  # between lines of the log where there is no progress bar


class Interrupted(Exception):
    """A signal asked training to stop; a checkpoint has been written."""


def train(cfg: TrainConfig, run: Run, command: list[str] | None = None) -> dict:
    """Train every seed of `cfg` in `run`'s folder, or continue the run there; returns the contents of summary.json.

    command: the command line for the run's record; None for this process's own.

    On a CPU, a run that is stopped at any moment and continued ends with the same metrics (except wall-clock columns)
    and weights, bit for bit, as an uninterrupted run. So does a finished run that is given more steps, if its learning
    rates do not depend on the number of steps. Raises ConfigError if the folder holds a run of another config.
    """
    machine = Machine.prepare(cfg)
    machine.log_threads(cfg.threads)
    with run.locked(), explaining_memory(machine):
        return _train(cfg, run, machine, command)


def check_demands(cfg: TrainConfig, task: Task) -> None:
    """Raise ConfigError for an objective, a target accuracy or epochs that this task does not have."""
    allowed = ["test_loss", "train_seconds"]
    if isinstance(task, Corpus):
        allowed = ["valid_loss", *allowed]
    elif task.target_kind == "classes":
        allowed = ["test_accuracy", *allowed]
    if cfg.objective is not None and cfg.objective not in allowed:
        raise ConfigError(
            f"objective={cfg.objective}: task.name={task.name} does not measure it; allowed are {', '.join(allowed)}"
        )
    if cfg.trainer.target_accuracy is not None and task.target_kind == "numbers":
        raise ConfigError(
            f"trainer.target_accuracy={cfg.trainer.target_accuracy}: task.name={task.name} is a regression, "
            "which has no accuracy; use null"
        )
    if cfg.trainer.epochs is not None and task.train_size is None and not isinstance(task, Corpus):
        raise ConfigError(
            f"trainer.epochs={cfg.trainer.epochs:g}: fresh sequences at every step, as with task.train_size=null, have "
            "no epochs; give trainer.steps and trainer.epochs=null, or a task.train_size"
        )


def _train(cfg: TrainConfig, run: Run, machine: Machine, command: list[str] | None) -> dict:
    seeds = list(range(cfg.seed, cfg.seed + cfg.replicas))
    if run.status in ("finished", "diverged") and not run.is_lengthened(cfg):
        return _trained_already(cfg, run, seeds)
    task = build_task(cfg.task)
    environment = machine.record(command)
    run.check_begun(cfg, environment["device"])
    environment["step"] = run.step or choose_step(cfg, task, machine)
    step, asked = environment["step"], ASKED.get(cfg.trainer.compile)  # auto takes any
    if asked is not None and step not in asked:
        log.info("%s keeps the kind of step that it began with, %s, not %s", run.folder, step, asked[0])
    if run.status in ("finished", "diverged"):
        log.info("extending %s; the finished run is kept in %s", run.folder, run.set_aside())
    run.begin(cfg, environment)
    training = _opened(cfg, task, run, machine, seeds)
    if changed := run.record_continuation(environment, training.progress.step):
        log.info(
            "the run continues with other code or on another machine (%s); continued.json records from which step on",
            ", ".join(changed),
        )
    journal = Journal(training, run)
    with (
        stopping_on_signals() as asked_to_stop,
        writing(cfg, run, journal.upto) as journal.write,
        recording_failure(run, training),
        progress_bar(training.num_steps, training.progress.step) as journal.report,
    ):
        journal.start_clock()
        _steps(training, journal, asked_to_stop)
        training.retire([], last=True)
        journal.sync_rows()
        run.save_weights(training.weights())
        summary = training.summary("diverged" if set(training.progress.status) == {"diverged"} else "finished")
        summary["files"] = run.checksums(("metrics.csv", "layers.csv", "checkpoint.safetensors"))
        write_json(run.folder / "summary.json", summary)
    if not cfg.trainer.keep_state:
        run.drop_state()
    return summary


def _steps(training: Training, journal: Journal, asked_to_stop: list[int]) -> None:
    """Train to the last step, or until no seed is left. When asked to stop, save a checkpoint and raise Interrupted."""
    progress, num_steps = training.progress, training.num_steps
    if training.saved_step is None:
        journal.begin()
    elif not progress.measured:
        journal.measure()
    while progress.training and progress.step < num_steps:
        training.update()
        step = progress.step
        if step == num_steps:  # a longer training continues from here and may not measure this step
            progress.measured = False
            journal.save()
        journal.measure()
        if step < num_steps and (asked_to_stop or step % training.cfg.trainer.checkpoint_every == 0):
            journal.save()
        if asked_to_stop:
            raise Interrupted(f"stopped at step {step} of {num_steps}")
    if training.saved_step != progress.step:  # every seed has left, or there was no step
        journal.save()


def _trained_already(cfg: TrainConfig, run: Run, seeds: list[int]) -> dict:
    """The summary of a run that has ended, whose weights are there."""
    run.begin(cfg, {})  # refuses another config's folder
    summary = run.summary()
    if [row["seed"] for row in summary["seeds"] if row["status"] == "diverged" or "test_loss" in row] != seeds:
        raise ConfigError(f"{run.folder / 'summary.json'}: not the summary of seeds {seeds}; train the run again")
    run.restore_weights()
    log.info("%s is trained already", run.folder)
    if not cfg.trainer.keep_state:  # it was true before, or the run was killed just before this
        run.drop_state()
    return summary


def _opened(cfg: TrainConfig, task: Task, run: Run, machine: Machine, seeds: list[int]) -> Training:
    """The training of the run's seeds, at the run's checkpoint if it has one."""
    try:
        training = Training(cfg, task, machine, seeds, run.step)
    except NoLibraryError as error:
        raise ConfigError(
            f"{run.folder}: was begun with the fused step, which is not available here: {error}; continue it where it "
            "is, or train it again with trainer.compile=false and another folder, out=<folder>"
        ) from None
    except (MemoryError, RuntimeError):  # sizes too large for the memory
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


@contextmanager
def recording_failure(run: Run, training: Training) -> Iterator[None]:
    """Write `running` to summary.json, and `failed` if an error other than a signal or a full disk ends training."""
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
    A SIGINT after that ends training at once. SIGHUP stays ignored under nohup.

    In a job of submitit also SIGUSR2, with which Slurm warns before the job's time is up. Afterwards submitit's own
    handler gets it, which queues the job again and exits.
    """
    received: list[int] = []
    kinds = [signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR2] if "SUBMITIT_EXECUTOR" in os.environ else [])]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        kinds.append(signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def stop(number: int, _: object) -> None:
        received.append(number)
        # not the other signals, which may arrive twice: a closed terminal and its shell both send SIGHUP
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    if threading.current_thread() is not threading.main_thread():  # our caller, in the main thread, handles signals
        yield received
        return
    for kind in kinds:
        signal.signal(kind, stop)
    try:
        yield received
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
        if signal.SIGUSR2 in received:
            signal.raise_signal(signal.SIGUSR2)


@contextmanager
def progress_bar(num_steps: int, step: int) -> Iterator[Callable[[int, list[dict]], None]]:
    """Yield a function that reports progress in a bar or, without one, in occasional log lines."""
    progress = bar(total=num_steps, initial=step, unit="step")
    last_line = time.monotonic()

    def report(step: int, rows: list[dict]) -> None:
        nonlocal last_line
        test = [row for row in rows if row["split"] == "test"]
        accuracy, loss = (sum(row[key] for row in test) / len(test) for key in ("accuracy", "loss"))
        numbers = f"test accuracy {accuracy:.3f}, loss {loss:.3f} nats"
        if math.isnan(accuracy):  # a regression
            numbers = f"test loss {loss:.3g}"
        numbers += f" ({mean_of_seeds(len(test))})"
        progress.set_description(numbers, refresh=False)
        progress.update(step - progress.n)
        if progress.disable and (time.monotonic() - last_line > SECONDS_BETWEEN_LINES or step == num_steps):
            log.info("step %d/%d: %s", step, num_steps, numbers)
            last_line = time.monotonic()

    with progress:
        yield report
