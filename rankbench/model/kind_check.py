"""A quick check that a network of another kind is the sum of its parts, for kinds that others write.

Shapes: B batch, N token, C classes or output dimensions.
"""

from dataclasses import replace
from typing import Any

import torch

from rankbench.config.keys import ConfigError
from rankbench.config.model import ModelConfig
from rankbench.model import initial_model
from rankbench.seeds import generator_for
from rankbench.tasks.task import Corpus, Task

SEQUENCES, MOST_LAYERS = 3, 2
ROUNDING = 1e-9  # of a few layers on numbers of order 1 in float64, with a wide margin


@torch.no_grad()
def check_kind(cfg: ModelConfig, task: Task) -> None:
    """Raise ConfigError unless a small network of this kind gives outputs of the task's shape, gives each sequence the
    same outputs alone, and gives what its embedding, layers and read-out give, which are all that analyses measure."""
    begins = f"model.kind={cfg.kind}"
    network: Any = initial_model(replace(cfg, layers=min(cfg.layers, MOST_LAYERS)), task, seed=0).double().eval()
    for name, _ in network.named_buffers():
        raise ConfigError(f"{begins}: its buffer {name} would lose its value; compute it where it is used")
    drawn = (
        task.splits()["test"][:SEQUENCES]
        if isinstance(task, Corpus)
        else task.sample(SEQUENCES, generator_for(0, "check"))
    )
    inputs = drawn.to("cpu", torch.float64).inputs
    outputs_BNC = network(inputs)
    wanted = (*inputs.shape[:2], task.num_outputs)
    if outputs_BNC.shape != wanted:
        raise ConfigError(f"{begins}: gave outputs of shape {tuple(outputs_BNC.shape)}; wanted is {wanted}")
    (*_, last_BND) = network.states_after_layers(inputs)
    if not torch.allclose(network.read_out(network.finish(last_BND)), outputs_BNC, rtol=ROUNDING, atol=ROUNDING):
        raise ConfigError(
            f"{begins}: its outputs are not those of its embed, layers and read_out one after another, which analyses "
            "measure; change these, as embed, and leave forward as it is"
        )
    alone_BNC = torch.cat([network(inputs[index : index + 1]) for index in range(len(inputs))])
    if not torch.allclose(alone_BNC, outputs_BNC, rtol=ROUNDING, atol=ROUNDING):
        raise ConfigError(
            f"{begins}: a sequence has other outputs alone than beside others; let no sequence change another, and "
            "draw no random numbers"
        )
