"""Time of a training step of a network, over that of the same network with dot products (Kim et al. 2021, Table 1).

Shapes: B batch, N token.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pandas as pd
import torch
from torch import nn

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config.keys import key
from rankbench.model import initial_model
from rankbench.plots.curves import draw_speed
from rankbench.runs.machine import seconds_of
from rankbench.runs.tables import mean_of_seeds, over_seeds
from rankbench.tasks.task import Batch, is_scored, score

# What makes a network the one with dot products and free keys
DOT: dict = {"attention": "dot", "tied_qk": False, "contraction": None, "contraction_keys": None}


@dataclass(frozen=True)
class Options:
    """How many steps are timed, and of how many sequences."""

    batch_size: int = key("Number of sequences in a step.", at_least=1)
    rounds: int = key("Number of steps that are timed, each on sequences of another length.", at_least=1)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each step. Both networks take turns in one process.

    On a CPU seconds are CPU time, which other processes on the machine hardly change; on a GPU they are the time
    between two events of the device. A step is a forward pass, its gradients, and an update by Adam, in float32,
    without dropout. The times of dot products against themselves show the noise.
    """
    cfg = subject.network.cfg
    dot = initial_model(dataclasses.replace(cfg, **DOT), subject.task, subject.seed)
    steps = {"seconds": _step(copy.deepcopy(subject.network), subject), "seconds_dot": _step(dot, subject)}
    batches = list(_batches(subject, options))
    for step in steps.values():  # a warm-up
        step(batches[-1])
    rows = []
    for number, batch in enumerate(batches, 1):
        seconds = {name: seconds_of(functools.partial(step, batch), subject.device) for name, step in steps.items()}
        rows.append({"step": number, "tokens": int(is_scored(batch.targets).sum()), **seconds})
    return pd.DataFrame(rows).assign(variant=cfg.name, layers=cfg.layers, width=cfg.width)


def _batches(subject: Subject, options: Options) -> Iterator[Batch]:
    """Batches of training sequences of like length, evenly from the shortest to the longest, cut to their longest."""
    train = subject.train.to(subject.device, torch.float32)
    lengths_B = is_scored(train.targets).sum(-1)
    order_B = lengths_B.argsort(stable=True)
    last = max(0, len(order_B) - options.batch_size)
    for begin in torch.linspace(0, last, options.rounds).long().tolist():
        chosen_B = order_B[begin : begin + options.batch_size]
        longest = int(lengths_B[chosen_B[-1]]) if subject.task.padded else None
        yield train[chosen_B, :longest]


def _step(model: nn.Module, subject: Subject) -> Callable[[Batch], None]:
    """A training step on a batch, as a function of it."""
    model = model.to(subject.device, torch.float32).requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(batch: Batch) -> None:
        with torch.enable_grad():
            score(model(batch.inputs, kernel="fused"), batch.targets).mean_loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def digest(table: pd.DataFrame) -> str:
    """Ratio of the times, over all steps of a seed, for a terminal."""
    totals = table.groupby(["variant", "layers", "seed"])[["seconds", "seconds_dot"]].sum().reset_index()
    ratios = over_seeds(totals.assign(ratio=totals.seconds / totals.seconds_dot), ["variant", "layers"], "ratio")
    lines = [f"time of a training step over that with dot products ({mean_of_seeds(table.seed.nunique())})"]
    for row in ratios.itertuples():
        spread = "" if pd.isna(row.low95) else f" [{row.low95:.4g}, {row.high95:.4g}] (95 %)"
        lines.append(f"{row.variant}, layers={row.layers}: {row.mean:.4g}{spread}")
    return "\n".join(lines)


COLUMNS = {
    "step": "Number of the step, from 1.",
    "tokens": "Number of scored tokens of its batch.",
    "seconds": "Of a training step of this network.",
    "seconds_dot": "Of one of the same network with dot products, on the same batch.",
    "variant": "model.name.",
    "layers": "Number of layers.",
    "width": "Width of the network.",
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_speed,
    digest,
    COLUMNS,
    ("seconds_dot",),
    needs={"sublayers", "task"},
    lines="variant",
    drawn_apart=("variant", "layers"),
)
