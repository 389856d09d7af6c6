"""A run: one folder with everything that analyze, report and resume need. Reading it never executes code from it."""

import dataclasses
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import yaml

from rankbench.config.arguments import typed_arguments
from rankbench.config.compatibility import check
from rankbench.config.keys import ConfigError, as_typed, closest, typed_config
from rankbench.config.plugins import require
from rankbench.config.schema import BaseConfig, TrainConfig
from rankbench.runs.files import OUTPUTS, by_time, naming, regular, sync, write_json, write_text
from rankbench.runs.records import checksum, differences, read_json, read_yaml
from rankbench.runs.summary import read_summary
from rankbench.runs.tables import RUN_COLUMNS, column_help, read_table

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

OBSERVED = ("observed_states", "observed_attention", "observed_weights", "observed_steps")
WEIGHTS = "checkpoint.safetensors"
PUT_BACK = "put back the file that was there, or train the run again in another folder"
LONGEST_HEADER = 1 << 16  # bytes of a table's first line
# Kinds of training step. plain: torch's operations one by one; torch.compile: a compiled forward pass; fused: one call
# of compiled C++ for the whole step
STEPS = ("plain", "torch.compile", "fused", "graph", "compiled graph")
GROWING = ("metrics", "layers", *OBSERVED)  # tables that are written line by line during a training
# columns of these without numbers
WORDS = (*RUN_COLUMNS[:-1], *("split", "sublayer", "view", "submodule", "kind", "parameter", "dtype"))
# Keys, and groups of them, that may differ between the command that began a run and the one that continues it: they
# change none of its numbers
FREE_KEYS: tuple[str, ...] = ("out", "plugins", "beyond_memory", "analysis", "claims", "published", "figures")
FREE_KEYS += ("objective", "trainer.keep_state", "trainer.writers", "trainer.compile")  # a run keeps its recorded step
LATER_KEYS = ("objective", "plugins", "beyond_memory", "figures")  # older runs lack them; what they did is the default
LENGTHS = ("trainer.steps", "trainer.epochs")  # a run can be given more of them
TO_THE_END = ("linear", "cosine")  # schedules whose rates depend on the number of steps
# parts of environment.json on which rounding can depend; source distinguishes uncommitted changes of one commit
COMPUTED_BY = ("git", "source", "plugins", "packages", "python", "platform", "gpu", "threads")


