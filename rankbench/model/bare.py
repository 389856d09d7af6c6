"""Transformers that have only plain softmax heads, for closed forms that cover nothing else."""

from typing import Any

import torch

from rankbench.config.model import ModelConfig
from rankbench.model.initialise import allocate, initialise
from rankbench.model.transformer import Transformer

# Config keys of a model with one plain softmax head of full rank and no skip, where they differ from the defaults
BARE: dict = {"heads": 1, "skip": False, "mlp": False, "mlp_skip": False, "norm": "none", "bias": False}
BARE |= {"activation": "relu", "positions": "none", "read_in": "identity", "read_out": "identity"}
BARE |= {"init_gain": 3**0.5}  # times U(+-1/sqrt(d)): every matrix has entries of variance 1/d
UNIFORM = {"mix_attention": 0.0, "mix_uniform": 1.0}  # every query averages the tokens that it sees
# Each token by itself with a skip: a branch of normed tokens has variance 1
BY_ITSELF: dict = {"mix_attention": 0.0, "mix_identity": 1.0, "skip": True}


def bare_network(num_inputs: int, num_outputs: int, tokens: int, /, **keys: Any) -> Transformer:
    """Build a float64 network of plain heads on coordinates, with these keys of the model changed and weights not yet
    set."""
    with torch.device("meta"):
        sizes: Any = {"num_inputs": num_inputs, "num_outputs": num_outputs, "length": tokens}
        network = Transformer(ModelConfig(**(BARE | keys)), input_kind="coordinates", **sizes)
    allocate(network)
    return network.double().requires_grad_(False)


def drawn_network(generator: torch.Generator, tokens: int, /, **keys: Any) -> Transformer:
    """The same network on states of the width in `keys`, with weights drawn from the generator."""
    network = bare_network(keys["width"], keys["width"], tokens, **keys)
    initialise(network, generator)
    return network


def with_identity_values(network: Transformer) -> Transformer:
    """Set W_V = W_O = 1 in every layer, in place, and return the network."""
    for attention in network.attentions:
        for weight in (attention.qkv.weight.split(attention.rows)[-1], attention.out.weight):
            weight.copy_(torch.eye(len(weight)))
    return network


def with_identity_maps(network: Transformer) -> Transformer:
    """Set W_Q = W_K = W_V = W_O = 1 in every layer, in place, and return the network."""
    for attention in network.attentions:
        for weight in attention.qkv.weight.split(attention.rows):
            weight.copy_(torch.eye(len(weight)))
    return with_identity_values(network)
