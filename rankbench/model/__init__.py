"""The models: one Transformer with toggles, built for a task and drawn from a seed."""

import torch

from rankbench.config import ModelConfig
from rankbench.model.transformer import Transformer, initialise
from rankbench.seeds import generator_for
from rankbench.tasks.task import Task


def build_model(cfg: ModelConfig, task: Task) -> Transformer:
    """The model on the meta device: shapes without values, and no draw from torch's global generator."""
    with torch.device("meta"):
        return Transformer(
            cfg,
            input_kind=task.input_kind,
            num_inputs=task.num_inputs,
            num_outputs=task.num_outputs,
            length=task.length,
            padded=task.padded,
        )


def initial_model(cfg: ModelConfig, task: Task, seed: int) -> Transformer:
    """The model as training begins with it at this seed, float32, on the CPU."""
    model = build_model(cfg, task).to_empty(device="cpu")
    initialise(model, generator_for(seed, "initialisation"))
    return model
