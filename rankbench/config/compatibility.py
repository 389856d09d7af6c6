"""Which values of a config go together. Like rankbench.config.schema, this module does not import torch."""

from operator import attrgetter
from typing import Any, NoReturn

from rankbench.config.keys import ConfigError, as_typed, entries
from rankbench.config.model import ModelConfig
from rankbench.config.schema import AnalyzeConfig, BaseConfig, Config, TrainConfig, conf_dir


def check(cfg: Config) -> None:
    """Raise ConfigError for a value that is not allowed, or that does not go with another value."""
    for entry in entries(type(cfg)):
        entry.key.check(entry.name, attrgetter(entry.name)(cfg))
    if isinstance(cfg, BaseConfig):
        _check_model(cfg.model)
        if cfg.model.kind == "lstm":
            _check_lstm(cfg)
    if isinstance(cfg, AnalyzeConfig) and cfg.precision == "bf16":
        raise ConfigError("precision=bf16: analyses check sums to rounding; allowed are fp32, fp64")
    if isinstance(cfg, TrainConfig):
        _check_training(cfg)


def _refuse(group: Any, names: str, why: str) -> NoReturn:
    """Refuse the value of a key, or those of several. group: a ModelConfig, OptimizerConfig or TrainerConfig."""
    prefix = type(group).__name__.removesuffix("Config").lower()
    given = (f"{prefix}.{name}={as_typed(getattr(group, name))}" for name in names.split())
    raise ConfigError(f"{' '.join(given)}: {why}")


def _check_model(model: ModelConfig) -> None:
    if model.head_width is None and model.width % model.heads:
        way_out = f"choose a multiple of {model.heads}, or set model.head_width"
        _refuse(model, "width", f"not divisible by model.heads={model.heads}; {way_out}")
    if model.kv_groups is not None and model.heads % model.kv_groups:
        why = f"does not divide model.heads={model.heads} into equal groups; choose a divisor of it, or null"
        _refuse(model, "kv_groups", why)
    for name in ("value_width", "kv_groups", "latent_width"):
        if (value := getattr(model, name)) is not None and model.weight_norm != "none":
            _refuse(model, name, f"cannot be combined with model.weight_norm={model.weight_norm}; use none")
        if value is not None and model.tied_qk and name != "value_width":
            _refuse(model, name, "cannot be combined with model.tied_qk=true; reset one of the two to its default")
    for name, value, only in (("tied_qk", model.tied_qk, False), ("weight_norm", model.weight_norm, "none")):
        if value != only and model.query_gains != [1.0]:
            _refuse(
                model,
                "query_gains",
                f"needs W_Q apart from other maps; set model.{name}={as_typed(only)}, or model.query_gains=[1.0]",
            )
    if model.latent_width is not None and model.values != "free":
        _refuse(model, "latent_width", f"cannot be combined with model.values={model.values}; use free")
    _check_contraction(model)
    if model.mask == "window" and model.window is None:
        _refuse(model, "window", "model.mask=window needs a width; set model.window to a number of tokens")
    if model.mask != "window" and model.window is not None:
        _refuse(model, "window", f"only model.mask=window has a window; got model.mask={model.mask}")
    if model.norm_scale != "none" and model.norm == "none":
        _refuse(
            model, "norm_scale", "model.norm=none has no norm to scale; set model.norm=pre, or model.norm_scale=none"
        )
    for name, is_used in (("value_residual", model.value_residual != 0), ("norm_scale", model.norm_scale != "none")):
        if is_used and model.shared_layers:
            _refuse(model, name, "makes layers differ, which model.shared_layers=true does not allow; set it to false")
    if model.weight_norm == "sigma":
        zero = {"values": model.values == "zero", "init_gain": not model.init_gain}
        zero |= {"mlp_gain": model.mlp and not model.mlp_gain}
        for name in filter(zero.get, zero):
            _refuse(model, name, "model.weight_norm=sigma divides by spectral norms, which would be 0; use none")
    _check_streams(model)
    if model.mlp_skip and not model.mlp:
        _refuse(model, "mlp_skip", "there is no MLP to skip; set model.mlp=true or model.mlp_skip=false")
    if model.mlp and round(model.mlp_ratio * model.width) < 1:
        why = f"leaves the MLP no hidden unit at model.width={model.width}; "
        _refuse(model, "mlp_ratio", f"{why}allowed are ratios from {1 / model.width:g}")


