"""Watching a training that is not ours: rank, attention and spectral norms of a model that a user's own loop trains.

    with rankbench.observe(model, inputs, optimizer=optimizer, every=100, out="outputs/observe/mine"):
        ...  # the loop, as it is

The folder grows with the training:

    observed_states.csv      rank and residual of the first layer's input and of each layer's output
    observed_attention.csv   entropy, sinks, rank and largest logit of each head
    observed_weights.csv     spectral norm of each parameter with two axes
    observed_steps.csv       the steps at which all of that was measured, the seconds since the watch began or was
                             continued, and the seconds that the measurement took
    config.yaml environment.json summary.json, and figures of the tables

`rankbench report runs=<folder>` gathers one or several such folders.
"""

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from math import inf
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from rankbench import plots
from rankbench.analyses import ModuleSubject, attention, residual
from rankbench.analyses.modules import check_runs
from rankbench.keys import ConfigError, check_known, refuse_null_byte
from rankbench.measures.module_reading import read_module
from rankbench.measures.module_states import layers_of
from rankbench.measures.norms import at_least_float32, spectral_norm
from rankbench.measures.token_views import VIEWS, View
from rankbench.model.modules import Example, as_example
from rankbench.plots.observed import FIGURES
from rankbench.runs.files import OUTPUTS, write_json, write_text
from rankbench.runs.machine import Machine
from rankbench.runs.records import read_yaml
from rankbench.runs.run import FORMAT, OBSERVED, Run, differences
from rankbench.runs.tables import read_table
from rankbench.seeds import generator_for
from rankbench.training.journal import StepsFile

log = logging.getLogger(__name__)

STATES, ATTENTION, WEIGHTS, STEPS = OBSERVED
MEASURES = ("states", "attention", "weights")
COSTLY = 0.05  # share of the training's time above which the log warns of the cost


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

    Watching does not change the training: the model is measured in eval mode without gradients, and its modes, buffers,
    gradients and torch's random numbers are afterwards what they were before. It is measured in the dtype of its
    weights, outside of autocast.

    Raises ConfigError, before anything is written, for a model that cannot be watched. If its layers cannot be
    identified (rankbench.measures.module_states), no states are measured, and the log says so; likewise for attention.
    If a measurement fails at a later step, the log says so, and the training continues.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"observe: model is a {type(model).__name__}; give a torch.nn.Module")
    for key, value, least in (("every", every, 1), ("sequences", sequences, 1), ("step", step or 0, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"observe: {key}={value}: out of range; allowed are whole numbers from {least}")
    check_known("measures", measures, MEASURES)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"observe: optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer; "
            "leave it out and call watch.step() after each step"
        )
    refuse_null_byte("out", out)
    folder = Path(out) if out is not None else OUTPUTS / "observe" / f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"
    # measure the model itself, not the wrapper of torch.compile or DataParallel
    model = getattr(model, "_orig_mod", model)
    model = model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise ConfigError(f"observe: {type(model).__name__} is TorchScript, which cannot be followed; give the module")
    subject = _subject(model, inputs, sequences, folder.resolve().name, seed, name or type(model).__name__, task)
    return Observer(folder, subject, optimizer, every, tuple(measures), step)


