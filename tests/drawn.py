"""Random numbers, and small networks with random parameters in float64, that several test files draw."""

import torch
from torch import Tensor, nn

from rankbench.config.model import ModelConfig
from rankbench.model.initialise import initialise
from rankbench.model.transformer import Transformer


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def transformer(**changes: object) -> Transformer:
    """A Transformer in float64 without values, from 7 tokens to 4 classes, with these keys and sizes changed."""
    sizes = {"input_kind": "tokens", "num_inputs": 7, "num_outputs": 4, "length": 5, "padded": False}
    sizes |= {name: changes.pop(name) for name in list(changes) if name in sizes}
    with torch.device("meta"):
        model = Transformer(ModelConfig(**({"layers": 2, "heads": 2, "width": 6} | changes)), **sizes)
    return model.to_empty(device="cpu").double().eval()


def initialised(seed: int = 0, **changes: object) -> Transformer:
    """The same with the weights with which a training begins."""
    model = transformer(**changes)
    initialise(model, generator(seed))
    return model


def randomised(module: nn.Module, draws: torch.Generator, deviation: float = 0.5) -> nn.Module:
    """The module in float64 with every parameter drawn at random, norms and biases included: nothing stays 0 or 1."""
    for parameter in module.double().parameters():
        parameter.data = deviation * torch.randn(parameter.shape, generator=draws, dtype=torch.float64)
    return module


def label_of(changes: dict) -> str:
    """The name of a case with these keys changed."""
    return "-".join(f"{key}={value}" for key, value in changes.items() if key != "seed")
