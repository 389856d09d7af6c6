"""The models: a Transformer with toggles and a recurrent baseline, built for a task and drawn from a seed."""

import torch

from rankbench.config.keys import ConfigError
from rankbench.config.model import ModelConfig
from rankbench.model.initialise import allocate, initialise
from rankbench.model.lstm import Lstm, initialise_lstm
from rankbench.model.transformer import Transformer
from rankbench.seeds import generator_for
from rankbench.tasks.task import Corpus, Task

KINDS: dict[str, type[Transformer] | type[Lstm]] = {"transformer": Transformer, "lstm": Lstm}


def build_model(cfg: ModelConfig, task: Task) -> Transformer | Lstm:
    """Build the model on the meta device: shapes without values, and no draw from torch's global generator.

    ConfigError if model and task do not fit.
    """
    return _on_meta(cfg, task, task.num_inputs, task.num_outputs)


def skeleton(cfg: ModelConfig, task: Task) -> Transformer | Lstm:
    """Build the model for checks: like build_model, but reads no text; sizes that depend on a text's alphabet are 1."""
    num_inputs = 1 if isinstance(task, Corpus) or bool(getattr(task, "files", ())) else task.num_inputs
    model = _on_meta(cfg, task, num_inputs, 1 if isinstance(task, Corpus) else task.num_outputs)
    if isinstance(model, Transformer) and not task.padded:  # the length of padded sequences depends on their text
        model.blocks[0].attention.num_keys(task.length)
    return model


def _on_meta(cfg: ModelConfig, task: Task, num_inputs: int, num_outputs: int) -> Transformer | Lstm:
    if getattr(task, "asks_for_next", False) and cfg.mask != "causal":
        raise ConfigError(
            f"model.mask={cfg.mask}: task={task.name} asks for the next token, which this model would see; "
            "use model.mask=causal"
        )
    sizes = {"num_inputs": num_inputs, "num_outputs": num_outputs, "length": task.length}
    try:
        with torch.device("meta"):
            return KINDS[cfg.kind](cfg, input_kind=task.input_kind, padded=task.padded, **sizes)
    except (RuntimeError, TypeError) as error:  # torch has no class of its own for either kind of overflow
        if "overflow" not in str(error).lower():
            raise
        raise ConfigError(
            f"task={task.name}: {task.length} tokens of width {cfg.width} take more than 2^63 bytes; give smaller sizes"
        ) from None


def initial_model(cfg: ModelConfig, task: Task, seed: int) -> Transformer | Lstm:
    """The model with this seed's initial weights, float32, on the CPU."""
    model = build_model(cfg, task)
    allocate(model)
    generator = generator_for(seed, "initialisation")
    if isinstance(model, Lstm):
        initialise_lstm(model, generator)
    else:
        initialise(model, generator, cfg.query_gains[seed % len(cfg.query_gains)])
    return model