class Observer:
    """The watch of a training, made by `observe`. It ends with its `with` block, or by `close`.

    folder: where the tables are. num_steps: number of steps that the training has made.
    """

    def __init__(
        self,
        folder: Path,
        subject: ModuleSubject,
        optimizer: Optimizer | None,
        every: int,
        measures: tuple,
        step: int | None,
    ) -> None:
        (self.model,) = subject.modules.values()
        self.folder, self.subject, self.every = folder, subject, every
        config = _config(subject, self.model, every)
        _check_folder(self.folder, config)
        with _undisturbed(self.model):
            check_runs(replace(subject, name=subject.model))
            self._parts = _parts(self.model, subject.example, measures, subject.seed)
        self._open = ExitStack()
        try:
            self._open.enter_context(Run(self.folder).locked())
            observed = _observed_steps(self.folder)
            self.num_steps = step if step is not None else max(observed, default=0)
            self._kept = max((past for past in observed if past <= self.num_steps), default=-1)
            self._files: dict[str, _Table] = {}
            if max(observed, default=-1) > self.num_steps:
                log.warning("%s: rows after step %d are dropped", self.folder, self.num_steps)
            _begin(self.folder, config, subject.example.tensors[0].device)
            self._write_summary("running")
            self._began, self._seconds_measuring, self._underway = time.perf_counter(), 0.0, False
            self._measured = self._kept  # the last step that was measured
            if not observed or self.num_steps % every == 0:
                self.measure()
            self._underway = True
            if optimizer is not None:
                hook = optimizer.register_step_post_hook(lambda *_: self.step())
                self._open.callback(hook.remove)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # the folder says that the training was interrupted
            self._open.close()

    def step(self) -> None:
        """Count a step of the training, and measure the model after each `every`-th. A watched optimiser calls this
        itself."""
        self.num_steps += 1
        if self.num_steps % self.every == 0:
            self.measure()

    def measure(self) -> None:
        """Measure the model now, after `num_steps` steps of its training, unless that has been done."""
        if self._measured == self.num_steps:
            return
        devices = {x.device for x in (*self.model.parameters(), *self.subject.example.tensors) if x.is_cuda}
        for device in devices:  # do not count work of the training that is still queued as our time
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        with _undisturbed(self.model):
            for name, rows_of in self._parts.items():
                try:
                    rows = list(rows_of())
                except Exception as error:
                    if not self._underway:
                        raise
                    # nan in a training that diverged, a full GPU: the training itself may continue all the same
                    reason = " ".join(f"{type(error).__name__}: {error}".split())
                    log.warning("%s: step %d has no rows in %s: %s", self.folder, self.num_steps, name, reason)
                else:
                    self._add(name, rows)
        now = time.perf_counter()
        self._seconds_measuring += now - began
        # last, because this row says that the step is complete
        seconds = {"seconds": now - self._began, "seconds_measuring": now - began}
        self._add(STEPS, [{"every": self.every, **seconds}])
        self._measured = self.num_steps

    def table(self, name: str) -> pd.DataFrame:
        """The table so far: states, attention, weights or steps."""
        check_known("table", [name], [table.removeprefix("observed_") for table in OBSERVED])
        return Run(self.folder).table(f"observed_{name}")

    def draw(self, kinds: tuple[str, ...] = (".png",)) -> list[Path]:
        """Draw the tables so far, in files of these kinds (.png, .pdf, .svg); returns the files."""
        files: list[Path] = []
        for name, figure in FIGURES.items():
            if (self.folder / f"{name}.csv").exists() and len(table := Run(self.folder).table(name)):
                (written,) = plots.save_pages([(figure(table), "")], self.folder / name, kinds).values()
                files += written
        return files

    def close(self) -> None:
        """End the watch: unhook from the optimiser, draw the figures, and log the cost."""
        seconds = time.perf_counter() - self._began
        self._open.close()
        self._write_summary("finished")
        share = self._seconds_measuring / max(seconds, 1e-9)
        enough = self.num_steps >= 2 * self.every  # the first measurement comes before any step
        log.log(
            logging.WARNING if share > COSTLY and enough else logging.INFO,
            "%s: measuring took %.1f of %.1f seconds (%.1f %%) with every=%d, sequences=%d",
            *(self.folder, self._seconds_measuring, seconds, 100 * share, self.every),
            self.subject.example.num_sequences,
        )
        self.draw()

    def _add(self, name: str, rows: list[dict[str, Any]]) -> None:
        table = self._files.setdefault(name, _Table(self.folder / f"{name}.csv", self._kept))
        table.add([{**self.subject.who, "step": self.num_steps, **row} for row in rows])

    def _write_summary(self, status: str) -> None:
        seeds = [{"seed": self.subject.seed, "status": status, "steps": self.num_steps}]
        write_json(self.folder / "summary.json", {"format": FORMAT, "status": status, "seeds": seeds})


@dataclass
class _Table:
    """A table that grows; its columns are those of the first rows, and any that later rows add."""

    path: Path
    upto: float  # the last step whose rows stay
    file: StepsFile | None = None

    def add(self, rows: list[dict[str, Any]]) -> None:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        if self.file is None or not set(columns) <= set(self.file.columns):
            if self.path.exists():
                with self.path.open("rb") as old:
                    columns = list(dict.fromkeys([*pd.read_csv(old, nrows=0).columns, *columns]))
            self.file = StepsFile(self.path, columns, self.upto, {})
            self.upto = inf  # by now all rows in the file are ours
        self.file.add(rows)


# --- what is measured ------------------------------------------------------------------------------------------------


def _subject(model: nn.Module, inputs: Any, sequences: int, run: str, seed: int, name: str, task: str) -> ModuleSubject:
    """The model with a copy of the first inputs on its device: the caller may reuse the tensors for other inputs."""
    example = as_example(inputs, "observe")[:sequences]
    weight = next((x for x in model.parameters() if x.is_floating_point()), None)
    if weight is None:
        raise ConfigError(f"observe: {type(model).__name__} has no parameters; give the model that you train")
    example = example.to(weight.device, weight.dtype)
    args, kwargs = tree_map_only(Tensor, lambda x: x.detach().clone(), (example.args, dict(example.kwargs)))
    example = replace(example, args=args, kwargs=kwargs)
    return ModuleSubject(run, task, name, seed, {"given": model}, example)


