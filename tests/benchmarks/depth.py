"""Exact path sums of deep networks and of a base model's size, against a forward pass."""

import dataclasses
from functools import partial

import pandas as pd
import torch

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.measures.frozen_network import sums_by_length
from rankbench.model import initial_model
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for
from rankbench.tasks import build_task

DEPTHS = (2, 4, 8, 16, 32, 48)
BASE = {"layers": 12, "heads": 12, "width": 768, "mlp_ratio": 4.0}
SEQUENCES = {"of_depth": 100, "of_base": 32}  # at most


@torch.no_grad()
def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds of all sums by length, including the forward pass that they need, in float32.

    The work of a sum over L layers is (L + 3) / 2 times that of a forward pass's values, outputs and MLPs, so the ratio
    grows with L and the seconds with L^2. A smoke test has the two smallest depths and no base model.
    """
    task = build_task(cfg.task)
    inputs = task.sample(cfg.sequences, generator_for(cfg.seed, "test")).inputs.to(machine.device)
    changes = [("of_depth", {"layers": layers}) for layers in DEPTHS] + [("of_base", BASE)]
    rows = []
    for case, change in changes[:2] if cfg.sequences < max(SEQUENCES.values()) else changes:
        model = initial_model(dataclasses.replace(cfg.model, **change), task, cfg.seed).eval().to(machine.device)
        assert isinstance(model, Transformer)  # only these have paths
        few = inputs[: SEQUENCES[case]]
        alternatives = {"forward": partial(model, few), "sums": partial(sums_by_length, model, few)}
        seconds = paired(machine, cfg.repeats, alternatives)
        ratios = spread(f"ratio_sums_to_forward_{case}", seconds["sums"] / seconds["forward"])
        sizes = {"layers": model.cfg.layers, "heads": model.cfg.heads, "width": model.cfg.width}
        rows.append(sizes | {"num_sequences": len(few)} | medians(seconds) | ratios)
    return pd.DataFrame(rows).assign(repeats=cfg.repeats).set_index(["layers", "heads", "width"])
