"""The tables and weights that a command's process leaves, and what differs between two."""

import signal
from pathlib import Path

import pandas as pd
from command_line import Result
from forked import Process

from rankbench.runs.run import Run

CLOCKS = ["seconds", "tokens_per_second", "train_seconds"]  # columns that differ from one run to the next
KILLED = -signal.SIGKILL


def ended_as(process: Process) -> Result:
    """How the process of a command ends, when it has."""
    return Result(process.wait(), "", process.errors.read_text(errors="replace"))


def results(folder: Path) -> dict[str, object]:
    """All tables (without clocks), weights and statuses in a folder, by their path in it."""
    left: dict[str, object] = {}
    for path in sorted(folder.rglob("*.csv")):
        text = path.read_text()
        table = pd.read_csv(path) if text.strip() else pd.DataFrame()
        left[str(path.relative_to(folder))] = table.drop(columns=CLOCKS, errors="ignore").to_csv()
    for path in folder.rglob("summary.json"):
        run = Run(path.parent)
        left[str(path.relative_to(folder))] = run.status
        if (path.parent / "checkpoint.safetensors").exists():
            weights = run.weights()
            left[f"{path.relative_to(folder)} weights"] = {name: x.numpy().tobytes() for name, x in weights.items()}
    parts = [path for path in folder.rglob(".*") if path.name.endswith(".part") or path.name.startswith(".tmp")]
    return left | {f"{path.relative_to(folder)} left behind": True for path in parts}


def differences(ours: dict[str, object], wanted: dict[str, object]) -> str | None:
    """What differs between two folders' results, in words; None if nothing does."""
    names = [name for name in sorted(ours.keys() | wanted.keys()) if ours.get(name) != wanted.get(name)]
    kinds = {name: "missing" if name not in ours else "too many" if name not in wanted else "differs" for name in names}
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items()) or None
