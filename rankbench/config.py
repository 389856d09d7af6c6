"""What a config may hold: types, meanings, units, and what fits together. The values stand in conf/*.yaml only.

This module knows no torch, so that a wrong config is refused before anything heavy is loaded.
"""

import dataclasses
import difflib
import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException


class ConfigError(ValueError):
    """A user's mistake, said in one line: what, got, allowed, next step."""


@dataclass
class ModelConfig:
    """One Transformer. Sizes are counts; skip_scale multiplies what a skip carries (1 = the plain skip)."""

    name: str = MISSING  # how tables and figures call this variant
    kind: str = MISSING  # transformer, or lstm: a recurrent network of `layers` layers of `width` cells
    layers: int = MISSING
    heads: int = MISSING
    width: int = MISSING
    head_width: int | None = MISSING  # null: width / heads
    value_width: int | None = MISSING  # of a head's values; null: head_width
    kv_groups: int | None = MISSING  # so many keys and values, each shared by heads / kv_groups heads; null: heads
    latent_width: int | None = MISSING  # keys and values are read from so many numbers of a token; null: from all
    head_reduction: str = MISSING  # sum, or mean: divided by heads * head_width / width, where that is above 1
    attention: str = MISSING
    contraction: float | None = MISSING  # contractive_l2: the bound on its Lipschitz constant, in the infinity norm
    contraction_when: str = MISSING  # always, or above: only where the bound of the weights is above it
    contraction_keys: int | None = MISSING  # for so many keys, the most that a query may see; null: as there are. A
    # causal network then knows how long its sequence is: give language models a number
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
    embedding_norm: bool = MISSING  # a norm of norm_kind behind the read-in and its positions, as in BERT
    read_in: str = MISSING  # linear; mlp: two maps with the activation between; identity: the coordinates are the state
    read_out: str = MISSING  # linear, or identity: the state's first coordinates are the output
    bias: bool = MISSING
    dropout: float = MISSING
    init: str = MISSING
    attention_init: float | None = MISSING  # s: the matrices of attention from U(+-s/sqrt(width)), not as `init` says
    init_gain: float = MISSING
    mlp_gain: float = MISSING  # multiplies the matrices of the MLPs besides: their Lipschitz constant by its square
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
    accumulate: int = MISSING  # passes that a batch is taken in, for want of memory; the step stays the same
    eval_every: int = MISSING  # steps between rows of metrics.csv
    checkpoint_every: int = MISSING  # steps between checkpoints; what a kill can lose at most
    clip: float | None = MISSING  # largest gradient norm, per seed
    compile: bool = MISSING
    target_accuracy: float | None = MISSING  # a seed that reaches it on the test set stops
    tensorboard: bool = MISSING  # event files beside metrics.csv
    dynamics_every: int | None = MISSING  # steps between rows of layers.csv: rank, entropy and constants of every layer
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
    statistic: str = MISSING  # over seeds, in the figure: mean (with its 95 % confidence interval) or best
    report: FigureKeys = MISSING


@dataclass
class DataConfig:
    """rankbench data"""

    corpus: str = MISSING
    folder: str | None = MISSING  # null: a cache folder, where tasks find it by the corpus' name


SCHEMAS: dict[str, type] = {
    "train": TrainConfig,
    "analyze": AnalyzeConfig,
    "report": ReportConfig,
    "bench": BenchConfig,
    "data": DataConfig,
}

# What a search can look for, and which way
OBJECTIVES = {
    "test_accuracy": "maximize",
    "test_loss": "minimize",
    "valid_loss": "minimize",
    "train_seconds": "minimize",
}

CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "objective": tuple(OBJECTIVES),
    "precision": ("fp32", "bf16", "fp64"),
    "budget": ("smoke", "laptop", "paper"),
    "statistic": ("mean", "best"),
    "model.kind": ("transformer", "lstm"),
    "model.attention": ("dot", "l2", "contractive_l2", "cosine"),
    "model.contraction_when": ("always", "above"),
    "model.activation": ("relu", "gelu"),
    "model.norm": ("none", "pre", "post"),
    "model.norm_kind": ("layernorm", "rmsnorm", "l2norm"),
    "model.head_reduction": ("sum", "mean"),
    "model.read_in": ("linear", "mlp", "identity"),
    "model.read_out": ("linear", "identity"),
    "model.mask": ("none", "causal", "window", "others"),
    "model.positions": ("none", "learned", "sinusoidal", "concatenated"),
    "model.init": ("pytorch", "glorot", "bert", "scaled"),
    "model.values": ("free", "orthogonal", "uniform", "zero"),
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
    "model.value_width": (1, 65536),
    "model.kv_groups": (1, 65536),
    "model.latent_width": (1, 65536),
    "model.contraction": (1e-6, 1e6),
    "model.contraction_keys": (1, 1 << 20),
    "model.temperature": (1e-6, 1e6),
    "model.mix_attention": (-1e6, 1e6),
    "model.mix_identity": (-1e6, 1e6),
    "model.mix_uniform": (-1e6, 1e6),
    "model.skip_scale": (-1e6, 1e6),
    "model.branch_scale": (-1e6, 1e6),
    "model.mlp_ratio": (1e-3, 1e3),
    "model.window": (0, 1 << 20),
    "model.dropout": (0.0, 0.99),
    "model.attention_init": (1e-6, 1e6),
    "model.init_gain": (0.0, 1e6),
    "model.mlp_gain": (0.0, 1e6),
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
    "trainer.accumulate": (1, 1 << 30),
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


