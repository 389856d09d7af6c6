"""What a config may hold: types, meanings, units, and what fits together. The values stand in conf/*.yaml only.

This module knows no torch, so that a wrong config is refused before anything heavy is loaded.
"""

import dataclasses
import difflib
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A user's mistake, said in one line: what, got, allowed, next step."""


@dataclass
class ModelConfig:
    """One Transformer. Sizes are counts; skip_scale multiplies what a skip carries (1 = the plain skip)."""

    name: str = MISSING  # how tables and figures call this variant
    layers: int = MISSING
    heads: int = MISSING
    width: int = MISSING
    head_width: int | None = MISSING  # null: width / heads
    attention: str = MISSING
    tied_qk: bool = MISSING  # W_Q = W_K
    temperature: float = MISSING  # divides the scores before the softmax
    mix_attention: float = MISSING  # what is applied to the values: mix_attention P + mix_identity I + mix_uniform U,
    mix_identity: float = MISSING  # U averaging over the keys that a query sees; mix_uniform=-1 removes the mean
    mix_uniform: float = MISSING
    skip: bool = MISSING
    skip_scale: float = MISSING
    branch_scale: float = MISSING  # multiplies what a sub-layer adds; 1/sqrt(layers) keeps deep networks tame
    mlp: bool = MISSING
    mlp_ratio: float = MISSING  # hidden width of the MLP / width
    mlp_skip: bool = MISSING
    activation: str = MISSING
    norm: str = MISSING  # where the norm stands
    norm_kind: str = MISSING
    norm_affine: bool = MISSING
    mask: str = MISSING
    window: int | None = MISSING  # mask=window: how many tokens to either side are seen
    positions: str = MISSING
    bias: bool = MISSING
    dropout: float = MISSING
    init: str = MISSING
    init_gain: float = MISSING
    values: str = MISSING  # W_V and W_O at initialisation, where not as `init` says
    weight_norm: str = MISSING  # none, or sigma: every matrix of the blocks is gamma W / ||W||_2, gamma learned


@dataclass
class OptimizerConfig:
    """Update rule and learning-rate schedule; times are counted in steps."""

    name: str = MISSING
    lr: float = MISSING
    weight_decay: float = MISSING
    momentum: float = MISSING  # sgd only
    beta1: float = MISSING  # adam and adamw
    beta2: float = MISSING
    schedule: str = MISSING
    warmup: int = MISSING  # steps of linear warm-up
    milestones: list[int] = MISSING  # multistep: the steps at which the rate is multiplied by decay
    decay: float = MISSING


@dataclass
class TrainerConfig:
    """How long, on how much, and how often to look."""

    steps: int | None = MISSING  # either steps or epochs
    epochs: float | None = MISSING
    batch_size: int = MISSING
    eval_every: int = MISSING  # steps between rows of metrics.csv
    checkpoint_every: int = MISSING  # steps between checkpoints; what a kill can lose at most
    clip: float | None = MISSING  # largest gradient norm, per seed
    compile: bool = MISSING
    target_accuracy: float | None = MISSING  # a seed that reaches it on the test set stops
    tensorboard: bool = MISSING  # event files beside metrics.csv
    dynamics_every: int | None = MISSING  # steps between rows of layers.csv: rank and entropy of every layer
    dynamics_sequences: int = MISSING  # of the test set, whose metrics these are the means of


@dataclass
class BaseConfig:
    """What train and analyze have in common."""

    seed: int = MISSING
    replicas: int = MISSING  # seeds seed .. seed + replicas - 1, side by side
    device: str = MISSING
    precision: str = MISSING
    threads: int = MISSING
    budget: str | None = MISSING
    out: str = MISSING  # the folder that this command writes
    model: ModelConfig = MISSING
    task: dict[str, Any] = MISSING  # typed by the task's own dataclass, see rankbench.tasks
    analysis: dict[str, Any] = MISSING  # options by name, typed by the analysis' own dataclass
    claims: list[str] = MISSING  # tests on the tables, see rankbench.claims
    published: str | None = MISSING  # which figure of published.csv is drawn beside ours


@dataclass
class TrainConfig(BaseConfig):
    """rankbench train"""

    optimizer: OptimizerConfig = MISSING
    trainer: TrainerConfig = MISSING
    objective: str | None = MISSING  # what train returns to a sweeper


