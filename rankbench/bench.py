"""Speed, side by side with the alternatives, in one run: `rankbench bench`.

A benchmark is a function (cfg, machine) -> table, indexed by what was measured, with seconds and, in columns that begin
with `ratio_`, the median of the paired ratios; `_min` and `_max` columns give their range over the repetitions.

Shapes: B batch, N token, D width, H head, L layer, P path.
"""

import copy
import dataclasses
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.config import BenchConfig
from rankbench.keys import ConfigError
from rankbench.measures.paths import RecomputedNetwork, all_paths, sums_by_length, sums_of_groups
from rankbench.model import initial_model
from rankbench.model.transformer import ACTIVATIONS, NORM_EPSILON, Transformer, plain_norm
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.runs.tables import write_table
from rankbench.seeds import generator_for
from rankbench.tasks import Task, build_task
from rankbench.training.loop import train
from rankbench.training.seeds_side_by_side import Training, per_seed

MLP_RATIOS = (1.0, 4.0)  # the authors' code's, and the usual one
# Of the paths that run alone one in so many is timed, of each length at least one: all of them would take minutes.
ONE_PATH_IN = 12
# Recomputed paths take one in so many of the sequences: their time is proportional, and all of them would take minutes.
ONE_SEQUENCE_IN = 4
# Sequences that a path alone takes at a time: the fastest of 50 .. 2000 on one core, so that the comparison is fair.
ALONE_SEQUENCES = 250
LOOP_BLOCKS = 5  # of trainer.steps: the whole training loop is timed over enough steps to evaluate and save in it

# One layer of the character models of Kim et al. 2021, whose longest sentence has 288 tokens.
CHARACTER_MODEL = {"width": 512, "heads": 8, "mask": "causal"}
ATTENTION_TOKENS = (32, 128, 288, 1024)
ATTENTION_BATCH = 1024  # tokens, about, in all sequences of a step
ATTENTIONS = {
    "dot": {"attention": "dot"},
    "dot again": {"attention": "dot"},  # how far noise alone takes a ratio
    "l2": {"attention": "l2"},
    "l2 tied": {"attention": "l2", "tied_qk": True},
    "contractive_l2": {"attention": "contractive_l2", "tied_qk": True, "contraction": 1.0},
    "cosine": {"attention": "cosine"},
}

# What the model must be to have a twin in torch.nn.TransformerEncoder.
TORCH_ENCODER_HAS = {
    "attention": ("dot",),
    "tied_qk": (False,),
    "skip": (True,),
    "skip_scale": (1.0,),
    "mlp": (True,),
    "mlp_skip": (True,),
    "norm": ("pre", "post"),
    "norm_kind": ("layernorm",),
    "norm_affine": (True,),
    "mask": ("none",),
    "positions": ("learned",),
    "embedding_norm": (False,),
    "head_width": (None,),
    "value_width": (None,),
    "kv_groups": (None,),
    "latent_width": (None,),
    "head_reduction": ("sum",),
    "read_in": ("linear",),
    "read_out": ("linear",),
    "dropout": (0.0,),
}

# The project's own goals: (at least | at most, value).
GOALS = {
    "ratio_sums_to_forward": ("at most", 4.0),
    "ratio_speedup_over_all_heads": ("at least", 4.0),
    "ratio_speed_to_torch_encoder": ("at least", 1.0),
    "ratio_side_by_side": ("at least", 1.25),
    "ratio_step_to_dot": ("at most", 1.05),
}


def check_benchmarks(cfg: BenchConfig) -> None:
    """Raise ConfigError for a benchmark that the rest of the config does not allow."""
    for key in ("analysis", "claims", "published"):
        if getattr(cfg, key):
            raise ConfigError(f"{key}: `rankbench bench` analyses nothing; give it to `rankbench analyze`")
    if "training" in cfg.bench:
        for key, allowed in TORCH_ENCODER_HAS.items():
            if (value := getattr(cfg.model, key)) not in allowed:
                raise ConfigError(
                    f"model.{key}={value}: torch.nn.TransformerEncoder, which bench=training is measured against, has "
                    f"only {' and '.join(map(str, allowed))}; set that, or leave training out of bench"
                )


