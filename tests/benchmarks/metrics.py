"""The rank metrics of states, against one singular value decomposition of the same states.

Shapes: B batch, N token, D width.
"""

from functools import partial

import pandas as pd
import torch

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.measures.states import state_metrics
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for

SHAPE = (32, 128, 768)  # BERT's width


@torch.no_grad()
def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds of all metrics of states, in float32 and float64."""
    rows = []
    num_sequences = min(SHAPE[0], cfg.sequences)  # few in a smoke test
    x_BND = torch.randn(num_sequences, *SHAPE[1:], generator=generator_for(cfg.seed, "test"))
    for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        states_BND = x_BND.to(machine.device, dtype)
        alternatives = {"metrics": partial(state_metrics, states_BND), "svd": partial(torch.linalg.svdvals, states_BND)}
        seconds = paired(machine, cfg.repeats, alternatives)
        ratios = spread("ratio_metrics_to_svd", seconds["metrics"] / seconds["svd"])
        rows.append({"precision": precision, "num_sequences": num_sequences} | medians(seconds) | ratios)
    return pd.DataFrame(rows).assign(repeats=cfg.repeats, device=machine.device.type).set_index("precision")
