"""The models: one Transformer with toggles, and a recurrent baseline; built for a task and drawn from a seed."""

import torch

from rankbench.config import ConfigError, ModelConfig
from rankbench.model.lstm import Lstm, initialise_lstm
from rankbench.model.transformer import Transformer, initialise
from rankbench.seeds import generator_for
from rankbench.tasks.task import Corpus, Task

KINDS: dict[str, type[Transformer] | type[Lstm]] = {"transformer": Transformer, "lstm": Lstm}


def check_fits(cfg: ModelConfig, task: Task) -> None:
    """ConfigError for a model that would see what it is to predict."""
    if isinstance(task, Corpus) and cfg.mask != "causal":
        raise ConfigError(
            f"model.mask={cfg.mask}: task={task.name} asks for the next token, which this model would see; "
            "use model.mask=causal, or model=causal"
        )


def build_model(cfg: ModelConfig, task: Task) -> Transformer | Lstm:
    """The model on the meta device: shapes without values, and no draw from torch's global generator."""
    check_fits(cfg, task)
    # before the device is changed: a task may have to read its text to know
    sizes = {"num_inputs": task.num_inputs, "num_outputs": task.num_outputs, "length": task.length}
    with torch.device("meta"):
        return KINDS[cfg.kind](cfg, input_kind=task.input_kind, padded=task.padded, **sizes)


def initial_model(cfg: ModelConfig, task: Task, seed: int) -> Transformer | Lstm:
    """The model as training begins with it at this seed, float32, on the CPU."""
    model = build_model(cfg, task).to_empty(device="cpu")
    draw = initialise_lstm if isinstance(model, Lstm) else initialise
    draw(model, generator_for(seed, "initialisation"))
    return model