def bench(cfg: BenchConfig, machine: Machine, folder: Path) -> None:
    """Run each benchmark of the config, write bench_<name>.csv into the folder and print its ratios."""
    for name in cfg.bench:
        began = time.perf_counter()
        table = BENCHMARKS[name](cfg, machine)
        write_table(table.reset_index(), folder / f"bench_{name}.csv")
        print("\n".join([f"{name} ({time.perf_counter() - began:.0f} s)", *told(table)]), flush=True)
        print(f"-> {folder / f'bench_{name}.csv'}", flush=True)


def told(table: pd.DataFrame) -> list[str]:
    """A line for each ratio of a benchmark's table: what, for which case, median [min, max], and the goal."""
    lines = []
    for case, row in zip(table.index.to_frame().to_dict("records"), table.to_dict("records"), strict=True):
        # a case without a value for an axis (recomputed paths have no MLP) leaves it out
        where = " ".join(str(value) if isinstance(value, str) else f"{axis}={value:g}"
                         for axis, value in case.items() if not pd.isna(value))  # fmt: skip
        for column in (name for name in row if name.startswith("ratio_") and f"{name}_min" in row):
            if not pd.isna(row[column]):
                low, high = row[f"{column}_min"], row[f"{column}_max"]
                goal = f"  (goal: {' '.join(map(str, GOALS[column]))})" if column in GOALS else ""
                lines.append(f"  {column:<30} {where:<36} {row[column]:7.2f} [{low:.2f}, {high:.2f}]{goal}")
    return lines


def paired(machine: Machine, repeats: int, **alternatives: Callable[[], object]) -> dict[str, np.ndarray]:
    """Seconds of each alternative in each repetition, shape (repeats,), after one warm-up of each.

    In turn, A B A B ..: whatever else the machine does meanwhile slows them alike, and the ratio within a repetition
    says more than each alternative's own time.
    """

    def wait() -> None:
        if machine.device.type == "cuda":
            torch.cuda.synchronize(machine.device)

    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for repeat in range(repeats + 1):
        for name, work in alternatives.items():
            wait()
            began = time.perf_counter()
            work()
            wait()
            if repeat:
                seconds[name].append(time.perf_counter() - began)
    return {name: np.array(each) for name, each in seconds.items()}


def spread(name: str, ratios: np.ndarray) -> dict[str, float]:
    """Columns ratio_<name>, the median over the repetitions, with _min and _max."""
    return {
        f"ratio_{name}": float(np.median(ratios)),
        f"ratio_{name}_min": float(ratios.min()),
        f"ratio_{name}_max": float(ratios.max()),
    }


def medians(seconds: dict[str, np.ndarray]) -> dict[str, float]:
    """Columns seconds_<alternative>, the median over the repetitions."""
    return {f"seconds_{name}": float(np.median(each)) for name, each in seconds.items()}


# --- paths -----------------------------------------------------------------------------------------------------------


