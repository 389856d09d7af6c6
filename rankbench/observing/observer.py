"""The observer: rank, attention and spectral norms of a model that a user's own loop trains, in a folder that grows:

    observed_states.csv      rank and residual of the first layer's input and of each layer's output
    observed_attention.csv   entropy, sinks, rank and largest logit of each head
    observed_weights.csv     spectral norm of each parameter with two axes
    observed_steps.csv       the steps at which all of that was measured, the seconds since the watch began or was
                             continued, and the seconds that the measurement took
    config.yaml environment.json summary.json, and figures of the tables

`rankbench report runs=<folder>` gathers one or several such folders.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.optim import Optimizer

from rankbench import plots
from rankbench.analyses import Subject
from rankbench.analysing.module_runs import told
from rankbench.config.arguments import typed_arguments
from rankbench.config.keys import ConfigError, check_known, in_one_line, refuse_null_byte
from rankbench.model.undisturbed import changed_by, hooked, undisturbed
from rankbench.observing.folder import STEPS, Table, begin, check_folder, config_of, identity, observed_steps
from rankbench.observing.measured import MEASURES, STATES, rows_by_table, subject_of
from rankbench.observing.triage import SIGNS, Stopped, Triage
from rankbench.plots.training import OBSERVED_FIGURES
from rankbench.runs.files import OUTPUTS, write_json
from rankbench.runs.run import OBSERVED, Run
from rankbench.runs.summary import FORMAT

log = logging.getLogger(__name__)

COSTLY = 0.05  # share of the training's time above which the log warns of the cost


@typed_arguments("model", "optimizer")
def observe(
    model: nn.Module,
    inputs: Any = None,
    optimizer: Optimizer | None = None,
    *,
    every: int = 100,
    out: str | PathLike[str] | None = None,
    sequences: int = 8,
    measures: Sequence[str] = MEASURES,
    step: int | None = None,
    seed: int = 0,
    name: str | None = None,
    task: str = "probe",
    hooks: bool = False,
    stop: Sequence[str] = (),
) -> "Observer":
    """Watch a model while you train it: after each `every`-th step it is measured on the same inputs.

        with rankbench.observe(model, inputs, optimizer=optimizer, every=100, out="outputs/observe/mine"):
            for batch in batches:
                ...
                optimizer.step()

    inputs: a tensor, a tuple of arguments, or a dict of arguments by name, as the model takes them; the first
    `sequences` sequences are kept. optimizer: its steps are counted; without one, call `watch.step()` after each step.
    out: a folder; by default a new one under outputs/observe. A folder of the same model and inputs is continued. step:
    number of steps that the training has already made; by default the number in the folder. Rows of later steps are
    dropped. measures: any of states, attention and weights. seed, name, task: columns of the tables, to tell trainings
    apart; the default name is the model's class. Where several processes train one model, let one of them watch it.

    Watching does not change the training: the model is measured in eval mode without gradients, and all that a pass can
    change is afterwards as before (rankbench.model.undisturbed). It is measured in the dtype of its weights, outside of
    autocast. hooks: whether measured passes call the model's forward hooks. By default they do not, so that a hook
    which counts or records sees the training alone.

    Nor does watching end the training. If a measurement or a write fails, as on a full disk, the log says so once, and
    the next look tries again. If the folder is removed, nothing more is written. A forked process writes nothing.

    The log says, and `watch.signs` holds, since when the last layer's rank has been lost: floor or half, explained in
    rankbench.observing.triage. stop: signs at which the step raises rankbench.Stopped, which the `with` block takes.

    Raises ConfigError, before anything is written, for a model that cannot be watched. If its layers cannot be
    identified (rankbench.measures.module_states), no states are measured, and the log says so; likewise for attention.
    """
    model = _unwrapped(model)
    _check_ranges({"every": (every, 1), "sequences": (sequences, 1), "step": (step or 0, 0), "seed": (seed, 0)})
    for key, text in {"out": out, "name": name, "task": task}.items():
        refuse_null_byte(key, text)
    check_known("measures", measures, MEASURES)
    check_known("stop", stop, list(SIGNS))
    if stop and "states" not in measures:
        raise ConfigError(f"observe: stop={list(stop)}: is read off the states; add states to measures")
    folder = OUTPUTS / "observe" / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}" if out is None else Path(out)
    subject = subject_of(model, inputs, sequences, folder.resolve().name, seed, name or type(model).__name__, task)
    optimizer = None if optimizer is None else _counted(optimizer, model)
    return Observer(folder.absolute(), subject, optimizer, every, tuple(measures), step, hooks, tuple(stop))


def _unwrapped(model: Any) -> nn.Module:
    """The module in the wrapper of torch.compile or DataParallel; ConfigError for what cannot be watched."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"observe: model is a {type(model).__name__}; give a torch.nn.Module")
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ConfigError(f"observe: {type(model).__name__} is TorchScript, which cannot be followed; give the module")
    return model


