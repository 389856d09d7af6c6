"""Second derivatives of the loss with respect to the parameters of two heads, from products with the Hessian.

Shapes: A head of the network.
"""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.measures.rounding import MARGIN, RandomRounding
from rankbench.model.transformer import Transformer
from rankbench.progress import counted
from rankbench.tasks import Batch
from rankbench.tasks.task import is_scored, score

SEQUENCES_AT_A_TIME = 100  # in products with the Hessian, which need several times the memory of a forward pass


def cross_gradients(
    model: Transformer, batch: Batch, probes: int, generator: torch.Generator, rounding: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Frobenius norms of the loss's second derivatives by the parameters of two heads, their standard errors, and the
    errors that rounding leaves in them (rankbench.measures.rounding); (A, A) each.

    A head's parameters are its W_Q, W_K, W_V with their biases and its W_O; heads are in order of layers; the loss is
    the mean over scored tokens. ||H_ab||^2 = E||H_ab v||^2 over random signs v of head b (Hutchinson), one product with
    the Hessian for each head and probe. (a, b) and (b, a) are independent estimates of the same number; the result is
    their mean. rounding: generator of the first probe's random rounding.
    """
    parts = head_parameters(model)
    names = {name for part in parts for name in part}
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters() if name in names}
    squares = torch.zeros(probes, len(parts), len(parts), dtype=torch.float64)
    floor_AA, random_rounding = torch.zeros_like(squares[0]), RandomRounding(rounding)
    both = product(range(probes), enumerate(parts))
    for probe, (b, part) in counted(both, probes * len(parts), "independence: products with the Hessian"):
        direction = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for name, at in part.items():
            shape = direction[name][at].shape
            signs = torch.randint(2, shape, generator=generator) * 2 - 1
            direction[name][at] = signs.to(direction[name])
        products = hessian_product(model, batch, parameters, direction)
        squares[probe, :, b] = _squares(products, parts)
        if probe == 0:
            with random_rounding:
                perturbed = hessian_product(model, batch, parameters, direction)
            errors = {name: perturbed[name] - products[name] for name in products}
            floor_AA[:, b] = MARGIN * _squares(errors, parts).sqrt()
    squares = (squares + squares.mT) / 2
    norm_AA = squares.mean(0).sqrt()
    error_AA = squares.std(0) / probes**0.5 / (2 * norm_AA)  # of a square root: half the relative error
    return norm_AA, error_AA, torch.maximum(floor_AA, floor_AA.mT)


def _squares(products: dict[str, Tensor], parts: list[dict[str, tuple]]) -> Tensor:
    """||.||^2 of the numbers that belong to each head, (A,)."""
    squares: list = [sum(products[name][at].square().sum() for name, at in part.items()) for part in parts]
    return torch.stack(squares)


def hessian_product(
    model: Transformer, batch: Batch, parameters: dict[str, Tensor], direction: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The Hessian of the mean loss with respect to these parameters times a direction, in chunks of sequences."""
    parameters = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    total = [torch.zeros_like(parameter) for parameter in parameters.values()]
    weights, tokens = list(parameters.values()), torch.zeros((), dtype=torch.long, device=batch.inputs.device)
    for begin in range(0, len(batch.inputs), SEQUENCES_AT_A_TIME):
        chunk = batch[begin : begin + SEQUENCES_AT_A_TIME]
        tokens = tokens + is_scored(chunk.targets).sum()
        with torch.enable_grad():
            # the fused kernel has no second derivative
            outputs = torch.func.functional_call(model, parameters, (chunk.inputs,), {"kernel": "table"})
            gradients = torch.autograd.grad(score(outputs, chunk.targets).loss, weights, create_graph=True)
            slope: Any = sum((part * direction[name]).sum() for name, part in zip(parameters, gradients, strict=True))
        products = torch.autograd.grad(slope, weights, materialize_grads=True)
        total = [so_far + product for so_far, product in zip(total, products, strict=True)]
    return {name: value / tokens for name, value in zip(parameters, total, strict=True)}


def head_parameters(model: Transformer) -> list[dict[str, tuple]]:
    """For each head, the parameters that hold its own, with their indices. ConfigError if heads share parameters."""
    needs, cfg = "analysis=independence: needs heads with parameters of their own", model.cfg
    if cfg.weight_norm != "none":
        scaled = f"with model.weight_norm={cfg.weight_norm} the heads of a layer share a scale"
        raise ConfigError(f"{needs}, but {scaled}; use none")
    if cfg.shared_layers:
        raise ConfigError(f"{needs}, but with model.shared_layers=true those of all layers are the same; use false")
    parts = []
    for layer, attention in enumerate(model.attentions):
        inner, width = attention.heads * attention.head_width, attention.head_width
        if attention.from_latent is not None or {attention.out.in_features, *attention.rows} != {inner}:
            keys = "model.value_width, model.kv_groups and model.latent_width"
            raise ConfigError(f"{needs}, of one width; set {keys} to null")
        for head in range(attention.heads):
            own = torch.arange(head * width, (head + 1) * width)
            rows = torch.cat([own + begin for begin in range(0, attention.qkv.out_features, inner)])
            part = {f"blocks.{layer}.attention.qkv.weight": (rows,)}
            if attention.qkv.bias is not None:
                part[f"blocks.{layer}.attention.qkv.bias"] = (rows,)
            parts.append(part | {f"blocks.{layer}.attention.out.weight": (slice(None), own)})
    return parts
