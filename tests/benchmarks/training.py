"""Speed of training: against the rate of the processor, a plain loop over torch.nn.TransformerEncoder, the uncompiled
step, and seeds side by side against in turn.

Shapes: B batch, N token, C output.
"""

import ctypes
import dataclasses
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.config import BenchConfig
from benchmarks.timing import medians, paired, spread
from rankbench.config.keys import ConfigError
from rankbench.config.model import ModelConfig
from rankbench.config.schema import OptimizerConfig, TrainConfig
from rankbench.model.mlp import ACTIVATIONS
from rankbench.model.norm import NORM_EPSILON
from rankbench.model.transformer import Transformer
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for
from rankbench.tasks import Task, build_task
from rankbench.training.compiling import fastest_step
from rankbench.training.seeds_side_by_side import Training

SMALL = 30  # batch size that is timed in addition to the config's
LARGE = 1024  # rows and columns of matrices whose product runs at the processor's highest rate

# Values that the keys of the model must have for torch.nn.TransformerEncoder to build the same network.
TORCH_ENCODER_HAS: dict[str, list] = {"attention": ["dot"], "tied_qk": [False], "skip": [True], "mlp": [True]}
TORCH_ENCODER_HAS |= {"skip_scale": [1.0], "mlp_skip": [True], "norm": ["pre", "post"], "norm_kind": ["layernorm"]}
TORCH_ENCODER_HAS |= {"norm_affine": [True], "norm_scale": ["none"], "mask": ["none"], "positions": ["learned"]}
TORCH_ENCODER_HAS |= {"embedding_norm": [False], "head_width": [None], "value_width": [None], "kv_groups": [None]}
TORCH_ENCODER_HAS |= {"latent_width": [None], "head_reduction": ["sum"], "dropout": [0.0]}
TORCH_ENCODER_HAS |= {"read_in": ["linear"], "read_out": ["linear"]}