def _check_ranges(numbers: dict[str, tuple[int, int]]) -> None:
    """ConfigError for a number below the least that is allowed."""
    for key, (value, least) in numbers.items():
        if value < least:
            raise ConfigError(f"observe: {key}={value}: out of range; allowed are whole numbers from {least}")


def _counted(optimizer: Any, model: nn.Module) -> Optimizer:
    """The optimiser whose steps are counted: the inner one, where a library wraps it without hooks (accelerate)."""
    wrapped = optimizer
    while isinstance(wrapped, Optimizer) and not hasattr(wrapped, "_optimizer_step_post_hooks"):
        wrapped = vars(wrapped).get("optimizer")
    if isinstance(wrapped, Optimizer):
        trained = {id(parameter) for group in wrapped.param_groups for parameter in group["params"]}
        if trained.isdisjoint(map(id, model.parameters())):
            raise ConfigError(
                "observe: optimizer holds none of the model's parameters, so its steps do not train this model; give "
                "the one that does, or leave it out and call watch.step() after each step"
            )
        return wrapped
    lacks = "without hooks" if isinstance(optimizer, Optimizer) else "not a torch.optim.Optimizer"
    inside = [name for name, value in getattr(optimizer, "__dict__", {}).items() if isinstance(value, Optimizer)]
    raise ConfigError(
        f"observe: optimizer is a {type(optimizer).__name__}, {lacks}; "
        f"{f'give its .{inside[0]}, or ' if inside else ''}leave it out and call watch.step() after each step"
    )


