"""Update rules and learning-rate schedules, by name.

Shapes: S seed, O output, I input of a matrix.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.config.schema import OptimizerConfig

# Muon's quintic brings singular values in (0, 1] close to 1 in a few rounds (Jordan et al. 2024). Its steps are as
# large as Adam's (Liu et al. 2025, Muon is scalable for LLM training, eq. 4).
QUINTIC, ROUNDS = (3.4445, -4.7750, 2.0315), 5
STEP_SIZE = 0.2  # root mean square of a step, divided by the learning rate

# With what update rules of others are tried: seeds, steps, parameters, the rows of their maps, and the share of a step
# by which two ways to the same weights may differ; a rule may compute in bfloat16
SEEDS, TRIED_STEPS, TRIED_SHAPES, TRIED_ROWS, ROUNDING = 2, 3, ((4, 3), (3,)), ([2, 2], None), 0.02


def build_optimizer(
    cfg: OptimizerConfig, parameters: list[Tensor], rows: Sequence[list[int] | None]
) -> torch.optim.Optimizer:
    """Build the optimiser of stacked parameters. Every rule here works element by element or, for the matrices, seed by
    seed, so seeds do not mix.

    rows: for each parameter, the number of rows of each map stacked in it; None if it is not a matrix of a layer.
    """
    return OPTIMIZERS[cfg.name](cfg, parameters, rows)


def check_optimizer(cfg: OptimizerConfig) -> None:
    """Raise ConfigError unless the update rule takes the arguments of build_optimizer, gives an optimiser that can be
    saved and continued, and keeps seeds apart."""
    cfg, begins = replace(cfg, lr=0.01), f"optimizer.name={cfg.name}"
    parameters: list[Tensor] = [torch.nn.Parameter(torch.ones(SEEDS, *shape)) for shape in TRIED_SHAPES]
    try:
        inspect.signature(OPTIMIZERS[cfg.name]).bind(cfg, parameters, TRIED_ROWS)
    except TypeError as error:
        raise ConfigError(f"{begins}: {error}; it is called with cfg, parameters, rows") from None
    built = build_optimizer(cfg, parameters, TRIED_ROWS)
    if not isinstance(built, torch.optim.Optimizer):
        raise ConfigError(f"{begins}: gave a {type(built).__name__}; return a torch.optim.Optimizer")
    with torch.random.fork_rng(devices=[]):
        whole_SP = _after_steps(cfg, slice(SEEDS), is_continued=False)
        continued_SP = _after_steps(cfg, slice(SEEDS), is_continued=True)
        alone_SP = torch.cat([_after_steps(cfg, slice(seed, seed + 1), is_continued=False) for seed in range(SEEDS)])
    most = ROUNDING * (whole_SP - 1).abs().max()
    if (continued_SP - whole_SP).abs().max() > most:
        raise ConfigError(
            f"{begins}: a training that is continued takes other steps; keep what a step leaves for the next one in "
            "self.state[parameter], and draw no random numbers"
        )
    if (alone_SP - whole_SP).abs().max() > most:
        raise ConfigError(
            f"{begins}: a seed takes other steps beside another seed than alone; keep seeds, the first axis of every "
            "parameter, apart, as in norms over the other axes"
        )


def _after_steps(cfg: OptimizerConfig, seeds: slice, is_continued: bool) -> Tensor:
    """Parameters of these seeds after a few steps on random gradients, which are larger for later seeds. is_continued:
    each step is that of a new optimiser, with the state of the one before."""
    generator = torch.Generator().manual_seed(0)
    parameters: list[Tensor] = [torch.nn.Parameter(torch.ones(SEEDS, *shape)[seeds]) for shape in TRIED_SHAPES]
    optimizer = build_optimizer(cfg, parameters, TRIED_ROWS)
    for _ in range(TRIED_STEPS):
        for parameter in parameters:
            gradient = torch.randn(SEEDS, *parameter.shape[1:], generator=generator)
            parameter.grad = torch.stack([10.0**seed * gradient[seed] for seed in range(SEEDS)])[seeds]
        optimizer.step()
        if is_continued:
            state = optimizer.state_dict()["state"]
            _check_state(f"optimizer.name={cfg.name}", state, parameters)
            optimizer = build_optimizer(cfg, parameters, TRIED_ROWS)
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return torch.cat([parameter.detach().flatten(1) for parameter in parameters], dim=1)


def _check_state(begins: str, state: dict[int, dict[str, Any]], parameters: list[Tensor]) -> None:
    for number, kept in state.items():
        for key, value in kept.items():
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if shape not in ((), wanted := tuple(parameters[number].shape)):
                raise ConfigError(
                    f"{begins}: keeps {key}, {shape}, for a parameter of shape {wanted}; allowed are tensors of its "
                    "shape, or of one number"
                )


class _Uncompiled:
    """Methods of torch's optimisers without their wrappers, which import the compiler only to keep it from compiling
    them. That takes a fifth of a command's start, and nothing here compiles an optimiser."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class Sgd(_Uncompiled, torch.optim.SGD):
    """torch's SGD."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class _InOneCall(_Uncompiled, torch.optim.Optimizer):
    """Takes a step of Adam for all parameters in one call of `kernel`.

    torch's own step collects the parameters, their moments and their step counts each time, which takes longer than the
    arithmetic of a small network. This one collects them once; all parameters share one count.
    """

    kernel: ClassVar[Callable[..., None]]
    first_step: ClassVar[Callable[..., Any]]  # torch's own
    _collected: tuple[list[Tensor], list[Tensor], Tensor] | None = None  # both moments, and the count

    def state_dict(self) -> dict:
        """State in torch's format, with a step count for each parameter."""
        whole = super().state_dict()
        counted = {number: {**state, "step": state["step"].clone()} for number, state in whole["state"].items()}
        return {**whole, "state": counted}

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state in torch's format; the next step collects the moments again."""
        super().load_state_dict(state_dict)
        self._collected = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step of all parameters, each of which must have a gradient."""
        (group,) = self.param_groups
        parameters = group["params"]
        if self._collected is None:
            self.first_step(closure)
            states = [self.state[parameter] for parameter in parameters]
            for state in states:
                state["step"] = states[0]["step"]
            self._collected = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], states[0]["step"]
            return
        first, second, count = self._collected
        count += 1
        type(self).kernel(
            *(parameters, [parameter.grad for parameter in parameters], first, second, [], [count] * len(parameters)),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


class Adam(_InOneCall, torch.optim.Adam):
    """torch's Adam, a step in one call."""

    kernel, first_step = torch._fused_adam_, inspect.unwrap(torch.optim.Adam.step)


