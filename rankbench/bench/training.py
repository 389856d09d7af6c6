"""Speed of training: against a plain loop over torch.nn.TransformerEncoder, and seeds side by side against in turn.

Shapes: B batch, N token, C output.
"""

import copy
import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.bench.timing import medians, paired, spread
from rankbench.config import BenchConfig, ModelConfig, OptimizerConfig
from rankbench.keys import ConfigError
from rankbench.model.norm import NORM_EPSILON
from rankbench.model.transformer import ACTIVATIONS
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.seeds import generator_for
from rankbench.tasks import Task, build_task
from rankbench.training.forward import per_seed
from rankbench.training.loop import train
from rankbench.training.optimizers import Adam, AdamW, Sgd
from rankbench.training.seeds_side_by_side import Training

LOOP_BLOCKS = 5  # the whole training loop is timed over this many blocks of trainer.steps, enough to evaluate and save

# Values that the keys of the model must have for torch.nn.TransformerEncoder to build the same network.
TORCH_ENCODER_HAS = {"attention": ["dot"], "tied_qk": [False], "skip": [True], "skip_scale": [1.0], "mlp": [True]}
TORCH_ENCODER_HAS |= {"mlp_skip": [True], "norm": ["pre", "post"], "norm_kind": ["layernorm"], "norm_affine": [True]}
TORCH_ENCODER_HAS |= {"norm_scale": ["none"], "mask": ["none"], "positions": ["learned"], "embedding_norm": [False]}
TORCH_ENCODER_HAS |= {"head_width": [None], "value_width": [None], "kv_groups": [None], "latent_width": [None]}
TORCH_ENCODER_HAS |= {"head_reduction": ["sum"], "read_in": ["linear"], "read_out": ["linear"], "dropout": [0.0]}

RULES = {"adam": Adam, "adamw": AdamW, "sgd": Sgd}  # torch's update rules, for its loop


def check_twin(model: ModelConfig, optimizer: OptimizerConfig) -> None:
    """Raise ConfigError for a model or an update rule that torch's own loop does not have."""
    if optimizer.name not in RULES:
        raise ConfigError(
            f"optimizer.name={optimizer.name}: torch's own loop, which bench=training is measured against, "
            f"takes only {', '.join(RULES)}; set one of these, or leave training out of bench"
        )
    for key, allowed in TORCH_ENCODER_HAS.items():
        if (value := getattr(model, key)) not in allowed:
            raise ConfigError(
                f"model.{key}={value}: torch.nn.TransformerEncoder, which bench=training is measured against, has "
                f"only {' and '.join(map(str, allowed))}; set that, or leave training out of bench"
            )


