"""Update rules and learning-rate schedules, by name.

Shapes: S seed, O output, I input of a matrix.
"""

import inspect
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rankbench.config import OptimizerConfig

# Of Muon: a quintic that takes singular values of (0, 1] near 1 in a few rounds (Jordan et al. 2024), and the size of
# the steps, which is that of Adam's (Liu et al. 2025, Muon is scalable for LLM training, eq. 4).
QUINTIC, ROUNDS = (3.4445, -4.7750, 2.0315), 5
STEP_SIZE = 0.2  # root mean square of a step over the learning rate


def build_optimizer(
    cfg: OptimizerConfig, parameters: list[Tensor], rows: Sequence[list[int] | None]
) -> torch.optim.Optimizer:
    """Build the optimiser of stacked parameters. Every rule here works element by element or, for the matrices, seed by
    seed, so seeds do not mix.

    rows: of each parameter the rows of the maps that are stacked in it; None for what is no matrix of a layer.
    """
    if cfg.name == "sgd":
        return Sgd(parameters, cfg.lr, cfg.momentum, weight_decay=cfg.weight_decay, fused=True)
    rule = AdamW if cfg.name == "adamw" else Adam
    betas = (cfg.beta1, cfg.beta2)
    if cfg.name == "muon":
        return Muon(parameters, rows, cfg.lr, betas, cfg.momentum, cfg.weight_decay)
    return rule(parameters, cfg.lr, betas, weight_decay=cfg.weight_decay, fused=True)


class _Uncompiled:
    """Methods of torch's optimisers without what is around them, which imports the compiler to keep it away from them:
    a fifth of a command's start. Nothing here compiles an optimiser."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class Sgd(_Uncompiled, torch.optim.SGD):
    """torch's."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class Adam(_Uncompiled, torch.optim.Adam):
    """torch's."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(_Uncompiled, torch.optim.AdamW):
    """torch's."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(AdamW):
    """Muon for matrices (S, O, I): the momentum, orthogonalised. AdamW for everything else.

    Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; with Nesterov's momentum, decoupled
    weight decay, and steps of the size of Adam's, so that the same learning rate suits all parameters (Liu et al.
    2025). Each of the maps that are stacked in a matrix is orthogonalised by itself.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        rows: Sequence[list[int] | None],
        lr: float,
        betas: tuple[float, float],
        momentum: float,
        weight_decay: float,
    ) -> None:
        super().__init__(parameters, lr, betas, weight_decay=weight_decay, fused=True)
        self.rows, self.momentum = list(rows), momentum

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Take one step. What has no gradient stays."""
        (group,) = self.param_groups
        gradients = {}
        for weight_SOI, rows in zip(group["params"], self.rows, strict=True):
            if rows is not None and weight_SOI.grad is not None:
                gradients[weight_SOI] = weight_SOI.grad
                self._step_of_matrix(weight_SOI, rows, group["lr"], group["weight_decay"])
                weight_SOI.grad = None  # AdamW passes it by
        super().step(closure)
        for weight_SOI, gradient_SOI in gradients.items():
            weight_SOI.grad = gradient_SOI

    def _step_of_matrix(self, weight_SOI: Tensor, rows: list[int], lr: float, weight_decay: float) -> None:
        state, gradient_SOI = self.state[weight_SOI], weight_SOI.grad
        if not state:
            # AdamW wants a count in every state that it loads
            state |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(weight_SOI)}
        state["step"] += 1
        state["momentum_buffer"].mul_(self.momentum).add_(gradient_SOI)
        ahead_SOI = gradient_SOI + self.momentum * state["momentum_buffer"]
        weight_SOI.mul_(1 - lr * weight_decay)
        for map_SOI, direction_SOI in zip(weight_SOI.split(rows, 1), ahead_SOI.split(rows, 1), strict=True):
            size = STEP_SIZE * math.sqrt(max(map_SOI.shape[1:]))
            map_SOI.add_(orthogonalised(direction_SOI), alpha=-lr * size)


def orthogonalised(x_SOI: Tensor) -> Tensor:
    """Each matrix with its singular values near 1 (.68 to 1.14; those far below the largest stay below), by Newton and
    Schulz's iteration; a matrix of zeros stays."""
    wide = x_SOI.shape[-2] <= x_SOI.shape[-1]
    x_SRC = x_SOI if wide else x_SOI.mT
    x_SRC = x_SRC / x_SRC.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x_SOI.dtype).tiny)
    first, third, fifth = QUINTIC
    for _ in range(ROUNDS):
        gram_SRR = x_SRC @ x_SRC.mT
        x_SRC = first * x_SRC + (third * gram_SRR + fifth * gram_SRR @ gram_SRR) @ x_SRC
    return x_SRC if wide else x_SRC.mT


@torch.no_grad()
def cap_singular_values(weight_SOI: Tensor, rows: list[int], cap: float) -> None:
    """Set the singular values above `cap` of each of the stacked maps to it, in place; exact, by SVD.

    The nearest matrix whose spectral norm is at most `cap`; Newhouse et al. 2025, Training transformers with enforced
    Lipschitz constants, take polynomials that come near it. Maps without such a singular value stay bit for bit.
    """
    for map_SOI in weight_SOI.split(rows, 1):
        finite_S11 = map_SOI.isfinite().all((1, 2), keepdim=True)  # a seed that has diverged stays, too
        u_SOR, s_SR, v_SRI = torch.linalg.svd(torch.where(finite_S11, map_SOI, 0), full_matrices=False)
        capped_SOI = u_SOR * s_SR.clamp(max=cap)[:, None] @ v_SRI
        map_SOI.copy_(torch.where(finite_S11 & (s_SR[:, :1, None] > cap), capped_SOI, map_SOI))


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