def check(cfg: BaseConfig | ReportConfig | DataConfig) -> None:
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
        if cfg.model.kind == "lstm":
            _check_lstm(cfg)
    if isinstance(cfg, TrainConfig):
        _check_training(cfg)


def _check_model(model: ModelConfig) -> None:
    if model.head_width is None and model.width % model.heads:
        raise ConfigError(
            f"model.width={model.width}: not divisible by model.heads={model.heads}; "
            f"choose a multiple of {model.heads}, or set model.head_width"
        )
    if model.kv_groups is not None and model.heads % model.kv_groups:
        raise ConfigError(
            f"model.kv_groups={model.kv_groups}: does not divide model.heads={model.heads} into equal groups; "
            "choose a divisor of it, or null"
        )
    own = {key: getattr(model, key) for key in ("value_width", "kv_groups", "latent_width")}
    for key, value in own.items():
        if value is not None and model.weight_norm != "none":
            raise ConfigError(f"model.{key}={value}: not with model.weight_norm={model.weight_norm}; use none")
        if value is not None and model.tied_qk and key != "value_width":
            raise ConfigError(f"model.{key}={value}: not with model.tied_qk=true; set one of the two back")
    if model.latent_width is not None and model.values != "free":
        raise ConfigError(f"model.latent_width={model.latent_width}: not with model.values={model.values}; use free")
    _check_contraction(model)
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


def _check_contraction(model: ModelConfig) -> None:
    if model.attention != "contractive_l2":
        for key in ("contraction", "contraction_keys"):
            if (value := getattr(model, key)) is not None:
                raise ConfigError(
                    f"model.{key}={value}: only model.attention=contractive_l2 has one; got {model.attention}"
                )
        return
    if model.contraction is None:
        raise ConfigError(
            "model.contraction=null: model.attention=contractive_l2 needs a Lipschitz constant to stay below; "
            "set model.contraction=1, or take model=contractive_l2"
        )
    if not model.tied_qk:
        raise ConfigError(
            "model.tied_qk=false: model.attention=contractive_l2 has no Lipschitz constant with free keys; "
            "set model.tied_qk=true"
        )
    if model.mask == "others":
        raise ConfigError(
            "model.mask=others: model.attention=contractive_l2 has a Lipschitz constant where each token sees itself; "
            "use none, causal or window"
        )
    if model.values == "zero":
        raise ConfigError(
            "model.values=zero: model.attention=contractive_l2 would divide by the norm of W_V; "
            "use free, orthogonal or uniform"
        )


# What an LSTM is made of; every other key of the model stays as conf/model/lstm.yaml has it.
LSTM_KEYS = ("name", "kind", "layers", "width", "dropout", "init")


