"""Speed of a training step on a GPU: launched kernel by kernel, replayed as a CUDA graph, and as a graph of compiled
kernels; and its share of the rate at which the GPU multiplies matrices."""

import dataclasses
import time

import numpy as np
import pandas as pd
import torch

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from benchmarks.training import SMALL, operations_of_products, train_steps
from rankbench.config.keys import ConfigError
from rankbench.runs.machine import Machine
from rankbench.tasks import Corpus, build_task
from rankbench.training.graph import ungraphed
from rankbench.training.seeds_side_by_side import Training

KINDS = {"plain": "plain", "graph": "graph", "compiled": "compiled graph"}  # steps of runs.run.STEPS, by column
LARGE = 8192  # rows and columns of matrices whose product runs at the GPU's highest rate


def check(cfg: BenchConfig) -> None:
    """Raise ConfigError without a GPU, and for a model or an update rule whose steps are not counted or recorded."""
    if (reason := ungraphed(cfg, Machine.prepare(cfg))) is not None:
        raise ConfigError(f"card: it does not cover {reason}; change that, or leave card out")


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Milliseconds of a step of one seed, of `replicas` and of four times as many side by side, with batches of SMALL
    and of trainer.batch_size sequences (a corpus: of the latter, and not four times as many seeds).

    The compiled kernels are timed with trainer.compile=true, which takes a minute a row; SMALL is left out then.
    ratio_card_rate compares the products of the fastest step with one large product of the same repetition.
    """
    task, rows = build_task(cfg.task), []
    is_corpus = isinstance(task, Corpus)
    sizes = {cfg.trainer.batch_size} | (set() if is_corpus or cfg.trainer.compile == "true" else {SMALL})
    for size in sorted(sizes):
        sized = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, batch_size=size))
        for num_seeds in sorted({1, cfg.replicas, (1 if is_corpus else 4) * cfg.replicas}):
            case = {"task": task.name, "seeds": num_seeds, "batch_size": size, "precision": machine.precision}
            rows.append(case | _step(sized, machine, num_seeds))
    return pd.DataFrame(rows).assign(repeats=cfg.repeats).set_index(["task", "seeds", "batch_size", "precision"])


def _step(cfg: BenchConfig, machine: Machine, num_seeds: int) -> dict[str, float]:
    task, seeds, steps = build_task(cfg.task), list(range(cfg.seed, cfg.seed + num_seeds)), cfg.trainer.steps or 0
    kinds = [name for name in KINDS if name != "compiled" or cfg.trainer.compile == "true"]
    trainings = {name: Training(cfg, task, machine, seeds, KINDS[name]) for name in kinds}
    began = time.perf_counter()
    for training in trainings.values():
        for _ in range(2):  # of each shape the first step runs as it is, and the second is recorded
            train_steps(training, steps)
    seconds_before = time.perf_counter() - began
    works = {name: lambda training=training: train_steps(training, steps) for name, training in trainings.items()}
    dtype = torch.bfloat16 if machine.precision == "bf16" else machine.dtype
    a, b = (torch.randn(LARGE, LARGE, device=machine.device, dtype=dtype) for _ in range(2))
    seconds = paired(machine, cfg.repeats, {**works, "large_product": lambda: a @ b})
    fastest = min((seconds[name] for name in kinds), key=np.median)
    operations = num_seeds * sum(_operations(training := trainings["plain"], step) for step in range(steps))
    columns = {"steps": steps, "seconds_before": seconds_before} | medians(seconds)
    columns |= {f"milliseconds_{name}": 1000 * float(np.median(seconds[name])) / steps for name in kinds}
    columns |= spread("ratio_plain_to_graph", seconds["plain"] / seconds["graph"])
    if "compiled" in kinds:
        columns |= spread("ratio_graph_to_compiled_graph", seconds["graph"] / seconds["compiled"])
    return columns | spread("ratio_card_rate", operations / (2 * LARGE**3) * seconds["large_product"] / fastest)


def _operations(training: Training, step: int) -> int:
    """Of the products of one seed at this step."""
    training.progress.step = step
    return operations_of_products(training, *training.batch().targets.shape[1:3])