def _check_streams(model: ModelConfig) -> None:
    off = {"value_residual": 0, "embedding_skip": 0, "hyper_connections": "none"}
    used = [name for name, none in off.items() if getattr(model, name) != none]
    if len(used) > 1:
        _refuse(model, " ".join(used), "only one of these can be used; reset the others to their defaults")
    if model.value_residual and model.attention == "contractive_l2":
        why = "model.attention=contractive_l2 has no Lipschitz constant for values of two layers; use l2"
        _refuse(model, "value_residual", why)
    if model.value_residual and model.exclusive:
        why = "cannot be combined with model.exclusive=true, which needs the values of a single layer; set it to false"
        _refuse(model, "value_residual", why)
    if model.hyper_connections == "none":
        return
    if model.norm in ("post", "ngpt"):
        _refuse(model, "hyper_connections", "norms must come before the branches; use model.norm=pre, peri or none")
    if not model.skip or model.mlp_skip != model.mlp:
        why = "replaces the skips around every sub-layer; set model.skip=true and mlp_skip=model.mlp"
        _refuse(model, "hyper_connections", why)


def _check_contraction(model: ModelConfig) -> None:
    if model.attention != "contractive_l2":
        for name in ("contraction", "contraction_keys"):
            if getattr(model, name) is not None:
                _refuse(model, name, f"only model.attention=contractive_l2 has one; got {model.attention}")
        return
    demands = {
        "contraction": (model.contraction is None, "needs a Lipschitz constant; set model.contraction=1"),
        "tied_qk": (not model.tied_qk, "has no Lipschitz constant with free keys; set model.tied_qk=true"),
        "mask": (
            model.mask == "others",
            "has no Lipschitz constant where a token does not see itself; use none, causal or window",
        ),
        "exclusive": (
            model.exclusive,
            "has no Lipschitz constant once the part along the own value is removed; set model.exclusive=false",
        ),
        "values": (model.values == "zero", "would divide by the norm of W_V, 0; use free, orthogonal or uniform"),
        "init_gain": (not model.init_gain, "would divide by the norms of matrices, 0; use a value above 0"),
        "mix_attention": (
            not (model.mix_attention or model.mix_identity or model.mix_uniform),
            "would divide by the bound of a map to 0; use 1",
        ),
    }
    for name, (broken, why) in demands.items():
        if broken:
            _refuse(model, name, f"model.attention=contractive_l2 {why}")


# The keys that an LSTM has. Every other key of the model must stay as conf/model/lstm.yaml sets it.
LSTM_KEYS = ("name", "kind", "layers", "width", "dropout", "init")


def _check_lstm(cfg: BaseConfig) -> None:
    import yaml

    shipped = vars(ModelConfig(**yaml.safe_load((conf_dir() / "model" / "lstm.yaml").read_text(encoding="utf-8"))))
    for name, value in vars(cfg.model).items():
        if name not in LSTM_KEYS and value != shipped[name]:
            _refuse(cfg.model, name, f"an LSTM has no such part; model=lstm leaves it at {as_typed(shipped[name])}")
    if cfg.model.init not in ("pytorch", "glorot"):
        _refuse(cfg.model, "init", "not for an LSTM; allowed are pytorch, glorot")
    if not isinstance(cfg, TrainConfig):
        return
    if cfg.trainer.compile == "true":
        _refuse(cfg.trainer, "compile", "torch cannot compile an LSTM; use trainer.compile=false")
    if cfg.optimizer.name == "muon" or cfg.optimizer.cap is not None:
        why = "muon and the cap are for the matrices of a Transformer; use adam, adamw or sgd, and optimizer.cap=null"
        _refuse(cfg.optimizer, "name cap", why)
    if cfg.trainer.dynamics_every is not None:
        _refuse(cfg.trainer, "dynamics_every", "an LSTM has no attention to measure; use null")


def _check_training(cfg: TrainConfig) -> None:
    trainer, optimizer = cfg.trainer, cfg.optimizer
    if (trainer.steps is None) == (trainer.epochs is None):
        _refuse(trainer, "steps epochs", "give exactly one of the two, and set the other to null")
    if optimizer.schedule == "multistep" and not optimizer.milestones:
        _refuse(optimizer, "milestones", "optimizer.schedule=multistep needs steps, e.g. [1000,2000]")
    if optimizer.cap is not None and cfg.model.weight_norm != "none":
        why = "a matrix has the spectral norm gamma, whatever its weight; use none"
        _refuse(optimizer, "cap", f"with model.weight_norm={cfg.model.weight_norm} {why}")
