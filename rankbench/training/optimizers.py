"""Update rules and learning-rate schedules, by name."""

import math

import torch
from torch import Tensor

from rankbench.config import OptimizerConfig


def build_optimizer(cfg: OptimizerConfig, parameters: list[Tensor]) -> torch.optim.Optimizer:
    """Build the optimiser of stacked parameters. Every rule here works element by element, so seeds do not mix."""
    if cfg.name == "sgd":
        return torch.optim.SGD(parameters, cfg.lr, cfg.momentum, weight_decay=cfg.weight_decay, fused=True)
    rule = torch.optim.AdamW if cfg.name == "adamw" else torch.optim.Adam
    betas = (cfg.beta1, cfg.beta2)
    return rule(parameters, cfg.lr, betas, weight_decay=cfg.weight_decay, fused=True)


def learning_rate(cfg: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate at `step` (counted from 0) of `num_steps`.

    Warm-up rises linearly to lr over the first `warmup` steps. Then: constant; linear or cosine to 0 at the end;
    multistep, times `decay` at each milestone; inverse_sqrt, lr sqrt(max(warmup, 1) / (step + 1)).
    """
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / max(num_steps - cfg.warmup, 1)
    if cfg.schedule == "linear":
        return cfg.lr * (1 - done)
    if cfg.schedule == "cosine":
        return cfg.lr * 0.5 * (1 + math.cos(math.pi * done))
    if cfg.schedule == "multistep":
        return cfg.lr * cfg.decay ** sum(step >= milestone for milestone in cfg.milestones)
    if cfg.schedule == "inverse_sqrt":
        return cfg.lr * math.sqrt(max(cfg.warmup, 1) / (step + 1))
    return cfg.lr