class Observer:
    """The watch of a training, made by `observe`. It ends with its `with` block, or by `close`.

    folder: where the tables are. num_steps: number of steps that the training has made. signs: the step since which
    each sign of a lost rank is there, by its name.
    """

    def __init__(
        self,
        folder: Path,
        subject: Subject,
        optimizer: Optimizer | None,
        every: int,
        measures: tuple,
        step: int | None,
        hooks: bool,
        stop: tuple[str, ...],
    ) -> None:
        self._began = time.perf_counter()
        (self.model,) = subject.modules.values()
        self.folder, self.subject, self.every, self._stop = folder, subject, every, stop
        check_folder(self.folder, config := config_of(subject, self.model, every))
        with changed_by(self.model) as changed, undisturbed(self.model, hooks):
            for _ in range(2):  # a model may run once and never again
                with told(str(subject.who["model"]), f"does not run on inputs={subject.who['task']}"):
                    subject.example.run(self.model)
        self._undisturbed = partial(undisturbed, self.model, hooks, changed)
        with self._undisturbed():
            self._parts = rows_by_table(self.model, subject.example, measures, subject.seed)
        if stop and STATES not in self._parts:
            raise ConfigError(
                f"observe: stop={list(stop)}: this model's states are not measured, see above; leave it out"
            )
        if not hooks and (names := hooked(self.model)):
            log.warning(
                "observe: measured passes leave out the forward hooks of %s; if these change what the model returns, "
                "give hooks=True",
                ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
            )
        with ExitStack() as stack:
            stack.enter_context(Run(self.folder).locked())
            self._process, self._lock = os.getpid(), identity(self.folder / ".lock")
            observed, made = observed_steps(self.folder)
            self.num_steps = made if step is None else step
            # the last step whose rows stay, and the last that was measured
            self._kept = self._measured = max((past for past in observed if past <= self.num_steps), default=-1)
            self._files: dict[str, Table] = {}
            if max(observed, default=-1) > self.num_steps:
                log.warning("%s: rows after step %d are dropped", self.folder, self.num_steps)
            begin(self.folder, config, subject.example.tensors[0].device)
            self._triage = Triage()
            if (self.folder / f"{STATES}.csv").exists():
                looks = Run(self.folder).table(STATES)
                self._triage.look_again(looks[looks.step <= self._kept])
            self._write_summary("running")
            self._seconds_measuring, self._underway = 0.0, False
            self._failing: set[str] = set()  # what failed at the last look, which the log has said
            if not observed or self.num_steps % every == 0:
                self.measure()
            self._underway = True
            if optimizer is not None:
                hook = optimizer.register_step_post_hook(self._after_step)
                stack.callback(hook.remove)
            self._open = stack.pop_all()

    def __enter__(self) -> "Observer":
        return self

    @property
    def signs(self) -> dict[str, int]:
        return self._triage.since

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None or kind is Stopped:
            self.close()
        else:  # a report shows it as interrupted: still running, but without a process
            self._end("running")
        return kind is Stopped

    def step(self) -> None:
        """Count a step of the training, and measure the model after each `every`-th. A watched optimiser calls this
        itself."""
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.measure()
            if found := [sign for sign in self._stop if sign in self.signs]:
                raise Stopped(f"{found[0]} since step {self.signs[found[0]]}")

    def _after_step(self, *_: object) -> None:
        # a user may compile a function that calls the optimiser: we are not to be a part of it
        step = torch.compiler.disable(self.step) if "torch._dynamo" in sys.modules else self.step
        step()

    def measure(self) -> None:
        """Measure the model now, after `num_steps` steps of its training, unless that has been done."""
        if self._measured == self.num_steps or not self._may_write():
            return
        try:
            self._measure()
        except Exception as error:
            if not self._underway:
                raise
            self._warn("write", f"step {self.num_steps} is not written, and the next look tries again", error)
            # tables that have rows of this step drop them when they are opened again
            self._files, self._kept = {}, self._measured
        else:
            self._failing.discard("write")

    def _measure(self) -> None:
        devices = {x.device for x in (*self.model.parameters(), *self.subject.example.tensors) if x.is_cuda}
        for device in devices:  # do not count work of the training that is still queued as our time
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        measured: dict[str, list[dict[str, Any]]] = {}
        with self._undisturbed():
            for name, rows_of in self._parts.items():
                try:
                    measured[name] = list(rows_of())
                except Exception as error:
                    if not self._underway:
                        raise
                    # nan in a training that diverged, a full GPU: the training itself may continue all the same
                    self._warn(name, f"step {self.num_steps} has no rows in {name}", error)
                else:
                    self._failing.discard(name)
        for name, rows in measured.items():
            self._add(name, rows)
        for sentence in self._triage.look(self.num_steps, measured.get(STATES, [])):
            log.warning("%s: %s", self.folder, sentence)
        now = time.perf_counter()
        self._seconds_measuring += now - began
        # last, because this row says that the step is complete
        seconds = {"seconds": now - self._began, "seconds_measuring": now - began}
        self._add(STEPS, [{"every": self.every, **seconds}])
        self._measured = self.num_steps

    def _warn(self, what: str, message: str, error: Exception | None = None) -> None:
        """Log a failure, unless the same failed at the last look."""
        if what not in self._failing:
            reason = "" if error is None else f": {in_one_line(error)}"
            log.warning("%s: %s%s", self.folder, message, reason)
        self._failing.add(what)

    def _may_write(self) -> bool:
        """Whether the folder is still that of this watch: not in a forked process, and not after its end."""
        if os.getpid() != self._process:
            self._warn("process", "a forked process writes nothing")
        elif self._lock is None:
            self._warn("closed", "the watch has ended, and writes nothing")
        elif identity(self.folder / ".lock") != self._lock:
            self._warn("folder", "the folder was removed, so nothing more is written; the training goes on")
        else:
            return True
        return False

    @typed_arguments()
    def table(self, name: str) -> pd.DataFrame:
        """The table so far: states, attention, weights or steps."""
        check_known("table", [name], [table.removeprefix("observed_") for table in OBSERVED])
        return Run(self.folder).table(f"observed_{name}")

    def draw(self, kinds: tuple[str, ...] = (".png",)) -> list[Path]:
        """Draw the tables so far, in files of these kinds (.png, .pdf, .svg); returns the files."""
        files: list[Path] = []
        for name, figure in OBSERVED_FIGURES.items() if os.getpid() == self._process else ():
            if (self.folder / f"{name}.csv").exists() and len(table := Run(self.folder).table(name)):
                files += plots.save(figure(table), self.folder / name, kinds)
        return files

    def close(self) -> None:
        """End the watch: unhook from the optimiser, draw the figures, and log the cost."""
        if not self._end("finished"):
            return
        seconds = time.perf_counter() - self._began
        try:
            self.draw()
        except Exception as error:
            self._warn("figures", "the figures are not drawn", error)
        share = self._seconds_measuring / seconds
        enough = self.num_steps >= 2 * self.every  # the first measurement comes before any step
        log.log(
            logging.WARNING if share > COSTLY and enough else logging.INFO,
            "%s: measuring took %.1f of %.1f seconds (%.1f %%) with every=%d, sequences=%d",
            *(self.folder, self._seconds_measuring, seconds, 100 * share),
            *(self.every, self.subject.example.num_sequences),
        )

    def _end(self, status: str) -> bool:
        """Write how many steps were made, and let go of the optimiser and the folder; whether it can be written to."""
        if os.getpid() != self._process or self._lock is None:
            return False
        try:
            if may_write := self._may_write():
                self._write_summary(status)
        except OSError as error:
            self._warn("summary", "the number of steps is not written", error)
        self._open.close()
        self._lock = None
        return may_write

    def _add(self, name: str, rows: list[dict[str, Any]]) -> None:
        table = self._files.setdefault(name, Table(self.folder / f"{name}.csv", self._kept))
        table.add([{**self.subject.who, "step": self.num_steps, **row} for row in rows])

    def _write_summary(self, status: str) -> None:
        seeds = [{"seed": self.subject.seed, "status": status, "steps": self.num_steps}]
        write_json(self.folder / "summary.json", {"format": FORMAT, "status": status, "seeds": seeds})