RULES = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def check_twin(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Raise ConfigError for a model or an update rule that torch's own loop does not have."""
    if optimizer.name not in RULES:
        raise ConfigError(
            f"optimizer.name={optimizer.name}: torch's own loop, which training is measured against, "
            f"takes only {', '.join(RULES)}; set one of these, or leave training out"
        )
    for key, allowed in TORCH_ENCODER_HAS.items():
        if (value := getattr(model, key)) not in allowed:
            raise ConfigError(
                f"model.{key}={value}: torch.nn.TransformerEncoder, which training is measured against, has "
                f"only {' and '.join(map(str, allowed))}; set that, or leave training out"
            )


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds of blocks of trainer.steps steps, with batches of SMALL and of trainer.batch_size sequences.

    `replicas` seeds train side by side, and four times as many for a quarter of the steps. ratio_roofline compares the
    step with its own matrix products at the rate of a large one of torch's, and ratio_limit at that of one of the fused
    step's own. Both are measured in the same repetition.
    """
    task, rows, steps = build_task(cfg.task), [], cfg.trainer.steps or 0
    for size in sorted({SMALL, cfg.trainer.batch_size}):
        sized = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, batch_size=size))
        step = "plain" if cfg.trainer.compile == "false" else fastest_step(sized, task, machine)
        case: dict = {"batch_size": size, "step": step}
        rows.append({"seeds": 1, "steps": steps, **case, **_against_torch_encoder(sized, task, machine, step)})
        for seeds, block in ((cfg.replicas, steps), (4 * cfg.replicas, math.ceil(steps / 4))):
            measured = _side_by_side(sized, task, machine, step, seeds, block)
            rows.append({"seeds": seeds, "steps": block, **case, **measured})
    columns = {"num_tokens": task.length, "device": machine.device.type, "precision": machine.precision}
    return pd.DataFrame(rows).assign(**columns, repeats=cfg.repeats).set_index(["seeds", "batch_size"])


def train_steps(training: Training, steps: int) -> None:
    """Take this many steps, from the first epoch on."""
    training.progress.step = 0  # each block starts with the first epoch, because schedules end
    for _ in range(steps):
        training.update()


def large_products(training: Training) -> dict[str, Callable[[], object]]:
    """Functions that multiply two large matrices as torch does and, where the step is fused, as that does."""
    machine = training.machine
    a, c = (torch.ones(LARGE, LARGE, device=machine.device, dtype=machine.dtype) for _ in range(2))
    products: dict[str, Callable[[], object]] = {"large_product": lambda: torch.mm(a, a, out=c)}
    if training.fused is not None:
        product = training.fused.compiled.product
        sizes, matrix = [ctypes.c_long(LARGE)] * 3, (ctypes.c_long * 3)(a.data_ptr(), LARGE, 1)
        words = *sizes, matrix, matrix, ctypes.c_void_p(c.data_ptr()), ctypes.c_long(0)
        products["own_large_product"] = lambda: product(*words)
    return products


def operations_of_products(training: Training, num_sequences: int, num_tokens: int) -> int:
    """Floating-point operations in the matrix products of one seed's step: those of the linear maps and of attention,
    forward and, twice as many, backward."""
    model = training.model
    assert isinstance(model, Transformer)  # see benchmarks.config
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    attention = sum(2 * num_tokens * part.heads * part.head_width for part in model.attentions)
    return 6 * num_sequences * num_tokens * (weights + attention)


def _ratios_to_rate(training: Training, steps: int, seconds: dict[str, np.ndarray], name: str) -> dict[str, float]:
    """Ratios to the rates of `large_products` of `steps` steps, which took seconds[name]."""
    operations = operations_of_products(training, training.cfg.trainer.batch_size, training.task.length)
    share = steps * len(training.seeds) * operations / (2 * LARGE**3) / seconds[name]
    ratios = spread("ratio_roofline", share * seconds["large_product"])
    if "own_large_product" in seconds:
        ratios |= spread("ratio_limit", share * seconds["own_large_product"])
    return ratios


def _against_torch_encoder(cfg: BenchConfig, task: Task, machine: Machine, step: str) -> dict[str, float]:
    ours, plain = (Training(cfg, task, machine, [cfg.seed], kind) for kind in (step, "plain"))
    steps = cfg.trainer.steps or 0
    fused = {"torch_encoder": False, "torch_encoder_fused_optimizer": True}  # torch's optimiser
    loops = {name: torch_loop(ours, steps, is_fused) for name, is_fused in fused.items()}
    works = {"ours": lambda: train_steps(ours, steps), **loops, "plain": lambda: train_steps(plain, steps)}
    seconds = paired(machine, cfg.repeats, {**works, **large_products(ours)})
    fastest = min((seconds[name] for name in loops), key=np.median)
    sequences = steps * cfg.trainer.batch_size
    return {
        **medians(seconds),
        "sequences_per_second": float(sequences / np.median(seconds["ours"])),
        "sequences_per_second_of_torch_encoder": float(sequences / np.median(fastest)),
        **_ratios_to_rate(ours, steps, seconds, "ours"),
        **spread("ratio_speed_to_torch_encoder", fastest / seconds["ours"]),
        **spread("ratio_speed_to_plain", seconds["plain"] / seconds["ours"]),
    }


class TorchEncoder(nn.Module):
    """Our Transformer of the same sizes, made of torch's own layers."""

    def __init__(self, cfg: TrainConfig, task: Task) -> None:
        super().__init__()
        model = cfg.model
        self.read_in = nn.Embedding(task.num_inputs, model.width)
        self.position = nn.Embedding(task.length, model.width)
        layer = nn.TransformerEncoderLayer(
            model.width,
            model.heads,
            dim_feedforward=round(model.mlp_ratio * model.width),
            dropout=0.0,
            activation=ACTIVATIONS[model.activation],
            layer_norm_eps=NORM_EPSILON,
            batch_first=True,
            norm_first=model.norm == "pre",
            bias=model.bias,
        )
        last_norm = nn.LayerNorm(model.width, NORM_EPSILON) if model.norm == "pre" else None
        self.layers = nn.TransformerEncoder(layer, model.layers, last_norm, enable_nested_tensor=False)
        self.read_out = nn.Linear(model.width, task.num_outputs)

    def forward(self, inputs_BN: Tensor) -> Tensor:
        return self.read_out(self.layers(self.read_in(inputs_BN) + self.position.weight))


def torch_loop(ours: Training, steps: int, torch_fused: bool) -> Callable[[], None]:
    """One block of this many steps of an ordinary PyTorch loop with the same data, sizes and update rule."""
    cfg, machine = ours.cfg, ours.machine
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their weights from its global generator
        torch.manual_seed(cfg.seed)
        model = TorchEncoder(cfg, ours.task).to(machine.device, machine.dtype)
    rule, options = RULES[cfg.optimizer.name], {"lr": cfg.optimizer.lr, "weight_decay": cfg.optimizer.weight_decay}
    optimizer = rule(model.parameters(), **options, fused=True if torch_fused else None)
    size = cfg.trainer.batch_size
    # Of an endless stream, our own steps draw each batch; this loop does not have to.
    data = ours.batch()[0] if ours.data.train is None else ours.data.train[0]
    generator = generator_for(cfg.seed, "order")

    def block() -> None:
        for step in range(steps):
            batch_of_epoch = step % ours.data.batches_per_epoch
            if batch_of_epoch == 0:
                order = torch.randperm(len(data.inputs), generator=generator).to(machine.device)
            rows = order[batch_of_epoch * size : (batch_of_epoch + 1) * size]
            with machine.autocast():
                outputs_BNC = model(data.inputs[rows])
            loss = F.cross_entropy(outputs_BNC.flatten(0, 1), data.targets[rows].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return block


def _side_by_side(
    cfg: BenchConfig, task: Task, machine: Machine, step: str, num_seeds: int, steps: int
) -> dict[str, float]:
    seeds = list(range(cfg.seed, cfg.seed + num_seeds))
    together, plain = (Training(cfg, task, machine, seeds, kind) for kind in (step, "plain"))
    trainings = [Training(cfg, task, machine, [seed], step) for seed in seeds]
    works = {
        "side_by_side": lambda: train_steps(together, steps),
        "in_turn": lambda: list(map(partial(train_steps, steps=steps), trainings)),
        "plain": lambda: train_steps(plain, steps),
    }
    seconds = paired(machine, cfg.repeats, {**works, **large_products(together)})
    speed = steps * cfg.trainer.batch_size * num_seeds / np.median(seconds["side_by_side"])
    column = "ratio_side_by_side" if num_seeds == cfg.replicas else "ratio_many_side_by_side"
    return {
        **medians(seconds),
        "sequences_per_second": float(speed),
        **_ratios_to_rate(together, steps, seconds, "side_by_side"),
        **spread("ratio_speed_to_plain", seconds["plain"] / seconds["side_by_side"]),
        **spread(column, seconds["in_turn"] / seconds["side_by_side"]),
    }
