"""Networks of ours without anything that a law does not speak of."""

import torch

from rankbench.config import ModelConfig
from rankbench.model.bare import bare_network
from rankbench.model.transformer import Transformer, initialise

UNIFORM = {"mix_attention": 0.0, "mix_uniform": 1.0}  # every query averages the tokens that it sees


def bare(cfg: ModelConfig, generator: torch.Generator, tokens: int, width: int, **keys: object) -> Transformer:
    """A network of plain heads on states of this width, with these keys of the model changed, drawn from the generator.

    cfg: of any of our Transformers.
    """
    network = bare_network(cfg, width, width, tokens, width=width, **keys)
    initialise(network, generator)
    return network


def with_identity_values(network: Transformer) -> Transformer:
    """The network with W_V = W_O = 1 in every layer."""
    for attention in network.attentions:
        for weight in (attention.qkv.weight.split(attention.rows)[-1], attention.out.weight):
            weight.copy_(torch.eye(len(weight)))
    return network
