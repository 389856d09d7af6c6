"""The kind of training step that a training takes, and torch's compiler for two of them.

Shapes: S seed.
"""

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rankbench.config.schema import TrainConfig
from rankbench.model import build_model
from rankbench.model.contraction import inverse_phi
from rankbench.model.dropout import dropout_masks
from rankbench.model.lstm import Lstm
from rankbench.model.sublayers import Sublayer
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.tasks import Corpus, Task
from rankbench.tasks.task import Score
from rankbench.training.forward import per_seed
from rankbench.training.fused_step import library_for, usual_length
from rankbench.training.graph import ungraphed
from rankbench.training.library import NoLibraryError

log = logging.getLogger(__name__)

# Steps that repay the 3 to 6 s that g++ takes for the fused step: on one core, a step of the sorting network (6 layers
# of width 48, batches of 30) is 5 to 9 ms shorter with it.
REPAID_AFTER = 600
# The most by which compiled gradients may differ, relative to their norm. Measured on language models: 2e-7 in fp32 and
# .006 in bf16, whose products have three digits.
ROUNDING = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 0.05}


def choose_step(cfg: TrainConfig, task: Task, machine: Machine) -> str:
    """The kind of step that trainer.compile asks for, from runs.run.STEPS.

    auto decides from the config, not from a clock: the same command on the same machine always gets the same step. It
    logs why it does not take a faster one.
    """
    if cfg.trainer.compile == "true":
        return "torch.compile" if ungraphed(cfg, machine) is not None else "compiled graph"
    if cfg.trainer.compile == "false":
        return "plain"
    if (steps := num_steps(cfg, task)) >= REPAID_AFTER:
        return fastest_step(cfg, task, machine)
    kind = "the fused step" if machine.device.type == "cpu" else "a CUDA graph"
    log.info("trainer.compile=auto: not %s: %d steps do not repay its compiling, %d do", kind, steps, REPAID_AFTER)
    return "plain"


def fastest_step(cfg: TrainConfig, task: Task, machine: Machine) -> str:
    """fused or graph where it is to be had, however short the training; plain elsewhere, and the log says why."""
    if machine.device.type == "cuda":
        if (reason := ungraphed(cfg, machine)) is None:
            return "graph"
        log.info("trainer.compile=auto: not a CUDA graph: it does not cover %s", reason)
        return "plain"
    try:
        library_for(cfg, task, machine, usual_length(task))
        return "fused"
    except NoLibraryError as error:
        log.info("trainer.compile=auto: not the fused step: %s", error)
        return "plain"


def num_steps(cfg: TrainConfig, task: Task) -> int:
    """Estimate the number of steps of a training; a corpus, whose size is not known here, counts as one batch."""
    if cfg.trainer.steps is not None:
        return cfg.trainer.steps
    batches = 1 if task.train_size is None else math.ceil(task.train_size / cfg.trainer.batch_size)
    return round((cfg.trainer.epochs or 0) * batches)


class Kernels(NamedTuple):
    """What a training computes with: the scores of a step, its dropout masks, the scores of an evaluation."""

    forward: Callable[..., Score]
    masks: Callable[..., dict[str, Tensor] | None]
    scoring: Callable[..., Score]


def kernels_of(step: str, cfg: TrainConfig, task: Task, model: Transformer | Lstm) -> Kernels:
    """The kernels of a step: plain, torch.compile or compiled graph, of runs.run.STEPS.

    A graph's evaluations are not compiled. In it, sequences of one length get a compiled graph of the whole network,
    those of a corpus one of each kind of sub-layer, for all layers and lengths.
    """
    plain = per_seed(model)
    in_parts = step == "compiled graph" and isinstance(task, Corpus)
    if step == "plain":
        return Kernels(plain, dropout_masks, plain)
    if in_parts:
        forward = plain
        if isinstance(own := build_model(cfg.model, task), Transformer):
            own.through = compiled(Sublayer.__call__, dynamic=True)
            forward = per_seed(own)
    else:
        any_size = step == "torch.compile" and (isinstance(task, Corpus) or not model.vectorised)
        # torch's compiler ignores our vmap rule and would run the fused kernel seed by seed
        forward = compiled(per_seed(model, "table"), dynamic=any_size)
    if step == "torch.compile":
        return Kernels(forward, dropout_masks, forward)
    return Kernels(forward, compiled(dropout_masks, dynamic=in_parts), plain)


def difference(ours: Iterable[Tensor], theirs: Iterable[Tensor], precision: str) -> str | None:
    """Say by how much compiled gradients (S, ...) differ from plain ones; None if by no more than rounding, or if plain
    ones are not finite. Of each seed, the norm of the difference over all parameters, relative to the gradient's."""
    pairs = [(a.flatten(1).double(), b.flatten(1).double()) for a, b in zip(ours, theirs, strict=True)]
    apart_S = torch.stack([(a - b).norm(dim=1) for a, b in pairs]).norm(dim=0)
    size_S = torch.stack([b.norm(dim=1) for _, b in pairs]).norm(dim=0)
    if not size_S.isfinite().all() or (apart_S <= ROUNDING[precision] * size_S).all():
        return None
    worst = (apart_S / size_S).nan_to_num(math.inf).max().item()
    return (
        f"compiled gradients differ from plain ones by {worst:.1g} of them, where {ROUNDING[precision]:g} is rounding"
    )


def compiled(forward: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """Compile the function into one graph for each shape of batch; torch raises if it cannot trace the whole function.

    dynamic: one graph serves all batch sizes; torch 2.13 cannot trace a linear map under vmap that way.
    """
    # The compiler cannot trace SciPy, so the graph holds inverse_phi's result as a constant. This is declared here and
    # not at the function, because the declaration imports the compiler.
    torch.compiler.assume_constant_result(inverse_phi)
    run = torch.compile(forward, dynamic=dynamic, fullgraph=True)
    # The last batch of an epoch and batches of fewer seeds need graphs of their own: a few for each seed. torch would
    # stop at 8 graphs. A float, such as a rate of dropout, would be an argument of kernels that serve all sizes.
    limits = dict.fromkeys(("cache_size_limit", "accumulated_cache_size_limit"), 1 << 20) | {"specialize_float": True}

    def within_limits(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(limits):
            return run(*arguments)

    return within_limits
