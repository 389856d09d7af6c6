"""The folder of a watch: what it was begun with, its tables, and how far they go."""

import hashlib
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from torch import nn

from rankbench.analyses import Subject
from rankbench.config.keys import ConfigError
from rankbench.runs.files import write_json, write_text
from rankbench.runs.machine import Machine
from rankbench.runs.records import differences, read_yaml
from rankbench.runs.run import OBSERVED, Run
from rankbench.runs.tables import read_table
from rankbench.training.journal import StepsFile

STEPS = OBSERVED[3]


def config_of(subject: Subject, model: nn.Module, every: int) -> dict[str, Any]:
    """What is watched. Tables of two configs that differ in more than `every` do not belong in one folder."""
    who, digest = subject.who, hashlib.sha256()
    for x in subject.example.tensors:
        digest.update(f"{tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return {
        "task": {"name": who["task"]},
        "model": {"name": who["model"], "parameters": sum(weight.numel() for weight in model.parameters())},
        "seed": who["seed"],
        "observe": {"every": every, "sequences": subject.example.num_sequences, "inputs": digest.hexdigest()[:16]},
    }


def check_folder(folder: Path, config: dict[str, Any]) -> None:
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


def begin(folder: Path, config: dict[str, Any], device: torch.device) -> None:
    """Write what is watched, and, in a new folder, on which machine."""
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    if not (folder / "environment.json").exists():
        machine = Machine(device, torch.get_default_dtype(), "as trained", torch.get_num_threads())
        write_json(folder / "environment.json", machine.record())


def identity(path: Path) -> tuple[int, int] | None:
    """What distinguishes a file from another one that later has its name; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def observed_steps(folder: Path) -> tuple[list[int], int]:
    """The steps at which everything was measured, and the number of steps that the training made.

    The summary has that number, unless the process was killed: then a look before it is missing or cut off, and the
    training is taken up at the last whole one.
    """
    path = folder / f"{STEPS}.csv"
    table = read_table(path, grows=True) if path.exists() else pd.DataFrame(columns=["step", "every"])
    if table.empty:
        return [], 0
    last, every = table.step.max(), table.every.iloc[-1]
    made = max((row.get("steps") or 0 for row in Run(folder).summary().get("seeds", ())), default=0)
    return table.step.tolist(), int(made if last < made < (last // every + 1) * every else last)


@dataclass
class Table:
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