def _check_lstm(cfg: BaseConfig) -> None:
    folder = conf_dir() / "model"
    shipped = OmegaConf.merge(OmegaConf.load(folder / "transformer.yaml"), OmegaConf.load(folder / "lstm.yaml"))
    plain = OmegaConf.to_container(OmegaConf.create({"model": shipped}), resolve=True)["model"]
    for key, value in vars(cfg.model).items():
        if key not in LSTM_KEYS and value != plain[key]:
            raise ConfigError(
                f"model.{key}={_text(value)}: an LSTM has no such part; model=lstm leaves it at {_text(plain[key])}"
            )
    if cfg.model.init not in ("pytorch", "glorot"):
        raise ConfigError(f"model.init={cfg.model.init}: not for an LSTM; allowed are pytorch, glorot")
    if isinstance(cfg, BenchConfig):
        raise ConfigError("model.kind=lstm: the benchmarks are of Transformers; use model.kind=transformer")
    if isinstance(cfg, TrainConfig) and cfg.trainer.compile:
        raise ConfigError("trainer.compile=true: torch cannot compile an LSTM; use trainer.compile=false")
    if isinstance(cfg, TrainConfig) and cfg.trainer.dynamics_every is not None:
        raise ConfigError(
            f"trainer.dynamics_every={cfg.trainer.dynamics_every}: an LSTM has no attention to look at; use null"
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


def resolve(cfg: DictConfig) -> TrainConfig | AnalyzeConfig | ReportConfig | DataConfig:
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


def noam_peak(gamma: float, width: int, warmup: int) -> float:
    """gamma / sqrt(width * warmup): with this as its lr, and this warmup, optimizer.schedule=inverse_sqrt is
    gamma width^-1/2 min(t^-1/2, t warmup^-3/2) at the steps t = 1, 2, ... (Vaswani et al. 2017, eq. 3)."""
    return gamma / (width * warmup) ** 0.5


def columns(width: int, heads: int, times: int) -> int:
    """So many times the usual head width."""
    return times * width // heads


def heads_of(width: int, head_width: int | None, power: float) -> int:
    """How many heads of this width there are in width^power numbers: width^power / head_width, rounded."""
    return max(1, round(width**power / (head_width or width)))


def compose(command: str, *words: str) -> TrainConfig | AnalyzeConfig:
    """The config of a command line that asks for one job, checked: compose("train", "model.layers=12", "replicas=5").

    ConfigError, in the one line that the command prints, for words that cannot be, and for those that ask for a sweep.
    """
    import hydra
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from rankbench.messages import explain

    for word in words:
        if not isinstance(word, str):
            raise ConfigError(f"{word!r}: not an override; give texts, as in 'model=san', 'model.layers=12'")
        if word in ("-m", "--multirun"):
            raise ConfigError(_sweep_refused(word, command, words))
        if word.startswith(("hydra.", "hydra/", "cluster=", "search=")):
            raise ConfigError(f"{word}: is about jobs that Hydra starts, and here it starts none; leave it out")
    # `experiment` has a default, so Hydra would refuse the + that its own documentation uses
    words = tuple(word.removeprefix("+") if word.startswith("+experiment=") else word for word in words)
    register()
    try:
        overrides = OverridesParser.create().parse_overrides(list(words))
        for override in overrides:
            if override.is_sweep_override():
                raise ConfigError(_sweep_refused(override.input_line, command, words))
        with _beside_other_hydras(), hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            config = hydra.compose(command, list(words), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, command, list(words))) from None
    except ValueError as error:
        if "Config group override" not in str(error):  # Hydra's, for model=null; any other is a fault of ours
            raise
        raise ConfigError(explain(error, command, list(words))) from None
    typed_keys = {override.get_key_element() for override in overrides}
    varied = [key for key in config.hydra.sweeper.params or () if key not in typed_keys]
    if config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN" and varied:
        preset = next(word for word in words if word.startswith("experiment="))
        raise ConfigError(f"{_sweep_refused(preset, command, words)}; or give one value for {', '.join(varied)}")
    with open_dict(config):
        del config["hydra"]
    return resolve(config)


def _sweep_refused(word: str, command: str, words: Iterable[str]) -> str:
    line = shlex.join(["rankbench", command, "-m", *(word for word in words if word not in ("-m", "--multirun"))])
    return f"{word}: a sweep; run `{line}` in a terminal and read its folder with rankbench.load_sweep"


@contextmanager
def _beside_other_hydras() -> Iterator[None]:
    """Let Hydra be initialised here, and leave the global state of a Hydra app that is running as it was."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import JobRuntime
    from hydra.version import VersionBase

    running, version, job = GlobalHydra.instance(), VersionBase.instance(), JobRuntime.instance()
    before = running.hydra, version.version_base, job.conf.copy()
    running.clear()
    try:
        yield
    finally:
        GlobalHydra.set_instance(running)  # Hydra puts a copy in its place
        running.hydra, version.version_base, job.conf = before


def register() -> None:
    """Make the schemas known to Hydra and `by_budget` to OmegaConf; safe to call twice."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(group="schema", name=name, node=schema, package="_global_")
    OmegaConf.register_new_resolver("by_budget", by_budget, replace=True)
    OmegaConf.register_new_resolver("noam_peak", noam_peak, replace=True)
    OmegaConf.register_new_resolver("columns", columns, replace=True)
    OmegaConf.register_new_resolver("heads_of", heads_of, replace=True)
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


def job_folder(number: int, overrides: str, *, _root_: DictConfig | None = None) -> str:
    """A sweep job's folder: `3_model.layers=6`; of a long or slashed text a readable part and a digest of all.

    _root_: the job's config, whose value stands in the name for a reference to another key, as in `${model.skip}`.
    """
    if _root_ is not None:
        reference = r"\$\\?\{([\w.]+)\\?\}"  # Hydra hands a job its braces with a backslash before each
        overrides = re.sub(reference, lambda match: str(OmegaConf.select(_root_, match[1])), overrides)
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
