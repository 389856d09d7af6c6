"""The kind of training step that a training takes, and torch's compiler for one of them."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from rankbench.config.schema import TrainConfig
from rankbench.model.contraction import inverse_phi
from rankbench.runs.machine import Machine
from rankbench.tasks import Task
from rankbench.training.fused_step import library_for
from rankbench.training.graph import ungraphed
from rankbench.training.library import NoLibraryError

log = logging.getLogger(__name__)

# Steps that repay the 3 to 6 s that g++ takes for the fused step: on one core, a step of the sorting network (6 layers
# of width 48, batches of 30) is 6 to 9 ms shorter with it.
REPAID_AFTER = 600


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
        library_for(cfg, task, machine)
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


def compiled(forward: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    """Compile the function into one graph for each shape of batch; torch raises if it cannot trace the whole function.

    dynamic: one graph serves all batch sizes; torch 2.13 cannot trace a linear map under vmap that way.
    """
    # The compiler cannot trace SciPy, so the graph holds inverse_phi's result as a constant. This is declared here and
    # not at the function, because the declaration imports the compiler.
    torch.compiler.assume_constant_result(inverse_phi)
    run = torch.compile(forward, dynamic=dynamic, fullgraph=True)
    # The last batch of an epoch and batches of fewer seeds need graphs of their own: a few for each seed. torch would
    # stop at 8 graphs.
    limits = dict.fromkeys(("cache_size_limit", "accumulated_cache_size_limit"), 1 << 20)

    def within_limits(*arguments: Any) -> Any:
        with torch._dynamo.config.patch(limits):
            return run(*arguments)

    return within_limits
