"""Seconds of alternatives that take turns, their ratios, and the lines that `rankbench bench` prints of them."""

import time
from collections.abc import Callable

import numpy as np
import pandas as pd

from rankbench.runs.machine import Machine

# The project's own goals: (at least | at most, value).
GOALS = {
    "ratio_sums_to_forward": ("at most", 4.0),
    "ratio_tape_to_sums": ("at most", 1.5),
    "ratio_speedup_over_all_heads": ("at least", 4.0),
    "ratio_speed_to_torch_encoder": ("at least", 1.0),
    "ratio_side_by_side": ("at least", 1.25),
    "ratio_step_to_dot": ("at most", 1.05),
}


def paired(machine: Machine, repeats: int, **alternatives: Callable[[], object]) -> dict[str, np.ndarray]:
    """Seconds of each alternative in each repetition, shape (repeats,), after one warm-up of each.

    The alternatives take turns, A B A B ..: other work on the machine slows them alike, so the ratio within a
    repetition says more than the time of one alternative.
    """

    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for repeat in range(repeats + 1):
        for name, work in alternatives.items():
            machine.finish()
            began = time.perf_counter()
            work()
            machine.finish()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: np.array(of_name) for name, of_name in seconds.items()}


def medians(seconds: dict[str, np.ndarray]) -> dict[str, float]:
    """Columns seconds_<alternative>, the median over the repetitions."""
    return {f"seconds_{name}": float(np.median(of_name)) for name, of_name in seconds.items()}


def spread(column: str, values: np.ndarray) -> dict[str, float]:
    """The column's median over the repetitions, and its range in <column>_min and <column>_max."""
    return {
        column: float(np.median(values)),
        f"{column}_min": float(values.min()),
        f"{column}_max": float(values.max()),
    }


def lines_of(table: pd.DataFrame) -> list[str]:
    """A line for each ratio in a benchmark's table: column, case, median [min, max], and the goal."""
    lines = []
    for case, row in zip(table.index.to_frame().to_dict("records"), table.to_dict("records"), strict=True):
        # A case without a value for an axis leaves the axis out: recomputed paths have no MLP.
        where = " ".join(str(value) if isinstance(value, str) else f"{axis}={value:g}"
                         for axis, value in case.items() if not pd.isna(value))  # fmt: skip
        for column in (name for name in row if name.startswith("ratio_") and f"{name}_min" in row):
            if not pd.isna(row[column]):
                low, high = row[f"{column}_min"], row[f"{column}_max"]
                goal = f"  (goal: {' '.join(map(str, GOALS[column]))})" if column in GOALS else ""
                lines.append(f"  {column:<30} {where:<36} {row[column]:7.2f} [{low:.2f}, {high:.2f}]{goal}")
    return lines