def table(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Seconds of blocks of trainer.steps steps.

    `replicas` seeds train side by side, and four times as many for a quarter of the steps. For one seed the table also
    has the share of train()'s time that is not spent on forward pass, backward pass and optimiser, but on drawing
    batches, counting, evaluating and writing.
    """
    task, steps = build_task(cfg.task), cfg.trainer.steps
    one_seed = _against_torch_encoder(cfg, task, machine) | _outside_the_step(cfg, task, machine)
    rows = [{"seeds": 1, "steps": steps} | one_seed]
    for seeds, block in ((cfg.replicas, steps), (4 * cfg.replicas, math.ceil(steps / 4))):
        rows.append({"seeds": seeds, "steps": block} | _side_by_side(cfg, task, machine, seeds, block))
    columns = {"batch_size": cfg.trainer.batch_size, "num_tokens": task.length, "device": machine.device.type}
    columns |= {"precision": machine.precision, "repeats": cfg.repeats}
    return pd.DataFrame(rows).assign(**columns).set_index("seeds")


def train_steps(training: Training, steps: int) -> None:
    """Take this many steps, from the first epoch on."""
    training.progress.step = 0  # each block starts with the first epoch, because schedules end
    for _ in range(steps):
        training.update()


def _against_torch_encoder(cfg: BenchConfig, task: Task, machine: Machine) -> dict[str, float]:
    ours = Training(cfg, task, machine, [cfg.seed])
    loops = torch_loops(ours)
    seconds = paired(machine, cfg.repeats, ours=lambda: train_steps(ours, cfg.trainer.steps), **loops)
    fastest = min((seconds[name] for name in loops), key=np.median)
    sequences = cfg.trainer.steps * cfg.trainer.batch_size
    return {
        **medians(seconds),
        "sequences_per_second": float(sequences / np.median(seconds["ours"])),
        "sequences_per_second_of_torch_encoder": float(sequences / np.median(fastest)),
        **spread("ratio_speed_to_torch_encoder", fastest / seconds["ours"]),
    }


class TorchEncoder(nn.Module):
    """Our Transformer of the same sizes, made of torch's own layers."""

    def __init__(self, cfg: BenchConfig, task: Task) -> None:
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


def torch_loops(ours: Training) -> dict[str, Callable[[], None]]:
    """`torch_loop` by name, with and without torch's fused optimiser."""
    fused = {"torch_encoder": False, "torch_encoder_fused_optimizer": True}
    return {name: torch_loop(ours, is_fused) for name, is_fused in fused.items()}


def torch_loop(ours: Training, torch_fused: bool) -> Callable[[], None]:
    """One block of steps of an ordinary PyTorch loop with the same data, sizes and update rule."""
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
        for step in range(cfg.trainer.steps):
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


def _side_by_side(cfg: BenchConfig, task: Task, machine: Machine, num_seeds: int, steps: int) -> dict[str, float]:
    seeds = list(range(cfg.seed, cfg.seed + num_seeds))
    together = Training(cfg, task, machine, seeds)
    trainings = [Training(cfg, task, machine, [seed]) for seed in seeds]
    seconds = paired(
        machine,
        cfg.repeats,
        side_by_side=lambda: train_steps(together, steps),
        in_turn=lambda: [train_steps(training, steps) for training in trainings],
    )
    speed = steps * cfg.trainer.batch_size * num_seeds / np.median(seconds["side_by_side"])
    column = "ratio_side_by_side" if num_seeds == cfg.replicas else "ratio_many_side_by_side"
    ratios = spread(column, seconds["in_turn"] / seconds["side_by_side"])
    return medians(seconds) | {"sequences_per_second": float(speed)} | ratios


def _outside_the_step(cfg: BenchConfig, task: Task, machine: Machine) -> dict[str, float]:
    """Share of train()'s time that is not spent on forward, backward and optimiser, when these run on a ready batch.
    Noise can make it negative."""
    training = Training(cfg, task, machine, [cfg.seed])
    forward, batch, steps = per_seed(training.model), training.batch(), LOOP_BLOCKS * cfg.trainer.steps
    longer_cfg = dataclasses.replace(cfg, replicas=1, trainer=dataclasses.replace(cfg.trainer, steps=steps))
    loop_seconds = []

    def bare() -> None:
        (piece,), parameters = training.pieces, training.parameters.values()
        for _ in range(steps):
            with machine.autocast():
                loss_S = forward(piece.weights, batch.inputs, batch.targets, None).mean_loss
            gradients = torch.autograd.grad(loss_S.sum(), list(piece.weights.values()))
            for parameter, gradient in zip(parameters, piece.stacked(gradients), strict=True):
                parameter.grad = gradient.contiguous()
            training.optimizer.step()

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            # train()'s own seconds leave out building the model and opening the folder
            loop_seconds.append(train(copy.deepcopy(longer_cfg), Run(Path(folder)))["seconds"])

    bare_seconds = paired(machine, cfg.repeats, bare=bare, whole=whole)["bare"]
    return spread("share_outside_step", 1 - bare_seconds / np.array(loop_seconds[1:]))
