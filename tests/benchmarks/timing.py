"""Seconds of alternatives that take turns, their ratios, and the lines that are printed about them."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from rankbench.runs.machine import Machine

# What each ratio compares, and the project's own goal: (at least | at most, value).
RATIOS: dict[str, tuple[str, tuple[str, float] | None]] = {
    "ratio_sums_to_forward": ("all exact sums by length / a forward pass: seconds", ("at most", 4.0)),
    "ratio_sums_to_forward_narrow": (
        "all exact sums by length / a forward pass, MLPs as wide as the model: seconds",
        ("at most", 3.0),
    ),
    "ratio_tape_to_sums": ("sums of any module, by the tape / all exact sums: seconds", ("at most", 1.5)),
    "ratio_speedup_over_one_head": ("729 paths one by one, one head / sharing layers: seconds", None),
    "ratio_speedup_over_all_heads": ("729 paths one by one, all heads / sharing layers: seconds", ("at least", 6.0)),
    "ratio_roofline": (
        "time of a training step's matrix products at the rate of torch's large ones / time of the step",
        ("at least", 0.7),
    ),
    "ratio_limit": ("the same at the rate of our own large products / time of the step", None),
    "ratio_speed_to_torch_encoder": (
        "our training / torch.nn.TransformerEncoder: sequences a second",
        ("at least", 2.5),
    ),
    "ratio_speed_to_plain": ("our training / its uncompiled step: sequences a second", None),
    # a fused step takes the seeds in turn by itself, so these say something about other steps only
    "ratio_side_by_side": ("seeds side by side / in turn: sequences a second", None),
    "ratio_many_side_by_side": ("many seeds side by side / in turn: sequences a second", None),
    "ratio_plain_to_graph": ("a step kernel by kernel / as a CUDA graph: seconds", None),
    "ratio_graph_to_compiled_graph": ("a step as a CUDA graph / as one of compiled kernels: seconds", None),
    "ratio_card_rate": ("time of a step's matrix products at the GPU's rate / time of the fastest step", None),
    "ratio_to_import_torch": ("a command's start / import torch: seconds", None),
    "ratio_jacobian_to_row": ("a Jacobian by torch / one token's rows in closed form: seconds", None),
    "ratio_memory_jacobian_to_row": ("a Jacobian by torch / one token's rows in closed form: peak memory", None),
    "ratio_jacobian_to_row_of_1000": (
        "a Jacobian of 1,000 tokens by torch / one token's rows in closed form: seconds",
        ("at least", 500.0),
    ),
    "ratio_memory_jacobian_to_row_of_1000": (
        "a Jacobian of 1,000 tokens by torch / one token's rows in closed form: peak memory",
        ("at least", 50.0),
    ),
    "ratio_jacobian_to_all_rows": ("a Jacobian by torch / all rows in closed form: seconds", None),
    "ratio_metrics_to_svd": ("all metrics of states / one singular value decomposition: seconds", ("at most", 1.5)),
    "ratio_sums_to_forward_of_depth": ("all exact sums by length / a forward pass: seconds", None),
    "ratio_sums_to_forward_of_base": ("all exact sums by length / a forward pass: seconds", ("at most", 6.0)),
    "ratio_step_to_dot": ("a training step / that of dot products: seconds", ("at most", 1.05)),
    "ratio_explicit_to_step": ("explicit softmax / the kernel in use: seconds of a step", None),
    "ratio_memory_to_dot": ("memory of a training step / that of dot products", None),
}


class Ratio(NamedTuple):
    """A ratio of one case: its median over the repetitions, and its range."""

    column: str
    case: str
    median: float
    smallest: float
    largest: float

    @property
    def missed(self) -> bool:
        """Whether the median misses the project's goal."""
        goal = RATIOS[self.column][1]
        return goal is not None and (self.median > goal[1] if goal[0] == "at most" else self.median < goal[1])


def paired(
    machine: Machine,
    repeats: int,
    alternatives: Mapping[str, Callable[[], object]],
    *,
    is_warm: bool = False,
    clock: Callable[[], float] | None = None,
) -> dict[str, np.ndarray]:
    """Seconds of each alternative in each repetition, shape (repeats,), after one warm-up of each unless `is_warm`.

    The alternatives take turns, A B A B ..: other work on the machine slows them alike, so the ratio within a
    repetition says more than the time of one alternative. clock: None for the processor time of this process, which
    other processes lengthen less, where one thread of a CPU does all the work, and for the wall clock elsewhere.
    """
    if clock is None:
        is_alone = machine.device.type == "cpu" and machine.threads == 1
        clock = time.process_time if is_alone else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for repeat in range(is_warm, repeats + 1):
        for name, work in alternatives.items():
            machine.finish()
            began = clock()
            work()
            machine.finish()
            if repeat:
                seconds[name].append(clock() - began)
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


def ratios_of(table: pd.DataFrame) -> Iterator[Ratio]:
    """Every ratio in a benchmark's table."""
    for case, row in zip(table.index.to_frame().to_dict("records"), table.to_dict("records"), strict=True):
        # A case without a value for an axis leaves the axis out: recomputed paths have no MLP.
        where = " ".join(str(value) if isinstance(value, str) else f"{axis}={value:g}"
                         for axis, value in case.items() if not pd.isna(value))  # fmt: skip
        for column in RATIOS:
            if column in row and not pd.isna(row[column]):
                yield Ratio(column, where, row[column], row[f"{column}_min"], row[f"{column}_max"])


def digits(ratio: float) -> str:
    """A ratio with two decimals, or the first two digits of a small one."""
    return f"{ratio:.2f}" if abs(ratio) >= 0.1 else f"{ratio:.2g}"


def lines_of(table: pd.DataFrame) -> list[str]:
    """A line for each ratio in a benchmark's table: column, case, median [min, max], and the goal."""
    lines = []
    for column, case, median, smallest, largest in ratios_of(table):
        wanted = RATIOS[column][1]
        goal = f"  (goal: {wanted[0]} {wanted[1]})" if wanted else ""
        measured = f"{digits(median):>7} [{digits(smallest)}, {digits(largest)}]"
        lines.append(f"  {column:<30} {case:<36} {measured}{goal}")
    return lines
