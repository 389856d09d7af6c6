"""Transformers that have only plain softmax heads, for closed forms that cover nothing else."""

import dataclasses
from typing import Any

import torch

from rankbench.config import ModelConfig
from rankbench.model.initialise import allocate, initialise
from rankbench.model.transformer import Transformer

# Config keys of a model with one plain softmax head of full rank and no skip; they replace the given model's keys.
BARE: dict = {"heads": 1, "head_width": None, "value_width": None, "kv_groups": None, "latent_width": None}
BARE |= {"attention": "dot", "temperature": 1.0, "mix_attention": 1.0, "mix_identity": 0.0, "mix_uniform": 0.0}
BARE |= {"exclusive": False, "skips": None}
BARE |= {"head_reduction": "sum", "tied_qk": False, "mask": "none", "window": None, "skip": False, "skip_scale": 1.0}
BARE |= {"branch_scale": 1.0, "mlp": False, "mlp_ratio": 1.0, "mlp_skip": False, "activation": "relu", "norm": "none"}
BARE |= {"value_residual": 0.0, "embedding_skip": 0.0, "hyper_connections": "none", "streams": 4}
BARE |= {"stream_deviation": 0.0, "norm_kind": "layernorm", "norm_affine": True, "norm_scale": "none"}
BARE |= {"bias": False, "dropout": 0.0, "positions": "none"}
BARE |= {"embedding_norm": False, "read_in": "identity", "read_out": "identity", "init": "pytorch"}
BARE |= {"attention_init": None, "mlp_gain": 1.0, "values": "free", "weight_norm": "none"}
BARE |= {"init_gain": 3**0.5}  # times U(+-1/sqrt(d)): every matrix has entries of variance 1/d
UNIFORM = {"mix_attention": 0.0, "mix_uniform": 1.0}  # every query averages the tokens that it sees


def bare_network(cfg: ModelConfig, num_inputs: int, num_outputs: int, tokens: int, /, **keys: Any) -> Transformer:
    """Build a float64 network of plain heads on coordinates, with these keys of the model changed and weights not yet
    set. cfg: the config of any Transformer of rankbench."""
    changed = dataclasses.replace(cfg, **(BARE | keys))
    with torch.device("meta"):
        sizes: Any = {"num_inputs": num_inputs, "num_outputs": num_outputs, "length": tokens}
        network = Transformer(changed, input_kind="coordinates", **sizes)
    allocate(network)
    return network.double().requires_grad_(False)


def drawn_network(cfg: ModelConfig, generator: torch.Generator, tokens: int, /, **keys: Any) -> Transformer:
    """The same network on states of the width in `keys`, with weights drawn from the generator."""
    network = bare_network(cfg, keys["width"], keys["width"], tokens, **keys)
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