def _parts(
    model: nn.Module, example: Example, measures: tuple[str, ...], seed: int
) -> dict[str, Callable[[], Iterator[dict[str, Any]]]]:
    """For each table, the function that makes its rows. A table that cannot be measured is left out, and logged."""
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {}
    if "states" in measures:
        with _left_out(STATES):
            read = read_module(model, example)
            layers, views = layers_of(read), [View(name) for name in VIEWS]
            rows_of = partial(residual.rows_by_layer, read, layers, read.example, views=views)
            parts[STATES] = lambda: rows_of(generator=generator_for(seed, "rounding"))
    if "attention" in measures:
        with _left_out(ATTENTION):
            of_heads = read_module(model, example)
            parts[ATTENTION] = lambda: attention.rows_by_head(of_heads, of_heads.example)
    if "weights" in measures:
        parts[WEIGHTS] = lambda: rows_by_parameter(model)
    return parts


@contextmanager
def _left_out(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        log.warning("%s is left out: %s", name, error)


def rows_by_parameter(model: nn.Module) -> Iterator[dict[str, Any]]:
    """A row for each parameter with two axes: its name, its sizes, and its spectral norm by an exact SVD."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and weight.is_floating_point():
            rows, columns = weight.shape
            norm = spectral_norm(at_least_float32(weight.detach())).item() if weight.isfinite().all() else float("nan")
            yield {"parameter": name, "rows": rows, "columns": columns, "spectral_norm": norm}


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, no autocast, no compiled code; copies of the buffers in their place. Afterwards modes,
    buffers and torch's random numbers are what they were before."""
    # set one by one, because train() and eval() may be overridden to do more than that
    modes = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    copies = {id(buffer): buffer.clone() for buffer in model.buffers()}
    devices = {x.device.index for x in tensors if x.is_cuda}
    compiler = nullcontext()
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        compiler = torch.compiler.set_stance("force_eager")
    with (
        torch.random.fork_rng(sorted(devices)),
        torch.no_grad(),
        torch.autocast(tensors[0].device.type, enabled=False),
        compiler,
    ):
        try:
            for module, _, buffers in modes:
                module.training = False
                for name, buffer in buffers.items():
                    module._buffers[name] = buffer if buffer is None else copies[id(buffer)]
            yield
        finally:
            for module, training, buffers in modes:
                module.training = training
                module._buffers.clear()
                module._buffers.update(buffers)


# --- the folder ------------------------------------------------------------------------------------------------------


def _config(subject: ModuleSubject, model: nn.Module, every: int) -> dict[str, Any]:
    """What is watched. Tables of two configs that differ in more than `every` do not belong in one folder."""
    who, digest = subject.who, hashlib.sha256()
    for x in subject.example.tensors:
        digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.numel() and x.dim() else b"")
    return {
        "task": {"name": who["task"]},
        "model": {"name": who["model"], "parameters": sum(weight.numel() for weight in model.parameters())},
        "seed": who["seed"],
        "observe": {"every": every, "sequences": subject.example.num_sequences, "inputs": digest.hexdigest()[:16]},
    }


def _check_folder(folder: Path, config: dict[str, Any]) -> None:
    """ConfigError if the folder holds anything but a watch of the same model on the same inputs."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"out={folder}: a file; give a new folder")
    path = folder / "config.yaml"
    if not path.exists():
        if folder.exists() and any(file.name[0] != "." for file in folder.iterdir()):
            raise ConfigError(
                f"out={folder}: holds files of something other than a watched training; give a new folder"
            )
        return
    old = read_yaml(path)
    if "observe" not in old:
        raise ConfigError(f"out={folder}: a run of another kind; give a new folder")
    for name, (was, now) in differences(old, config).items():
        if name != "observe.every":
            raise ConfigError(
                f"out={folder}: was begun with {name}={was}, not {now}; "
                "give the same model and inputs to continue it, or a new folder"
            )


def _begin(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    if not (folder / "environment.json").exists():
        machine = Machine(device, torch.get_default_dtype(), "as trained", torch.get_num_threads())
        write_json(folder / "environment.json", machine.record())


def _observed_steps(folder: Path) -> list[int]:
    """The steps at which everything was measured."""
    path = folder / f"{STEPS}.csv"
    return read_table(path, grows=True).step.tolist() if path.exists() else []