@dataclass(frozen=True)
class Run:
    """The folder of one training run with all its seeds. The run's name is the folder's name."""

    folder: Path

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike):
            raise ConfigError(f"Run: folder is of type {type(self.folder).__name__}; give a text or a path")
        object.__setattr__(self, "folder", Path(self.folder))

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def status(self) -> str:
        """finished, diverged (every seed), running (or killed), failed, or absent."""
        return self.summary().get("status", "absent")

    def summary(self) -> dict[str, Any]:
        """Contents of summary.json; empty if there is none. ConfigError if they are not a run's summary."""
        return read_summary(self.folder / "summary.json")

    def record_files(self, names: Iterable[str]) -> None:
        """Put the checksums of these files of the folder into summary.json."""
        summary = self.summary()
        summary["files"] = summary.get("files", {}) | self.checksums(names)
        write_json(self.folder / "summary.json", summary)

    def checksums(self, names: Iterable[str]) -> dict[str, str]:
        """Checksums of these files, as far as they are in the folder."""
        return {name: digest for name in names if (digest := checksum(self.folder / name)) is not None}

    def changed_files(self) -> list[str]:
        """The tables and weights that are missing or whose checksums are not those in summary.json."""
        return [name for name in self.summary().get("files", {}) if self.is_changed(name)]

    def is_changed(self, name: str) -> bool:
        """Whether this file is missing, or its checksum is not that in summary.json."""
        path, recorded = self.folder / name, self.summary().get("files", {})
        return checksum(path) != recorded[name] if name in recorded else not path.exists()

    def check_seeds(self) -> None:
        """Raise ConfigError if config.yaml and summary.json have other seeds."""
        first, recorded = self.config.seed, [row["seed"] for row in self.summary().get("seeds", ())]
        if recorded not in ([], seeds := list(range(first, first + self.config.replicas))):
            raise ConfigError(
                f"run={self.folder}: config.yaml has the seeds {seeds}, summary.json has {recorded}; put back the file "
                "that was there"
            )

    @typed_arguments()
    def table(self, name: str) -> pd.DataFrame:
        """Read a table from the run's folder: that of an analysis, as in table("paths"), or `verdicts`, or `layers`.

        Its `attrs["analysis"]` is the name, `attrs["columns"]` what its columns mean. ConfigError if there is no such
        table.
        """
        path = regular(self.folder / f"{name}.csv")
        if not path.exists():
            names = sorted(table.stem for table in self.folder.glob("*.csv"))
            next_step = {"metrics": PUT_BACK, "layers": "trainer.dynamics_every=<steps> has a training write it"}
            raise ConfigError(
                f"{path}: no such table{closest(name, names)}; there are {', '.join(names) or 'none'}; "
                + next_step.get(name, 'rankbench.analyze(run, "paths") measures what the run did not')
            )
        table = read_table(path, grows=name in GROWING)
        if name in GROWING:
            check_growing(table, path)
        table.attrs |= {"analysis": name, "columns": column_help(name, table)}
        return table

    @property
    def metrics(self) -> pd.DataFrame:
        """Metrics of training: a row for each evaluated step, seed and split, after columns run, task, model, seed."""
        rows, cfg = self.table("metrics"), self.config
        columns = [*RUN_COLUMNS, *rows.columns.drop("seed")]
        return rows.assign(run=self.name, task=cfg.task["name"], model=cfg.model.name)[columns]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other processes from training or analysing in it; a killed process keeps no lock."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with regular(self.folder / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"out={self.folder}: another process is writing there; wait for it, or give another folder"
                ) from None
            process = os.getpid()
            try:
                yield
            finally:
                if os.getpid() == process:  # explicitly, because forked processes hold it for as long as they live
                    fcntl.flock(lock, fcntl.LOCK_UN)

    @property
    def has_begun(self) -> bool:
        """Whether training has written a row or a checkpoint. A run that died before that may begin with other keys."""
        metrics = self.folder / "metrics.csv"
        if metrics.is_file():
            with metrics.open("rb") as rows:
                if rows.readline(LONGEST_HEADER) and rows.read(1):
                    return True
        return any((self.folder / name).exists() for name in (WEIGHTS, "training_state.safetensors"))

    def _changes(self, cfg: TrainConfig) -> dict[str, tuple[Any, Any]]:
        """By key, the values in the run's folder and in `cfg`, where they differ in a way that changes the numbers."""
        if not (path := self.folder / "config.yaml").exists() and (self.folder / WEIGHTS).exists():
            raise ConfigError(f"{path}: missing, though the run has begun; put it back, or give another folder")
        if not path.exists() or not self.has_begun:  # a sweep's folder has neither config nor weights
            return {}
        changed = sorted(differences(dataclasses.asdict(self.config), dataclasses.asdict(cfg)).items())
        return {key: values for key, values in changed if not {key, key.partition(".")[0]} & set(FREE_KEYS)}

    def is_lengthened(self, cfg: TrainConfig) -> bool:
        """Whether `cfg` is the config of the run in the folder, except for more steps or epochs."""
        changes = self._changes(cfg)
        more = [key in LENGTHS and None not in (was, now) and now > was for key, (was, now) in changes.items()]
        return more == [True]

    def check_same(self, cfg: TrainConfig) -> None:
        """Raise ConfigError if the folder holds a run of another config, naming the first key that differs, or a run
        that cannot be continued to the larger number of steps in `cfg`."""
        changes, other = self._changes(cfg), "give another folder with out=<folder>"
        is_lengthened = self.is_lengthened(cfg)
        for key, (was, now) in changes.items():
            begun = f"{key}={as_typed(now)}: the run in {self.folder} was begun with {key}={as_typed(was)}"
            if not is_lengthened:
                raise ConfigError(f"{begun}; give the same command to continue it, or another folder with out=<folder>")
            if (schedule := cfg.optimizer.schedule) in TO_THE_END:
                raise ConfigError(
                    f"{begun}, on which the learning rates of optimizer.schedule={schedule} depend; {other}"
                )
            ended = self.status in ("finished", "diverged")
            if ended and not (self.folder / "training_state.safetensors").exists():
                raise ConfigError(f"{begun} and kept no training state when it ended; {other} to train it again")

    def check_begun(self, cfg: TrainConfig, device: str | None) -> None:
        """Raise ConfigError if the folder holds a run of another config, or one that would be continued on another kind
        of device than it was begun on, which rounds differently. device: as in environment.json; None: on any."""
        self.check_same(cfg)
        path = self.folder / "environment.json"
        has_ended = self.status in ("finished", "diverged") and not self.is_lengthened(cfg)
        if device is None or has_ended or not self.has_begun or not path.exists():
            return
        began = read_json(path).get("device", device)
        began, device = (name.partition(":")[0] for name in (began, device))  # another GPU is the same kind
        if began != device:
            raise ConfigError(
                f"device={cfg.device}: {device} here, but the run in {self.folder} was begun on {began}, which rounds "
                "differently; continue it there, or give another folder with out=<folder>"
            )

    @property
    def step(self) -> str | None:
        """The kind of training step, from STEPS, that trainer.compile came to when the run began. It holds for the
        whole run. None if the run has not begun."""
        path = self.folder / "environment.json"
        if not path.exists():
            return None
        step = read_json(path).get("step")
        if step not in STEPS:
            raise ConfigError(f"{path}: step={step}: allowed are {', '.join(STEPS)}")
        return step

    def set_aside(self) -> Path:
        """Copy a finished run into a folder within its own, remove the tables of analyses, which would soon belong to
        other weights, and mark the run as running. Returns the copy's folder. Can be repeated after a kill."""
        summary, record = self.summary(), self.folder / "analyses.json"
        copy = self.folder / f"at_step_{summary.get('step', 0)}"
        part = copy.with_name(f".{copy.name}")
        if not copy.exists():
            with naming(copy):
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir()
                for path in self.folder.iterdir():
                    if path.is_file() and path.name[0] != "." and path.name != "training_state.safetensors":
                        sync(Path(shutil.copy2(path, part)))
                part.rename(copy)
                sync(self.folder)
        names = [*read_json(record), "verdicts", "statements"] if record.exists() else []
        for name in filter(str.isidentifier, names):
            for path in [*self.folder.glob(f"{name}.*"), *self.folder.glob(f"{name}_[0-9]*.*")]:
                path.unlink()
        record.unlink(missing_ok=True)
        write_json(self.folder / "summary.json", {**summary, "status": "running", "files": {}})
        return copy

    def begin(self, cfg: TrainConfig, environment: dict) -> None:
        """Make the folder a run of `cfg`; ConfigError if it holds a run of another config or device."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.check_begun(cfg, environment.get("device"))
        # partial files that a kill can leave: those of files.replacing, and those of safetensors within it
        for part in (*self.folder.glob(".*.part"), *self.folder.glob(".tmp??????")):
            part.unlink(missing_ok=True)
        write_text(self.folder / "config.yaml", config_text(cfg))
        if not (self.folder / "environment.json").exists() or not self.has_begun:
            write_json(self.folder / "environment.json", environment)

    def record_continuation(self, environment: dict, step: int) -> list[str]:
        """Record in continued.json that training continues after this step with other code, packages, threads or
        machine than before; nothing if they are the same. Entries of this or later steps are dropped: their numbers
        are not kept.

        environment: as in environment.json, which keeps what the run began with. Returns the parts of it that changed.
        """
        path = self.folder / "continued.json"
        recorded = read_json(path, list) if path.exists() else []
        if not all(isinstance(part, dict) and isinstance(part.get("step"), int) for part in recorded):
            raise ConfigError(f"{path}: an entry has no step; put back the file that was there, or remove it")
        parts = [part for part in recorded if part["step"] < step]
        before = (parts or [read_json(self.folder / "environment.json")])[-1]
        now = {key: environment.get(key) for key in COMPUTED_BY}
        changed = [key for key, value in now.items() if before.get(key, value) != value]  # older records lack some
        if changed:
            parts.append({"step": step, "started": environment.get("started"), **now})
        if parts != recorded:
            write_json(path, parts)
        return changed

    @property
    def config(self) -> TrainConfig:
        """The run's config, read from its folder and checked; ConfigError if it is missing or not valid.

        A key of the model, the optimizer or the trainer that is newer than the run has its default, which does what
        was done before there was a choice.
        """
        plain, path = self._plain_config(), self.folder / "config.yaml"
        if "observe" in plain:
            raise ConfigError(
                f"run={self.folder}: a training watched by rankbench.observe, whose network is not here; "
                f"`rankbench report runs={self.folder}` gathers it, rankbench.Run(folder).table reads its tables"
            )
        if "run" in plain:
            raise ConfigError(f"run={self.folder}: an analysis, of run={plain['run']}; give the folder of a training")
        trainer = plain.get("trainer")
        if isinstance(trainer, dict) and "tensorboard" in trainer:  # as it was before trainer.writers
            plain["trainer"] = {"writers": ["tensorboard"] if trainer.pop("tensorboard") else []} | trainer
        model = plain.get("model")
        if isinstance(model, dict) and model.get("contraction_when") == "always":  # the only way there is now
            del model["contraction_when"]
        required = (field.name for field in dataclasses.fields(TrainConfig) if field.name not in LATER_KEYS)
        if (missing := next((name for name in required if name not in plain), None)) is not None:
            raise ConfigError(f"{path}: not a run's config: it has no {missing}; put back the file that was there")
        try:
            cfg = typed_config(TrainConfig, plain)
            check(cfg)
        except ConfigError as error:
            if isinstance(named := plain.get("plugins"), list):
                require([str(name) for name in named], self.folder)
            raise ConfigError(f"{path}: {error}") from None
        return cfg

    def _plain_config(self) -> dict[str, Any]:
        path = self.folder / "config.yaml"
        try:
            return read_yaml(path)
        except (FileNotFoundError, NotADirectoryError):
            if inside := sorted(path.parent for path in self.folder.glob("[!.]*/config.yaml")):
                raise ConfigError(
                    f"run={self.folder}: a folder of {len(inside)} runs; give one of them, as in run={inside[0]}"
                ) from None
            raise ConfigError(
                f"run={self.folder}: no config.yaml there; give the folder of a run, or run=latest"
            ) from None

    # A checkpoint has two files: checkpoint.safetensors has the weights, for analyses; training_state.safetensors
    # has everything that resuming needs, weights included, so that a single move makes it valid. Reading and writing
    # them loads torch, which takes a second, so torch is imported below: listing runs does not need it.

    def save_weights(self, weights: dict[str, "Tensor"]) -> None:
        """Save the weights of all seeds, each tensor with a leading axis of seeds."""
        from rankbench.runs import checkpoints

        checkpoints.save(self.folder / WEIGHTS, weights, {})

    def weights(self) -> dict[str, "Tensor"]:
        """Load what `save_weights` saved; ConfigError if there is nothing, or if it changed since training ended."""
        from rankbench.runs import checkpoints

        path = self.folder / WEIGHTS
        if WEIGHTS in self.summary().get("files", {}) and self.is_changed(WEIGHTS):
            what = "changed since" if path.exists() else "missing, though"
            raise ConfigError(f"{path}: {what} the training ended; {PUT_BACK}")
        return checkpoints.weights(path)

    def save_state(self, tensors: dict[str, "Tensor"], facts: dict[str, Any]) -> None:
        """Save all that training needs to resume: tensors, and plain facts."""
        from rankbench.runs import checkpoints

        checkpoints.save_state(self.folder / "training_state.safetensors", tensors, facts)

    def restore_weights(self) -> None:
        """Write the weights of a run that has ended anew from its training state, where their file is missing or has
        changed; ConfigError if that does not give the same file."""
        if not self.is_changed(WEIGHTS):
            return
        if (state := self.state()) is not None:
            weights = {name.removeprefix("weights/"): x for name, x in state[0].items() if name.startswith("weights/")}
            self.save_weights(weights)
        if state is None or self.is_changed(WEIGHTS):
            raise ConfigError(f"{self.folder / WEIGHTS}: missing, or changed since the training ended; {PUT_BACK}")
        log.info("%s was missing or had changed; it is written again from the training state", self.folder / WEIGHTS)

    def state(self) -> tuple[dict[str, "Tensor"], dict[str, Any]] | None:
        """Load what `save_state` saved last, or None."""
        from rankbench.runs import checkpoints

        return checkpoints.state(self.folder / "training_state.safetensors")

    def drop_state(self) -> None:
        """Delete the training state, which a finished run does not need."""
        (self.folder / "training_state.safetensors").unlink(missing_ok=True)


def find_run(text: str) -> Run:
    """The run given by `run=`: a folder, or `latest` for the newest under outputs/."""
    if not text:
        raise ConfigError("run=: is empty; give the folder of a run, or run=latest")
    if text != "latest":
        return Run(Path(text))
    folders = [path.parent for path in (*OUTPUTS.glob("train/*/config.yaml"), *OUTPUTS.glob("train/*/*/config.yaml"))]
    folders = [folder for folder in folders if (folder / "checkpoint.safetensors").exists()]
    if not folders:
        raise ConfigError(
            f"run=latest: no run with a checkpoint under {OUTPUTS.resolve()}; train one with `rankbench train`"
        )
    # by the checkpoint's time, because out= may give a folder a name that is not a time stamp
    return Run(max(folders, key=lambda folder: by_time((folder / "checkpoint.safetensors").stat().st_mtime_ns)))


def config_text(cfg: BaseConfig) -> str:
    """A config as YAML that can be read back."""
    return yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False)


def check_growing(table: pd.DataFrame, path: Path, needed: Iterable[str] = ()) -> None:
    """Raise ConfigError for a table of training without its seeds, steps or columns that are needed, or with words
    among its numbers."""
    if lost := [name for name in ("seed", "step", *needed) if name not in table]:
        raise ConfigError(f"{path}: has no column {lost[0]}; {PUT_BACK}")
    numbers = table.columns.difference(WORDS, sort=False) if len(table) else ()
    if wrong := [name for name in numbers if not pd.api.types.is_numeric_dtype(table[name])]:
        raise ConfigError(f"{path}: {wrong[0]} has an entry that is no number; {PUT_BACK}")
