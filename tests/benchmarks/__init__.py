"""Speed, side by side with the alternatives, in one run: `make bench`.

A benchmark is a module with a function `table(cfg, machine)`. Its table is indexed by the cases that it measures. It
holds seconds and, in columns that begin with `ratio_`, the median of the paired ratios; columns that end in `_min` and
`_max` hold the range over the repetitions.
"""

import time
from collections.abc import Callable, Collection
from pathlib import Path

import pandas as pd

from benchmarks import attention, card, depth, lipschitz, metrics, paths, record, startup, training
from benchmarks.config import BenchConfig
from benchmarks.timing import lines_of, ratios_of
from rankbench.config.keys import check_known
from rankbench.runs.machine import Machine
from rankbench.runs.tables import write_table

_MODULES = (paths, training, startup, attention, depth, lipschitz, metrics, card)
BENCHMARKS: dict[str, Callable[[BenchConfig, Machine], pd.DataFrame]] = {
    module.__name__.partition(".")[2]: module.table for module in _MODULES
}
DEFAULTS = ("paths", "training", "startup")


def check(names: Collection[str], cfg: BenchConfig) -> None:
    """Raise ConfigError for an unknown benchmark, and for one that the config does not allow."""
    check_known("benchmark", names, BENCHMARKS)
    if "training" in names:
        training.check_twin(cfg.model, cfg.optimizer)
    if "card" in names:
        card.check(cfg)


def bench(names: Collection[str], cfg: BenchConfig, machine: Machine) -> None:
    """Run these benchmarks, write bench_<name>.csv into the config's folder and print its ratios."""
    ratios, folder = [], Path(cfg.out)
    for name in names:
        began, file = time.perf_counter(), folder / f"bench_{name}.csv"
        table = BENCHMARKS[name](cfg, machine)
        write_table(table.reset_index(), file)
        print(f"{name} ({time.perf_counter() - began:.0f} s)", *lines_of(table), f"-> {file}", sep="\n", flush=True)
        ratios += [(name, *ratio) for ratio in ratios_of(table)]
    if cfg.record is not None:
        print(f"-> {record.add(ratios, cfg.repeats, machine, Path(cfg.record))}")