@dataclass
class AnalyzeConfig(BaseConfig):
    """rankbench analyze"""

    run: str | None = MISSING  # a folder, `latest`, or null: a fresh model from model and task
    # a preset may bring these; analyze leaves them alone
    optimizer: dict[str, Any] = MISSING
    trainer: dict[str, Any] = MISSING


@dataclass
class BenchConfig(TrainConfig):
    """rankbench bench: trainer.steps is the length of one timed block of training."""

    bench: list[str] = MISSING  # which benchmarks, see rankbench.bench
    repeats: int = MISSING  # paired repetitions
    sequences: int = MISSING  # whose paths are summed


@dataclass
class FigureKeys:
    """Which varied keys the figure of a report shows, and how; null: chosen by rankbench."""

    x: str | None = MISSING
    series: str | None = MISSING
    facet: str | None = MISSING


@dataclass
class ReportConfig:
    """rankbench report: it has no model of its own, the runs have."""

    runs: str = MISSING  # a run's or sweep's folder, a folder of them, a glob, or `latest`
    # the scoreboard of a preset or `all`, under outputs/; typed as experiment=, which Hydra keeps for a group
    scoreboard: str | None = MISSING
    out: str = MISSING
    report: FigureKeys = MISSING


SCHEMAS: dict[str, type[BaseConfig] | type[ReportConfig]] = {
    "train": TrainConfig,
    "analyze": AnalyzeConfig,
    "report": ReportConfig,
    "bench": BenchConfig,
}

# What a search can look for, and which way
OBJECTIVES = {"test_accuracy": "maximize", "test_loss": "minimize", "train_seconds": "minimize"}

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "objective": tuple(OBJECTIVES),
    "precision": ("fp32", "bf16", "fp64"),
    "budget": ("smoke", "laptop", "paper"),
    "model.attention": ("dot",),
    "model.activation": ("relu", "gelu"),
    "model.norm": ("none", "pre", "post"),
    "model.norm_kind": ("layernorm", "rmsnorm"),
    "model.mask": ("none", "causal", "window"),
    "model.positions": ("none", "learned", "sinusoidal"),
    "model.init": ("pytorch", "glorot", "bert", "scaled"),
    "model.values": ("free", "orthogonal", "zero"),
    "model.weight_norm": ("none", "sigma"),
    "optimizer.name": ("adam", "adamw", "sgd"),
    "optimizer.schedule": ("constant", "linear", "cosine", "multistep", "inverse_sqrt"),
}

# key: (smallest, largest) allowed; null values are left alone
RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**32 - 1),
    "replicas": (1, 4096),
    "threads": (1, 1024),
    "repeats": (1, 10_000),
    "sequences": (1, 1 << 30),
    "model.layers": (1, 1024),
    "model.heads": (1, 65536),
    "model.width": (1, 65536),
    "model.head_width": (1, 65536),
    "model.temperature": (1e-6, 1e6),
    "model.mix_attention": (-1e6, 1e6),
    "model.mix_identity": (-1e6, 1e6),
    "model.mix_uniform": (-1e6, 1e6),
    "model.skip_scale": (-1e6, 1e6),
    "model.branch_scale": (-1e6, 1e6),
    "model.mlp_ratio": (1e-3, 1e3),
    "model.window": (0, 1 << 20),
    "model.dropout": (0.0, 0.99),
    "model.init_gain": (0.0, 1e6),
    "optimizer.lr": (0.0, 1e3),
    "optimizer.weight_decay": (0.0, 1e3),
    "optimizer.momentum": (0.0, 1.0),
    "optimizer.beta1": (0.0, 0.999999),
    "optimizer.beta2": (0.0, 0.999999),
    "optimizer.warmup": (0, 1 << 40),
    "optimizer.decay": (0.0, 1e3),
    "trainer.steps": (0, 1 << 40),
    "trainer.epochs": (0.0, 1e9),
    "trainer.batch_size": (1, 1 << 30),
    "trainer.eval_every": (1, 1 << 40),
    "trainer.checkpoint_every": (1, 1 << 40),
    "trainer.clip": (1e-12, 1e12),
    "trainer.dynamics_every": (1, 1 << 40),
    "trainer.dynamics_sequences": (1, 1 << 20),
    "trainer.target_accuracy": (0.0, 1.0),
}

