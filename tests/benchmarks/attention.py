"""Attention: one layer of each kind, forward and backward, against the dot product with free keys.

Shapes: B batch, N token, D width.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.model import initial_model
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for
from rankbench.tasks import build_task

# One layer of the character models of Kim et al. 2021, whose longest sentence has 288 tokens.
CHARACTER_MODEL: dict = {"width": 512, "heads": 8, "mask": "causal"}
NUM_TOKENS = (32, 128, 288, 1024)
TOKENS_PER_STEP = 1024  # roughly, in all sequences of a step
ATTENTIONS: dict[str, dict] = {
    "dot": {"attention": "dot"},
    "dot again": {"attention": "dot"},  # shows how far noise alone moves a ratio
    "l2": {"attention": "l2"},
    "l2 tied": {"attention": "l2", "tied_qk": True},
    "contractive_l2": {"attention": "contractive_l2", "tied_qk": True, "contraction": 1.0},
    "cosine": {"attention": "cosine"},
}


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds and memory of a step of each kind of attention, for each number of tokens.

    step: with the kernel that a training step uses, which is the fused one above some number of tokens. explicit: with
    the N x N table of weights. Memory is what autograd keeps from the forward pass for the backward pass, without the
    weights.
    """
    task = build_task(cfg.task)
    rows = []
    for num_tokens in NUM_TOKENS:
        num_sequences = math.ceil(TOKENS_PER_STEP / num_tokens)
        shape = (num_sequences, num_tokens, CHARACTER_MODEL["width"])
        x_BND, slope_BND = (
            torch.randn(shape, generator=generator_for(cfg.seed, purpose)).to(machine.device, machine.dtype)
            for purpose in ("train", "test")
        )
        steps = {}
        for kind, changes in ATTENTIONS.items():
            model = initial_model(dataclasses.replace(cfg.model, **CHARACTER_MODEL, **changes), task, cfg.seed).eval()
            assert isinstance(model, Transformer)  # CHARACTER_MODEL
            module = model.attentions[0].to(machine.device, machine.dtype)
            for name, kernel in (("step", "fused"), ("explicit", "table")):
                steps[f"{kind} {name}"] = partial(_step, module, x_BND.requires_grad_(), slope_BND, machine, kernel)
        seconds = paired(machine, cfg.repeats, steps)
        kept = {name: _kept_for_backward(step) for name, step in steps.items()}
        for kind in ATTENTIONS:
            step, explicit = seconds[f"{kind} step"], seconds[f"{kind} explicit"]
            kept_of_step = kept[f"{kind} step"]
            rows.append(
                {"attention": kind, "num_tokens": num_tokens, "num_sequences": num_sequences}
                | medians({"step": step, "explicit": explicit})
                | {"megabytes_step": kept_of_step / 1e6, "megabytes_explicit": kept[f"{kind} explicit"] / 1e6}
                | spread("ratio_step_to_dot", step / seconds["dot step"])
                | spread("ratio_explicit_to_step", explicit / step)
                | spread("ratio_memory_to_dot", np.array([kept_of_step / kept["dot step"]]))
            )
    return (
        pd.DataFrame(rows)
        .assign(**CHARACTER_MODEL, device=machine.device.type, precision=machine.precision, repeats=cfg.repeats)
        .set_index(["attention", "num_tokens"])
    )


def _step(module: nn.Module, x_BND: Tensor, slope_BND: Tensor, machine: Machine, kernel: str) -> tuple[Tensor, ...]:
    """The gradients of one forward and backward pass of the module."""
    with machine.autocast():
        y_BND = module(x_BND, kernel=kernel)
    return torch.autograd.grad(y_BND, [x_BND, *module.parameters()], slope_BND.to(y_BND.dtype))


def _kept_for_backward(step: Callable[[], object]) -> int:
    """Bytes that autograd keeps in this step, each piece of memory counted once, without parameters and inputs."""
    sizes = {}

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(sizes.values())
