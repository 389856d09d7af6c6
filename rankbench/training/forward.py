"""The forward pass of a model with the weights of several seeds.

Shapes: S seed, B batch, N token, C output.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from rankbench.config.schema import TrainConfig
from rankbench.model.lstm import Lstm
from rankbench.model.transformer import Transformer
from rankbench.tasks import Corpus, Task
from rankbench.tasks.task import Score, score

# Most numbers in the states of all layers and seeds of one forward pass. CPU: twenty seeds of the sorting network
# (6 layers of width 48) with batches of 100 sequences are 1.30 to 1.44 times as fast in two groups of ten as one after
# another, and 1.17 to 1.37 times as fast all at once (three comparisons). With batches of 30, where all twenty stay
# below this limit, they are 2.4 times as fast. GPU: with this many, a training step keeps some 20 GB.
STATES_AT_A_TIME = {"cpu": 5 << 19, "cuda": 1 << 28}


def seeds_at_a_time(cfg: TrainConfig, task: Task, vectorised: bool, device: str, compiles: bool) -> int:
    """Number of seeds that one forward pass takes: as many as fit a CPU's cache, or a GPU's memory.

    With a corpus, one seed on a CPU, where the long sequences keep a core busy, and one if the pass is compiled.
    """
    if not vectorised or (isinstance(task, Corpus) and (compiles or device == "cpu")):
        return 1
    num_sequences = math.ceil(cfg.trainer.batch_size / cfg.trainer.accumulate)
    numbers_of_a_seed = num_sequences * task.length * cfg.model.width * cfg.model.layers
    return max(1, STATES_AT_A_TIME[device] // numbers_of_a_seed)


def per_seed(model: Transformer | Lstm, kernel_beside: str = "side_by_side") -> Callable[..., Score]:
    """Function (weights, inputs and targets of all seeds, stacked dropout masks or None) -> Score by seed.

    Weights are stacked, except those of a single seed. Several seeds run under vmap. kernel_beside: the attention of
    several Transformers, from rankbench.model.attention.KERNELS.
    """
    call = with_weights(model)

    def one_seed(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor, dropout: dict | None, **how: str):
        outputs_BNC = call(weights, inputs, dropout, **how)
        # bfloat16 has too few digits for averages
        outputs_BNC = outputs_BNC if outputs_BNC.dtype == torch.float64 else outputs_BNC.float()
        return score(outputs_BNC, targets)

    def side_by_side(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor, dropout: dict | None):
        if len(targets) == 1:  # vmap over one seed costs time and gains nothing
            masks = None if dropout is None else {name: mask[0] for name, mask in dropout.items()}
            return Score(*(value[None] for value in one_seed(weights, inputs[0], targets[0], masks)))
        together = partial(one_seed, kernel=kernel_beside)
        return vmap(together, in_dims=(0, 0, 0, None if dropout is None else 0))(weights, inputs, targets, dropout)

    return side_by_side


def with_weights(model: nn.Module) -> Callable[..., Tensor]:
    """Function (weights by name, inputs ...) -> the model's outputs with these weights in place of its own.

    torch.func.functional_call does the same with more checks, which take a tenth of a small model's step.
    """
    owners = {name: name.rpartition(".")[::2] for name, _ in model.named_parameters()}
    slots: list[tuple[str, dict[str, Any], str]] = [
        (name, model.get_submodule(owner)._parameters, key) for name, (owner, key) in owners.items()
    ]

    def call(weights: dict[str, Tensor], *arguments: Any, **how: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return functional_call(model, weights, arguments, how)
        own = [held[key] for _, held, key in slots]
        try:
            for name, held, key in slots:
                held[key] = weights[name]
            return model(*arguments, **how)
        finally:
            for (_, held, key), weight in zip(slots, own, strict=True):
                held[key] = weight

    return call