Options = TypeVar("Options")
LONGEST_FOLDER = 100  # characters of a job's folder name: file systems allow 255 bytes, and terminals less


def conf_dir() -> Path:
    """The folder of the shipped configs: inside the installed package, else beside it in a checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "conf"
    return packaged if packaged.is_dir() else package.parent / "conf"


def check(cfg: BaseConfig | ReportConfig) -> None:
    """Raise ConfigError for a value that is not among the allowed ones or does not go with another."""
    for key, allowed in CHOICES.items():
        value = _at(cfg, key)
        if value is not None and value not in allowed:
            raise ConfigError(unknown(key, value, allowed))
    for key, (smallest, largest) in RANGES.items():
        value = _at(cfg, key)
        # `not (a <= v <= b)` rather than two comparisons: it refuses nan as well
        if value is not None and not smallest <= value <= largest:
            raise ConfigError(f"{key}={value}: out of range; allowed are values from {smallest} to {largest}")
    if isinstance(cfg, BaseConfig):
        _check_model(cfg.model)
    if isinstance(cfg, TrainConfig):
        _check_training(cfg)


def _check_model(model: ModelConfig) -> None:
    if model.head_width is None and model.width % model.heads:
        raise ConfigError(
            f"model.width={model.width}: not divisible by model.heads={model.heads}; "
            f"choose a multiple of {model.heads}, or set model.head_width"
        )
    if model.mask == "window" and model.window is None:
        raise ConfigError("model.window=null: model.mask=window needs a width; set model.window to a number of tokens")
    if model.mask != "window" and model.window is not None:
        raise ConfigError(
            f"model.window={model.window}: only model.mask=window has a window; got model.mask={model.mask}"
        )
    if model.mlp_skip and not model.mlp:
        raise ConfigError("model.mlp_skip=true: there is no MLP to skip; set model.mlp=true or model.mlp_skip=false")
    if model.mlp and round(model.mlp_ratio * model.width) < 1:
        raise ConfigError(
            f"model.mlp_ratio={model.mlp_ratio}: leaves the MLP no hidden unit at model.width={model.width}; "
            f"allowed are ratios from {1 / model.width:g}"
        )


def _check_training(cfg: TrainConfig) -> None:
    trainer, optimizer = cfg.trainer, cfg.optimizer
    if (trainer.steps is None) == (trainer.epochs is None):
        raise ConfigError(
            f"trainer.steps={_text(trainer.steps)} trainer.epochs={_text(trainer.epochs)}: "
            "give exactly one of the two, and set the other to null"
        )
    if optimizer.schedule == "multistep" and not optimizer.milestones:
        raise ConfigError("optimizer.milestones=[]: optimizer.schedule=multistep needs steps, e.g. [1000,2000]")


def typed(cls: type[Options], values: dict[str, Any], prefix: str) -> Options:
    """An instance of dataclass `cls` from plain values; ConfigError for misspelt or missing keys and wrong types."""
    allowed = [field.name for field in dataclasses.fields(cls)]
    for key in values:
        if key not in allowed:
            raise ConfigError(f"{prefix}.{key}: unknown key{closest(key, allowed)}; allowed are {', '.join(allowed)}")
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)  # a frozen dataclass gives a read-only schema
    for key in allowed:
        if key not in values:
            raise ConfigError(f"{prefix}.{key}: missing; conf/{prefix.replace('.', '/')} sets it")
        try:
            schema[key] = values[key]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{prefix}.{key}={_text(values[key])}: {wanted(str(error))}") from None
    return OmegaConf.to_object(schema)


def wanted(message: str) -> str:
    """OmegaConf's complaint about a value, as what was wanted: `wants an integer`."""
    names = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}
    for word, meaning in names.items():
        if re.search(rf"(to|not a valid) {word}", message, re.IGNORECASE):
            return f"wants {meaning}"
    if "List" in message or "list" in message:
        return "wants a list, as [a,b]"
    if "not Optional" in message or "non-optional" in message.lower():
        return "null is not allowed here"
    return message.split("\n")[0]


def unknown(key: str, got: Any, allowed: Iterable[str]) -> str:
    """The line about a value that is not among the allowed ones."""
    allowed = list(allowed)
    return f"{key}={got}: unknown{closest(got, allowed)}; allowed are {', '.join(allowed)}"


