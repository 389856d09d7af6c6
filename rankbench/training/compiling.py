"""torch's compiler for training: when it pays, and its graphs of the forward and the backward pass."""

import math
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch

from rankbench.config import TrainConfig
from rankbench.model import skeleton
from rankbench.model.contraction import inverse_phi
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.tasks import Corpus, Task

# Measured on one CPU core with the sorting network (6 layers of width 48, batches of 30 and 100, one and five seeds):
PACE = 2.5e10  # floating-point operations per second of an uncompiled step
LAYER = 1e-3  # seconds that each layer adds to a step, however small the layer is
LONG = 300.0  # seconds of training from which the third that graphs save is twice the 30 to 50 s of compiling


def is_compiled(cfg: TrainConfig, task: Task, machine: Machine) -> bool:
    """Whether trainer.compile compiles: under auto, if the training is long enough to repay the compiler's minute.

    auto decides from the config, not from a clock, so that the same command always gets the same decision. It does not
    compile for a corpus, whose batches have many lengths, or on a CPU without a C++ compiler.
    """
    if cfg.trainer.compile != "auto":
        return cfg.trainer.compile == "true"
    network = skeleton(cfg.model, task)
    if isinstance(task, Corpus) or not isinstance(network, Transformer) or not _has_backend(machine):
        return False
    return plain_seconds(cfg, task, sum(weight.numel() for weight in network.parameters())) >= LONG


def plain_seconds(cfg: TrainConfig, task: Task, num_weights: int) -> float:
    """Estimate the seconds of an uncompiled training on one CPU core."""
    trainer = cfg.trainer
    batches = 1 if task.train_size is None else math.ceil(task.train_size / trainer.batch_size)
    steps = trainer.steps if trainer.steps is not None else trainer.epochs * batches
    operations = 6 * num_weights * cfg.replicas * trainer.batch_size * task.length
    return steps * (cfg.model.layers * LAYER + operations / PACE)


def _has_backend(machine: Machine) -> bool:
    default = "clang++" if sys.platform == "darwin" else "g++"  # torch's
    return machine.device.type == "cuda" or shutil.which(os.environ.get("CXX", default)) is not None


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
        with torch._dynamo.config.patch(**limits):
            return run(*arguments)

    return within_limits
