"""Speed of a compiled training step: against a plain loop over torch.nn.TransformerEncoder, and our uncompiled step."""

import dataclasses
import math
import time
from functools import partial

import numpy as np
import pandas as pd

from rankbench.bench.timing import medians, paired, spread
from rankbench.bench.training import SMALL, torch_loops, train_steps
from rankbench.config.schema import BenchConfig
from rankbench.runs.machine import Machine
from rankbench.tasks import build_task
from rankbench.training.seeds_side_by_side import Training


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds of blocks of steps of one seed, of `replicas` and of four times as many side by side.

    Every shape of batch is compiled before it is timed. seconds_compiling is the time of its first step: a minute or
    less, or seconds where torch finds the graph in its cache on disk. For seeds in turn, one seed's compiled steps are
    repeated for each seed.
    """
    rows = []
    for size in sorted({SMALL, cfg.trainer.batch_size}):
        sized = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, batch_size=size))
        rows += [
            {"seeds": seeds, "batch_size": size, **_against(sized, machine, seeds)}
            for seeds in (1, cfg.replicas, 4 * cfg.replicas)
        ]
    return pd.DataFrame(rows).assign(repeats=cfg.repeats).set_index(["seeds", "batch_size"])


def _against(cfg: BenchConfig, machine: Machine, num_seeds: int) -> dict[str, float]:
    task, steps = build_task(cfg.task), math.ceil((cfg.trainer.steps or 0) / num_seeds)
    seeds = list(range(cfg.seed, cfg.seed + num_seeds))
    plain, compiled = (Training(cfg, task, machine, seeds, step) for step in ("plain", "torch.compile"))
    began = time.perf_counter()
    train_steps(compiled, 1)
    seconds_compiling = time.perf_counter() - began
    works: dict = {"plain": lambda: train_steps(plain, steps), "compiled": lambda: train_steps(compiled, steps)}
    if num_seeds == 1:
        loops = torch_loops(plain, cfg.trainer.steps or 0)
        works |= loops
    else:
        alone = Training(cfg, task, machine, seeds[:1], "torch.compile")
        works["in_turn"] = lambda: list(map(partial(train_steps, steps=steps), [alone] * num_seeds))
    seconds = paired(machine, cfg.repeats, works)
    ratios = {"ratio_compiled_to_plain": seconds["plain"] / seconds["compiled"]}
    if num_seeds == 1:
        fastest = min((seconds[name] for name in loops), key=np.median)
        ratios["ratio_compiled_to_torch_encoder"] = fastest / seconds["compiled"]
    else:
        many = "" if num_seeds == cfg.replicas else "many_"
        ratios[f"ratio_compiled_{many}side_by_side"] = seconds["in_turn"] / seconds["compiled"]
    columns = {"steps": steps, "seconds_compiling": seconds_compiling} | medians(seconds)
    for name, values in ratios.items():
        columns |= spread(name, values)
    return columns