def closest(got: str, allowed: tuple[str, ...] | list[str]) -> str:
    """`, did you mean x?` where one of the allowed words is near, else nothing."""
    near = difflib.get_close_matches(str(got), allowed, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _text(value: Any) -> str:
    """A value as the user would write it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _at(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        if not hasattr(cfg, part):
            return None
        cfg = getattr(cfg, part)
    return cfg


def resolve(cfg: DictConfig) -> TrainConfig | AnalyzeConfig | ReportConfig:
    """The composed Hydra config as a checked dataclass, every interpolation resolved."""
    budget = cfg.get("budget") if "budget" in cfg else None
    if budget is not None and budget not in CHOICES["budget"]:
        raise ConfigError(unknown("budget", budget, CHOICES["budget"]))
    _check_keys(cfg)
    try:
        resolved = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'config'}: {wanted(str(error))}") from None
    check(resolved)
    return resolved


def _check_keys(cfg: DictConfig, prefix: str = "") -> None:
    """Refuse keys that no schema has (with a + before it, Hydra adds any key) and schemas' keys that are not there."""
    schema = OmegaConf.get_type(cfg)
    if dataclasses.is_dataclass(schema):
        allowed = [field.name for field in dataclasses.fields(schema)]
        for key in cfg:
            if key not in allowed:
                raise ConfigError(
                    f"{prefix}{key}: unknown key{closest(key, allowed)}; allowed are {', '.join(allowed)}"
                )
        for key in allowed:
            if key not in cfg or OmegaConf.is_missing(cfg, key):
                raise ConfigError(f"{prefix}{key}: missing; leave ~{prefix}{key} out, or give it a value")
            if not OmegaConf.is_interpolation(cfg, key) and isinstance(cfg[key], DictConfig):
                _check_keys(cfg[key], f"{prefix}{key}.")


def by_budget(scales: DictConfig | dict, *, _root_: DictConfig) -> Any:
    """`${by_budget:{paper:3000,laptop:600,smoke:20}}`: one key's value at each scale of a preset."""
    return scales[_root_.budget or "paper"]


def compose(command: str, *overrides: str) -> TrainConfig | AnalyzeConfig:
    """The config of a command line, checked: compose("train", "model.layers=12", "replicas=5")."""
    import hydra

    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return resolve(hydra.compose(command, list(overrides)))


def register() -> None:
    """Make the schemas known to Hydra and `by_budget` to OmegaConf; safe to call twice."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(group="schema", name=name, node=schema, package="_global_")
    OmegaConf.register_new_resolver("by_budget", by_budget, replace=True)
    OmegaConf.register_new_resolver("groups_of", _groups_of, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
    OmegaConf.register_new_resolver("direction_of", direction_of, replace=True)
    OmegaConf.register_new_resolver("at_a_time", at_a_time, replace=True)


def direction_of(objective: str | None) -> str:
    """Which way a search goes for this objective; what is none of them is refused when the config is checked."""
    return OBJECTIVES.get(objective, "minimize")


def at_a_time(launcher: str) -> int | None:
    """How many jobs a launcher is given at a time, None for all: submitit's local one starts all that it is given."""
    return os.cpu_count() if launcher.endswith("submitit_launcher.LocalLauncher") else None


def job_folder(number: int, overrides: str) -> str:
    """A sweep job's folder: `3_model.layers=6`; of a long or slashed text a readable part and a digest of all."""
    readable = re.sub(r"[^\w.,=+-]", "-", str(overrides))
    if readable != overrides or len(readable) > LONGEST_FOLDER:
        digest = hashlib.sha256(str(overrides).encode()).hexdigest()[:8]
        readable = f"{readable[:LONGEST_FOLDER]}~{digest}"
    return f"{number}_{readable}" if overrides else str(number)


def _groups_of(command: str) -> str:
    """The config groups of a command with their choices, for its --help."""
    defaults = OmegaConf.load(conf_dir() / f"{command}.yaml").defaults
    names = [str(name) for entry in defaults if not isinstance(entry, str) for name in entry if "/" not in str(name)]
    choices = {name: sorted(path.stem for path in (conf_dir() / name).glob("*.yaml")) for name in sorted(names)}
    return "\n".join(f"  {name}: {', '.join(found)}" for name, found in choices.items()) or "  none"
