"""Initial weights of a Transformer."""

import math

import torch
from torch import nn

from rankbench.config.keys import ConfigError
from rankbench.model.attention import Attention
from rankbench.model.linear import SigmaReparam, free_weight
from rankbench.model.norm import Norm
from rankbench.model.transformer import HyperConnection, Transformer


def allocate(model: nn.Module) -> None:
    """Replace the weights of a model on the meta device by uninitialised float32 tensors on the CPU.

    Module.to_empty would do the same, but it imports torch's symbolic shapes: a tenth of a command's start-up time.
    """
    model.load_state_dict({name: torch.empty(weight.shape) for name, weight in model.state_dict().items()}, assign=True)


def initialise(model: Transformer, generator: torch.Generator, query_gain: float = 1.0) -> None:
    """Draw every weight from `generator`, by the scheme in the model's config.

    pytorch: the defaults of torch.nn, U(+-1/sqrt(fan_in)), embeddings N(0, 1). glorot: Xavier uniform, W_Q, W_K and W_V
    (all heads of each together) with their own fans. bert: N(0, 0.02^2). scaled: bert with the maps that write to the
    residual stream divided by sqrt(2 layers) (Radford et al. 2019). All schemes but pytorch start biases at 0.
    attention_init = s draws the matrices of attention from U(+-s/sqrt(width)) instead (Kim et al. 2021, app. I).
    init_gain multiplies every matrix of the blocks (with weight_norm=sigma it is the initial gamma); mlp_gain also
    multiplies those of the MLPs, and query_gain W_Q with its bias. values=orthogonal draws W_V and W_O (all heads
    together) orthogonal instead; values=uniform draws them like pytorch; values=zero sets W_V and its bias to 0. A
    weighting's own parameters are drawn as the weighting defines.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
        for name, module in model.named_modules():
            gain = model.cfg.init_gain * (model.cfg.mlp_gain if ".mlp." in name else 1)
            if isinstance(module, Norm) and module.weight is not None:
                module.weight.fill_(1)
                if module.shift is not None:
                    module.shift.zero_()
            elif isinstance(module, HyperConnection):
                module.start(model.cfg.stream_deviation, generator)
            elif isinstance(module, nn.Embedding):
                deviation = {"pytorch": 1.0, "glorot": module.embedding_dim**-0.5}.get(model.cfg.init, 0.02)
                module.weight.normal_(0, deviation, generator=generator)
            elif isinstance(module, SigmaReparam):
                module.gamma.fill_(gain)
            elif isinstance(module, Attention):
                for own, start in module.weighting.parameters(module).items():
                    start.draw(module.own[own], generator)
            elif isinstance(module, nn.Linear):
                _draw_linear(model, name, module, generator)
                if name.startswith("blocks."):
                    free_weight(module).mul_(gain)
                if name.endswith("attention.qkv"):
                    for stacked in (free_weight(module), module.bias):
                        if stacked is not None:
                            stacked.split(_maps(model, name, module))[0].mul_(query_gain)
        for name, parameter in model.named_parameters():
            if parameter.isnan().any():
                is_own = ".attention.own." in name
                of = f"model.attention={model.cfg.attention}" if is_own else f"model.kind={model.cfg.kind}"
                instead = "" if is_own else "; hold it in an nn.Linear or an nn.Embedding, which are drawn"
                raise ConfigError(f"{of}: its parameter {name} has no initial value{instead}")


def _draw_linear(model: Transformer, name: str, module: nn.Linear, generator: torch.Generator) -> None:
    """Draw the weight and the bias of the linear map of this name, before any gain."""
    cfg, maps = model.cfg, _maps(model, name, module)
    for weight in free_weight(module).split(maps):  # the fused query-key-value matrix holds several maps
        fan_out, fan_in = weight.shape
        limit = {"pytorch": fan_in**-0.5, "glorot": math.sqrt(6 / (fan_in + fan_out))}.get(cfg.init)
        if cfg.attention_init is not None and ".attention." in name:
            limit = cfg.attention_init / math.sqrt(cfg.width)
        if limit is not None:
            weight.uniform_(-limit, limit, generator=generator)
        else:
            writes = cfg.init == "scaled" and name.endswith(("attention.out", "mlp.down"))
            weight.normal_(0, 0.02 / math.sqrt(2 * cfg.layers) if writes else 0.02, generator=generator)
    if module.bias is not None:
        if cfg.init == "pytorch":
            module.bias.uniform_(-(module.in_features**-0.5), module.in_features**-0.5, generator=generator)
        else:
            module.bias.zero_()
    if cfg.values != "free" and name.endswith(("qkv", "attention.out")):
        _set_values(module, maps, cfg.values, generator)


def maps_of_layers(model: Transformer) -> dict[str, list[int]]:
    """For each matrix of the layers, by its parameter's name: the number of rows of each map that is stacked in it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(free_weight(module))]: _maps(model, name, module)
        for name, module in model.blocks.named_modules(prefix="blocks")
        if isinstance(module, nn.Linear)
    }


def _maps(model: Transformer, name: str, module: nn.Linear) -> list[int]:
    """Number of rows of each map that is stacked in the linear map of this name."""
    holder = model.get_submodule(name.rpartition(".")[0])
    if isinstance(holder, Attention) and name.endswith(("qkv", "from_latent")):
        return holder.rows if name.endswith("qkv") else holder.rows_of_latent
    return [module.out_features]


def _set_values(module: nn.Linear, maps: list[int], values: str, generator: torch.Generator) -> None:
    """Draw W_V or W_O orthogonal (if not square: rows or columns orthonormal) or uniform, or set W_V and bias to 0."""
    weight = free_weight(module).split(maps)[-1]
    if values == "orthogonal":
        nn.init.orthogonal_(weight, generator=generator)
    elif values == "uniform":
        weight.uniform_(-(module.in_features**-0.5), module.in_features**-0.5, generator=generator)
    elif len(maps) > 1:
        weight.zero_()
        if module.bias is not None:
            module.bias.split(maps)[-1].zero_()
