"""Speed, side by side with the alternatives, in one run: `rankbench bench`.

A benchmark is a module with a function `table(cfg, machine)`. Its table is indexed by the cases that it measures. It
holds seconds and, in columns that begin with `ratio_`, the median of the paired ratios; columns that end in `_min` and
`_max` hold the range over the repetitions.
"""

import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from rankbench.bench import attention, card, depth, lipschitz, metrics, paths, record, startup, training
from rankbench.bench.timing import lines_of, ratios_of
from rankbench.config.keys import ConfigError
from rankbench.config.schema import BenchConfig
from rankbench.runs.machine import Machine
from rankbench.runs.tables import write_table

BENCHMARKS: dict[str, Callable[[BenchConfig, Machine], pd.DataFrame]] = {
    "paths": paths.table,
    "training": training.table,
    "startup": startup.table,
    "attention": attention.table,
    "depth": depth.table,
    "lipschitz": lipschitz.table,
    "metrics": metrics.table,
    "card": card.table,
}


def check_benchmarks(cfg: BenchConfig) -> None:
    """Raise ConfigError for a benchmark that the rest of the config does not allow."""
    for key in ("analysis", "claims", "published"):
        if getattr(cfg, key):
            raise ConfigError(f"{key}: `rankbench bench` analyses nothing; give it to `rankbench analyze`")
    if "training" in cfg.bench:
        training.check_twin(cfg.model, cfg.optimizer)
    if "card" in cfg.bench:
        card.check(cfg)


def bench(cfg: BenchConfig, machine: Machine, folder: Path) -> None:
    """Run each benchmark of the config, write bench_<name>.csv into the folder and print its ratios."""
    ratios = []
    for name in cfg.bench:
        began, file = time.perf_counter(), folder / f"bench_{name}.csv"
        table = BENCHMARKS[name](cfg, machine)
        write_table(table.reset_index(), file)
        print(f"{name} ({time.perf_counter() - began:.0f} s)", *lines_of(table), f"-> {file}", sep="\n", flush=True)
        ratios += [(name, *ratio) for ratio in ratios_of(table)]
    if cfg.record is not None:
        print(f"-> {record.add(ratios, cfg.repeats, machine, Path(cfg.record))}")
