"""Path sums: frozen paths against a forward pass, recomputed paths against one pass for each path.

Shapes: B batch, N token, D width, H head, K head width, G group of paths.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.measures import module_paths
from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.module_reading import read_module
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.model import initial_model
from rankbench.model.modules import Example
from rankbench.model.norm import plain_norm
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for
from rankbench.tasks import build_task

# MLP ratios (that of the code of Dong et al. 2021, and the usual one), with the columns of their sums: the goals differ
MLP_RATIOS = {1.0: "ratio_sums_to_forward_narrow", 4.0: "ratio_sums_to_forward"}
# Of the paths that run alone, one in this many is timed, at least one of each length: all of them would take minutes.
ONE_PATH_IN = 12
# Recomputed paths use one in this many of the sequences: their time is proportional, and all would take minutes.
ONE_SEQUENCE_IN = 4
# Sequences at a time for a path that runs alone: the fastest of 50 .. 2000 on one core, so the comparison is fair.
ALONE_SEQUENCES = 250

HeadStep = Callable[[Tensor, int, int], Tensor]  # states, layer, choice (a head, from 1) -> states after that head


@torch.no_grad()
def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Sums over all paths, in float32 and float64.

    Frozen sums include the forward pass that they need. tape: the same sums, with the network treated like any torch
    module and as many sequences at a time as analyses take. A path that runs alone is timed in two ways. one_head
    computes only the one head of each layer that the path takes; all_heads computes every head of these layers and
    keeps one. Recomputed paths do not pass through MLPs.
    """
    task = build_task(cfg.task)
    test_inputs = task.sample(cfg.sequences, generator_for(cfg.seed, "test")).inputs
    frozen, recomputed = [], []
    for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        inputs = test_inputs.to(machine.device, dtype if test_inputs.is_floating_point() else None)
        for mlp_ratio, column in MLP_RATIOS.items():
            fresh = initial_model(dataclasses.replace(cfg.model, mlp_ratio=mlp_ratio), task, cfg.seed).eval()
            assert isinstance(fresh, Transformer)  # only these have paths
            model = fresh.to(machine.device, dtype)
            case = {"paths": "frozen", "mlp_ratio": mlp_ratio, "precision": precision, "num_sequences": len(inputs)}
            frozen.append(case | _frozen_sums(model, inputs, machine, cfg.repeats, column))
        few = inputs[: math.ceil(len(inputs) / ONE_SEQUENCE_IN)]
        case = {"paths": "recomputed", "mlp_ratio": math.nan, "precision": precision, "num_sequences": len(few)}
        recomputed.append(case | _recomputed_sums(model, few, machine, cfg))
    rows = pd.DataFrame([*frozen, *recomputed])
    return rows.assign(repeats=cfg.repeats).set_index(["paths", "mlp_ratio", "precision"])


def _frozen_sums(model: Transformer, inputs: Tensor, machine: Machine, repeats: int, column: str) -> dict[str, float]:
    example = Example((inputs,))
    read = read_module(model, example)
    alternatives = {
        "forward": lambda: model(inputs),
        "all_sums": lambda: sums_by_length(model, inputs),
        "tape": lambda: list(module_paths.module_sums(read, example)),
    }
    seconds = paired(machine, repeats, alternatives)
    ratios = spread(column, seconds["all_sums"] / seconds["forward"])
    return medians(seconds) | ratios | spread("ratio_tape_to_sums", seconds["tape"] / seconds["all_sums"])


def _recomputed_sums(model: Transformer, inputs: Tensor, machine: Machine, cfg: BenchConfig) -> dict[str, float]:
    layers, heads = cfg.model.layers, cfg.model.heads
    groups = [all_paths(layers, heads, length) for length in range(layers + 1)]
    generator = np.random.default_rng(cfg.seed)
    drawn = [generator.permutation(len(group))[: math.ceil(len(group) / ONE_PATH_IN)] for group in groups]
    timed_groups = [group[np.sort(numbers)] for group, numbers in zip(groups, drawn, strict=True)]
    # A path costs as much as it has heads. This scales the time of the timed paths up to all of them.
    timed_share = sum((paths > 0).sum() for paths in timed_groups) / sum((paths > 0).sum() for paths in groups)
    network = RecomputedNetwork(model, inputs)

    def alone(step: HeadStep) -> Tensor:
        return sums_of_paths_alone(network.embedding_BND, timed_groups, step)

    steps = {"one_head": one_head(network), "all_heads": all_heads(model)}
    alternatives = {name: partial(alone, step) for name, step in steps.items()}
    alternatives["shared"] = partial(sums_of_groups, network, groups)
    seconds = paired(machine, cfg.repeats, alternatives)
    seconds |= {name: seconds[name] / timed_share for name in steps}
    shared_GBND = sums_of_groups(network, timed_groups)
    return {
        **medians(seconds),
        "share_of_paths_alone_timed": float(timed_share),
        "largest_sum": shared_GBND.abs().max().item(),
        "largest_difference": max((shared_GBND - alone(step)).abs().max().item() for step in steps.values()),
        **spread("ratio_speedup_over_one_head", seconds["one_head"] / seconds["shared"]),
        **spread("ratio_speedup_over_all_heads", seconds["all_heads"] / seconds["shared"]),
    }


def sums_of_paths_alone(embedding_BND: Tensor, groups: list[np.ndarray], step: HeadStep) -> Tensor:
    """The sums of sums_of_groups, (G, B, N, D), path by path from the embedding, with nothing shared."""
    sums_GBND = embedding_BND.new_zeros(len(groups), *embedding_BND.shape)
    chunks = zip(embedding_BND.split(ALONE_SEQUENCES), sums_GBND.split(ALONE_SEQUENCES, dim=1), strict=True)
    for states_BND, chunk_GBND in chunks:
        for group, sum_BND in zip(groups, chunk_GBND, strict=True):
            for path in group.tolist():
                x_BND = states_BND
                for layer, choice in enumerate(path):
                    if choice:  # 0 passes the layer by
                        x_BND = step(x_BND, layer, choice)
                sum_BND += x_BND
    return sums_GBND


def one_head(network: RecomputedNetwork) -> HeadStep:
    """One head of one layer, as in the tree over paths, for one path instead of many."""
    return lambda x_BND, layer, choice: network.step(x_BND[None], layer, choice, slice(None))[0]


def all_heads(model: Transformer) -> HeadStep:
    """A layer's attention as in a forward pass, with the output of every head but one set to zero."""

    def step(x_BND: Tensor, layer: int, choice: int) -> Tensor:
        sublayer = model.layers[layer][0]
        attention = sublayer.part
        mixed_BHNK = attention.observe(x_BND)[1]["mixed_BHNK"]
        kept_BHNK = torch.zeros_like(mixed_BHNK)
        kept_BHNK[:, choice - 1] = mixed_BHNK[:, choice - 1]
        out_BND = attention.out(kept_BHNK.transpose(-3, -2).flatten(-2))
        return out_BND if sublayer.norm is None else plain_norm(sublayer.norm.kind, out_BND)

    return step
