"""summary.json of a run: how it ended, with the final numbers of each seed."""

import math
import sys
from pathlib import Path
from typing import Any

from rankbench.config.keys import ConfigError
from rankbench.runs.records import read_json

FORMAT = 1  # of a run's folder; a later rankbench that changes the format raises this number
STATUSES = ("finished", "diverged", "running", "failed")


def read_summary(path: Path) -> dict[str, Any]:
    """Contents of the file; empty if there is none. ConfigError if they are not a run's summary."""
    if not path.exists():
        return {}
    summary = read_json(path)
    if summary.get("format", FORMAT) != FORMAT:
        raise ConfigError(
            f"{path}: format={summary['format']!r}: this rankbench reads format={FORMAT}; use the one that wrote it"
        )
    seeds, files = summary.setdefault("seeds", []), summary.get("files", {})
    parts = {
        "status": summary.get("status") in STATUSES,
        "seeds": isinstance(seeds, list) and all(map(_is_a_seeds_row, seeds)),
        "step": isinstance(summary.get("step", 0), int),
        "files": isinstance(files, dict) and all(Path(name).name == name for name in files),
    }
    if wrong := [name for name, fits in parts.items() if not fits]:
        raise ConfigError(f"{path}: not a run's summary: {wrong[0]} is damaged; put back the file that was there")
    return summary


def objective_value(summary: dict[str, Any], objective: str) -> float:
    """Number that a search compares: the mean over seeds of the objective, or the run's `train_seconds`.

    A seed that diverged counts as the worst possible value, so the search continues and a setting gains nothing by
    losing its worst seeds. ConfigError if the task has no accuracy or no validation set.
    """
    seeds = summary["seeds"]
    diverged = any(seed["status"] == "diverged" for seed in seeds)
    if objective == "train_seconds":
        return math.inf if diverged else summary["seconds"]
    worst = 0.0 if objective == "test_accuracy" else math.inf
    values = [worst if seed["status"] == "diverged" else seed.get(objective) for seed in seeds]
    if None in values:
        raise ConfigError(f"objective={objective}: this task has none; allowed are test_loss, train_seconds")
    return sum(values) / len(values)


def _is_a_seeds_row(row: Any) -> bool:
    """Whether these are a seed, its status and its final numbers."""
    if not isinstance(row, dict) or not isinstance(row.get("status"), str) or not isinstance(row.get("seed"), int):
        return False
    numbers = [value for name, value in row.items() if name != "status" and value is not None]
    return all(isinstance(x, float) or (isinstance(x, int) and abs(x) < sys.maxsize) for x in numbers)