class AdamW(_InOneCall, torch.optim.AdamW):
    """torch's AdamW, a step in one call."""

    kernel, first_step = torch._fused_adamw_, inspect.unwrap(torch.optim.AdamW.step)


class Muon(_Uncompiled, torch.optim.AdamW):
    """Muon for matrices (S, O, I): the momentum, orthogonalised. AdamW for everything else.

    Jordan et al. 2024, Muon: an optimizer for hidden layers in neural networks; with Nesterov's momentum, decoupled
    weight decay, and steps as large as Adam's, so that the same learning rate suits all parameters (Liu et al.
    2025). Each of the maps stacked in a matrix is orthogonalised separately.
    """

    def __init__(self, cfg: OptimizerConfig, parameters: list[Tensor], rows: Sequence[list[int] | None]) -> None:
        super().__init__(parameters, cfg.lr, _betas(cfg), weight_decay=cfg.weight_decay, fused=True)
        self.rows, self.momentum = list(rows), cfg.momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step. A parameter without a gradient stays unchanged."""
        (group,) = self.param_groups
        gradients = {}
        for weight_SOI, rows in zip(group["params"], self.rows, strict=True):
            if rows is not None and weight_SOI.grad is not None:
                gradients[weight_SOI] = weight_SOI.grad
                self._step_of_matrix(weight_SOI, rows, group["lr"], group["weight_decay"])
                weight_SOI.grad = None  # so that AdamW skips it
        inspect.unwrap(torch.optim.AdamW.step)(self, closure)
        for weight_SOI, gradient_SOI in gradients.items():
            weight_SOI.grad = gradient_SOI

    def _step_of_matrix(self, weight_SOI: Tensor, rows: list[int], lr: float, weight_decay: float) -> None:
        state, gradient_SOI = self.state[weight_SOI], weight_SOI.grad
        if not state:
            # AdamW expects a count in every state that it loads
            state |= {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(weight_SOI)}
        state["step"] += 1
        state["momentum_buffer"].mul_(self.momentum).add_(gradient_SOI)
        ahead_SOI = gradient_SOI + self.momentum * state["momentum_buffer"]
        weight_SOI.mul_(1 - lr * weight_decay)
        for map_SOI, direction_SOI in zip(weight_SOI.split(rows, 1), ahead_SOI.split(rows, 1), strict=True):
            size = STEP_SIZE * math.sqrt(max(map_SOI.shape[1:]))
            map_SOI.add_(orthogonalised(direction_SOI), alpha=-lr * size)


def _betas(cfg: OptimizerConfig) -> tuple[float, float]:
    return cfg.beta1, cfg.beta2


# By name; plug-ins add theirs. Arguments as of build_optimizer.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda cfg, parameters, _: Adam(parameters, cfg.lr, _betas(cfg), weight_decay=cfg.weight_decay, fused=True),
    "adamw": lambda cfg, parameters, _: AdamW(
        parameters, cfg.lr, _betas(cfg), weight_decay=cfg.weight_decay, fused=True
    ),
    "sgd": lambda cfg, parameters, _: Sgd(parameters, cfg.lr, cfg.momentum, weight_decay=cfg.weight_decay, fused=True),
    "muon": Muon,
}


def orthogonalised(x_SOI: Tensor) -> Tensor:
    """Bring the singular values of each matrix close to 1 by the Newton-Schulz iteration.

    They end between .68 and 1.14; those far below the largest stay below. A matrix of zeros stays zero.
    """
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
    """Lower the singular values above `cap` of each of the stacked maps to `cap`, in place; exact, by SVD.

    The result is the nearest matrix whose spectral norm is at most `cap`; Newhouse et al. 2025, Training transformers
    with enforced Lipschitz constants, approximate it by polynomials. Maps without such a singular value stay bit for
    bit.
    """
    for map_SOI in weight_SOI.split(rows, 1):
        finite_S11 = map_SOI.isfinite().all((1, 2), keepdim=True)  # a diverged seed's map stays unchanged, too
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