def paths(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Sums over all paths: frozen ones against a forward pass, recomputed ones against one pass for each path.

    Both in float32 and float64. Frozen sums include the forward pass that they need. A path alone is timed in two ways:
    with nothing but the layers and the one head of each that it uses (one_head), and with these layers' attention as it
    stands, all heads computed and one kept (all_heads). Recomputed paths pass no MLP.
    """
    task = build_task(cfg.task)
    inputs = task.sample(cfg.sequences, generator_for(cfg.seed, "test")).inputs
    rows = []
    for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
        placed = inputs.to(machine.device, dtype if inputs.is_floating_point() else None)
        for mlp_ratio in MLP_RATIOS:
            model = _model(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, mlp_ratio=mlp_ratio)), task)
            model = model.to(machine.device, dtype)
            rows.append(
                {"paths": "frozen", "mlp_ratio": mlp_ratio, "precision": precision, "num_sequences": len(placed)}
            )
            rows[-1] |= _frozen_sums(model, placed, machine, cfg.repeats)
        some = placed[: math.ceil(len(placed) / ONE_SEQUENCE_IN)]
        rows.append({"paths": "recomputed", "mlp_ratio": math.nan, "precision": precision, "num_sequences": len(some)})
        rows[-1] |= _recomputed_sums(model, some, machine, cfg)
    table = pd.DataFrame(rows).sort_values("paths", kind="stable")
    return table.assign(repeats=cfg.repeats).set_index(["paths", "mlp_ratio", "precision"])


def _model(cfg: BenchConfig, task: Task) -> Transformer:
    return initial_model(cfg.model, task, cfg.seed).eval()


@torch.no_grad()
def _frozen_sums(model: Transformer, inputs: Tensor, machine: Machine, repeats: int) -> dict[str, float]:
    seconds = paired(
        machine, repeats, forward=lambda: model(inputs), all_sums=lambda: sums_by_length(model, inputs)
    )  # fmt: skip
    return medians(seconds) | spread("sums_to_forward", seconds["all_sums"] / seconds["forward"])


@torch.no_grad()
def _recomputed_sums(model: Transformer, inputs: Tensor, machine: Machine, cfg: BenchConfig) -> dict[str, float]:
    layers, heads = cfg.model.layers, cfg.model.heads
    groups = [all_paths(layers, heads, length) for length in range(layers + 1)]
    generator = np.random.default_rng(cfg.seed)
    some = [
        group[np.sort(generator.permutation(len(group))[: math.ceil(len(group) / ONE_PATH_IN)])] for group in groups
    ]
    # a path's cost is its number of heads: by that the time of some is scaled up to all
    timed_share = sum((paths > 0).sum() for paths in some) / sum((paths > 0).sum() for paths in groups)
    network = RecomputedNetwork(model, inputs)
    one_head, all_heads = _one_head(network), _all_heads(model)
    seconds = paired(
        machine,
        cfg.repeats,
        shared=lambda: sums_of_groups(network, groups),
        one_head=lambda: _sums_of_paths_alone(network.embedding_BND, some, one_head),
        all_heads=lambda: _sums_of_paths_alone(network.embedding_BND, some, all_heads),
    )
    seconds["one_head"] /= timed_share
    seconds["all_heads"] /= timed_share
    shared = sums_of_groups(network, some)
    differences = [
        (shared - _sums_of_paths_alone(network.embedding_BND, some, step)).abs().max().item()
        for step in (one_head, all_heads)
    ]
    return {
        **medians(seconds),
        "share_of_paths_alone_timed": float(timed_share),
        "largest_sum": shared.abs().max().item(),
        "largest_difference": max(differences),
        **spread("speedup_over_one_head", seconds["one_head"] / seconds["shared"]),
        **spread("speedup_over_all_heads", seconds["all_heads"] / seconds["shared"]),
    }


def _sums_of_paths_alone(
    embedding_BND: Tensor, groups: list[np.ndarray], step: Callable[[Tensor, int, int], Tensor]
) -> Tensor:
    """What sums_of_groups computes, (G, B, N, D), path by path from the embedding, nothing shared."""
    sums_GBND = embedding_BND.new_zeros(len(groups), *embedding_BND.shape)
    for states_BND, sums in zip(
        embedding_BND.split(ALONE_SEQUENCES), sums_GBND.split(ALONE_SEQUENCES, dim=1), strict=True
    ):
        for group, sum_BND in zip(groups, sums, strict=True):
            for path in group.tolist():
                x_BND = states_BND
                for layer, choice in enumerate(path):
                    if choice:  # a skipped layer does nothing
                        x_BND = step(x_BND, layer, choice)
                sum_BND += x_BND
    return sums_GBND


def _one_head(network: RecomputedNetwork) -> Callable[[Tensor, int, int], Tensor]:
    """One head of one layer: what the tree over paths does too, for one path instead of many."""
    return lambda x_BND, layer, choice: network.step(x_BND[None], layer, choice, slice(None))[0]


def _all_heads(model: Transformer) -> Callable[[Tensor, int, int], Tensor]:
    """A layer's attention as in a forward pass, the output of every head but one set to zero."""

    def step(x_BND: Tensor, layer: int, choice: int) -> Tensor:
        sublayer = model.layers[layer][0]
        attention = sublayer.part
        q_BHNK, k_BHNK, v_BHNK = attention.queries_keys_values(x_BND)
        seen_NM = attention.seen(None, x_BND.shape[-2], x_BND.device)
        p_BHNM = attention.weights(q_BHNK, k_BHNK, seen_NM)
        mixed_BHNK = attention.mixing(p_BHNM, seen_NM, attention.gains(v_BHNK, None)) @ v_BHNK
        kept_BHNK = torch.zeros_like(mixed_BHNK)
        kept_BHNK[:, choice - 1] = mixed_BHNK[:, choice - 1]
        out_BND = attention.out(kept_BHNK.transpose(-3, -2).flatten(-2))
        return out_BND if sublayer.norm is None else plain_norm(sublayer.norm.kind, out_BND)

    return step


# --- training --------------------------------------------------------------------------------------------------------


def training(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Training: our steps against a plain loop over torch.nn.TransformerEncoder, seeds side by side against in turn.

    A timed block is trainer.steps steps. `replicas` seeds go side by side, and four times as many for a quarter of the
    steps. Of one seed also
    the share of a step that is neither forward pass, nor backward pass, nor optimiser: drawing batches, counting,
    evaluating, writing.
    """
    task = build_task(cfg.task)
    rows = [
        {"seeds": 1, "steps": cfg.trainer.steps}
        | _against_torch_encoder(cfg, task, machine)
        | _outside_the_step(cfg, task, machine)
    ]
    for seeds, steps in ((cfg.replicas, cfg.trainer.steps), (4 * cfg.replicas, math.ceil(cfg.trainer.steps / 4))):
        rows.append({"seeds": seeds, "steps": steps} | _side_by_side(cfg, task, machine, seeds, steps))
    table = pd.DataFrame(rows)
    table = table.assign(
        batch_size=cfg.trainer.batch_size,
        num_tokens=task.length,
        device=machine.device.type,
        precision=machine.precision,
        repeats=cfg.repeats,
    )
    return table.set_index(["seeds"])


def _steps(training: Training, steps: int) -> None:
    training.progress.step = 0  # from the first epoch on: schedules have an end
    for _ in range(steps):
        training.update()


def _against_torch_encoder(cfg: BenchConfig, task: Task, machine: Machine) -> dict[str, float]:
    ours = Training(cfg, task, machine, [cfg.seed])
    steps = cfg.trainer.steps
    loops = {
        "torch_encoder": _torch_loop(ours, torch_fused=False),
        "torch_encoder_fused_optimizer": _torch_loop(ours, torch_fused=True),
    }
    seconds = paired(machine, cfg.repeats, ours=lambda: _steps(ours, steps), **loops)
    theirs = min(loops, key=lambda name: np.median(seconds[name]))
    sequences = steps * cfg.trainer.batch_size
    return {
        **medians(seconds),
        "sequences_per_second": float(sequences / np.median(seconds["ours"])),
        "sequences_per_second_of_torch_encoder": float(sequences / np.median(seconds[theirs])),
        **spread("speed_to_torch_encoder", seconds[theirs] / seconds["ours"]),
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


def _torch_loop(ours: Training, torch_fused: bool) -> Callable[[], None]:
    """One block of steps of an ordinary PyTorch loop: same data, sizes and update rule."""
    cfg, machine = ours.cfg, ours.machine
    with torch.random.fork_rng(devices=[]):  # torch's layers draw their weights from its global generator
        torch.manual_seed(cfg.seed)
        model = TorchEncoder(cfg, ours.task).to(machine.device, machine.dtype)
    rule, options = type(ours.optimizer), {"lr": cfg.optimizer.lr, "weight_decay": cfg.optimizer.weight_decay}
    optimizer = rule(model.parameters(), **options, fused=True if torch_fused else None)
    size, num_steps = cfg.trainer.batch_size, cfg.trainer.steps
    # an endless stream costs us the drawing of each batch: there, they get theirs for nothing
    data = ours.batch()[0] if ours.train is None else ours.train[0]

    generator = generator_for(cfg.seed, "order")

    def block() -> None:
        for step in range(num_steps):
            place = step % ours.batches_per_epoch
            if place == 0:
                order = torch.randperm(len(data.inputs), generator=generator).to(machine.device)
            rows = order[place * size : (place + 1) * size]
            with machine.autocast():
                outputs_BNC = model(data.inputs[rows])
            loss = F.cross_entropy(outputs_BNC.flatten(0, 1), data.targets[rows].flatten())
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return block


def _side_by_side(cfg: BenchConfig, task: Task, machine: Machine, seeds: int, steps: int) -> dict[str, float]:
    together = Training(cfg, task, machine, list(range(cfg.seed, cfg.seed + seeds)))
    each = [Training(cfg, task, machine, [seed]) for seed in range(cfg.seed, cfg.seed + seeds)]
    seconds = paired(
        machine,
        cfg.repeats,
        side_by_side=lambda: _steps(together, steps),
        in_turn=lambda: [_steps(one, steps) for one in each],
    )
    speed = steps * cfg.trainer.batch_size * seeds / np.median(seconds["side_by_side"])
    return {
        **medians(seconds),
        "sequences_per_second": float(speed),
        **spread("side_by_side", seconds["in_turn"] / seconds["side_by_side"]),
    }


def _outside_the_step(cfg: BenchConfig, task: Task, machine: Machine) -> dict[str, float]:
    """Share of train()'s time that forward, backward and optimiser on a batch at hand do not need; noise can make it
    negative."""
    training = Training(cfg, task, machine, [cfg.seed])
    forward, batch, steps = per_seed(training.model), training.batch(), LOOP_BLOCKS * cfg.trainer.steps
    long = dataclasses.replace(cfg, replicas=1, trainer=dataclasses.replace(cfg.trainer, steps=steps))
    loop = []

    def bare() -> None:
        parameters = list(training.parameters.values())
        for _ in range(steps):
            with machine.autocast():
                loss_S = forward(training.parameters, batch.inputs, batch.targets, None).mean_loss
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss_S.sum(), parameters), strict=True):
                parameter.grad = gradient.contiguous()
            training.optimizer.step()

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            # its own count: without building the model and opening the folder
            loop.append(train(copy.deepcopy(long), Run(Path(folder)))["seconds"])

    bare_seconds = paired(machine, cfg.repeats, bare=bare, whole=whole)["bare"]
    shares = 1 - bare_seconds / np.array(loop[1:])
    return {
        "share_outside_step": float(np.median(shares)),
        "share_outside_step_min": float(shares.min()),
        "share_outside_step_max": float(shares.max()),
    }


# --- attention -------------------------------------------------------------------------------------------------------


def attention(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """One layer's attention, forward and backward, of each kind against the dot product with free keys.

    explicit: with the N x N table of weights, where the step itself takes the fused kernel from some length on. Memory
    is what autograd keeps from the forward pass for the backward one, without the weights.
    """
    task = build_task(cfg.task)
    rows = []
    for num_tokens in ATTENTION_TOKENS:
        num_sequences = math.ceil(ATTENTION_BATCH / num_tokens)
        shape = (num_sequences, num_tokens, CHARACTER_MODEL["width"])
        x_BND, slope_BND = (
            torch.randn(shape, generator=generator_for(cfg.seed, purpose)).to(machine.device, machine.dtype)
            for purpose in ("train", "test")
        )
        steps = {}
        for kind, keys in ATTENTIONS.items():
            model = _model(
                dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **CHARACTER_MODEL, **keys)), task
            )
            module = model.attentions[0].to(machine.device, machine.dtype)
            for explicit in (False, True):
                steps[kind, explicit] = _attention_step(module, x_BND.requires_grad_(), slope_BND, machine, explicit)
        names = {at: f"{at[0]} {'explicit' if at[1] else 'step'}" for at in steps}
        seconds = paired(machine, cfg.repeats, **{names[at]: step for at, step in steps.items()})
        kept = {at: _kept_for_backward(step) for at, step in steps.items()}
        for kind in ATTENTIONS:
            step, explicit = (seconds[names[kind, which]] for which in (False, True))
            ratios = {"step_to_dot": step / seconds[names["dot", False]], "explicit_to_step": explicit / step}
            ratios["memory_to_dot"] = np.array([kept[kind, False] / kept["dot", False]])
            rows.append(
                {"attention": kind, "num_tokens": num_tokens, "num_sequences": num_sequences}
                | medians({"step": step, "explicit": explicit})
                | {"megabytes_step": kept[kind, False] / 1e6, "megabytes_explicit": kept[kind, True] / 1e6}
                | {key: value for name, ratio in ratios.items() for key, value in spread(name, ratio).items()}
            )
    table = pd.DataFrame(rows).assign(
        **CHARACTER_MODEL, device=machine.device.type, precision=machine.precision, repeats=cfg.repeats
    )
    return table.set_index(["attention", "num_tokens"])


def _attention_step(
    module: nn.Module, x_BND: Tensor, slope_BND: Tensor, machine: Machine, explicit: bool
) -> Callable[[], object]:
    def step() -> object:
        with machine.autocast():
            y_BND = module(x_BND, kernel="table" if explicit else "fused")
        return torch.autograd.grad(y_BND, [x_BND, *module.parameters()], slope_BND.to(y_BND.dtype))

    return step


def _kept_for_backward(step: Callable[[], object]) -> int:
    """Bytes that autograd keeps in this step, each piece of memory counted once; parameters and inputs are not."""
    sizes = {}

    def keep(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        step()
    return sum(sizes.values())


# --- start-up --------------------------------------------------------------------------------------------------------

STARTUP_COMMANDS = {
    "rankbench --help": ("-m", "rankbench", "--help"),
    "rankbench train --help": ("-m", "rankbench", "train", "--help"),
    "rankbench train --cfg job": ("-m", "rankbench", "train", "--cfg", "job"),
}


def startup(cfg: BenchConfig, machine: Machine) -> pd.DataFrame:
    """Wall-clock seconds of commands that compute nothing, each as a process of its own, against `import torch`."""
    names = list(STARTUP_COMMANDS)
    alternatives = {name: lambda words=STARTUP_COMMANDS[name]: _python(*words) for name in names}
    seconds = paired(machine, cfg.repeats, **alternatives, import_torch=lambda: _python("-c", "import torch"))
    imported = seconds["import_torch"]
    rows = [
        {
            "command": name,
            **medians({"command": seconds[name], "import_torch": imported}),
            **spread("to_import_torch", seconds[name] / imported),
            "repeats": cfg.repeats,
        }
        for name in names
    ]
    return pd.DataFrame(rows).set_index(["command"])


def _python(*words: str) -> None:
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)


BENCHMARKS: dict[str, Callable[[BenchConfig, Machine], pd.DataFrame]] = {
    "paths": paths,
    "training": training,
    "startup": startup,
    "attention": attention,
}
