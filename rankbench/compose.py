"""From the words of a command line to a checked config, by Hydra."""

import dataclasses

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rankbench.config import KEYS, SCHEMAS, Config, ConfigError, check, conf_dir
from rankbench.keys import refuse_unknown, wanted
from rankbench.resolvers import RESOLVERS


def register() -> None:
    """Make the schemas known to Hydra and the resolvers to OmegaConf. It can be called twice."""
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(group="schema", name=name, node=schema, package="_global_")
    for resolver in RESOLVERS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


def composed(command: str, *overrides: str) -> DictConfig:
    """The config of a command line as Hydra composes it, unchecked."""
    register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose(command, list(overrides))


def compose(command: str, *overrides: str) -> Config:
    """The config of a command line, checked: compose("train", "model.layers=12", "replicas=5")."""
    return resolve(composed(command, *overrides))


def resolve(cfg: DictConfig) -> Config:
    """The composed Hydra config as a checked dataclass, every interpolation resolved."""
    if "budget" in cfg:  # the resolvers look it up
        KEYS["budget"].check("budget", cfg.budget)
    _check_names(cfg)
    try:
        resolved = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{getattr(error, 'full_key', None) or 'config'}: {wanted(str(error))}") from None
    check(resolved)
    return resolved


def _check_names(cfg: DictConfig, prefix: str = "") -> None:
    """Refuse a key that the schema does not have (with a + before it, Hydra adds any key) and one that is missing."""
    schema = OmegaConf.get_type(cfg)
    if dataclasses.is_dataclass(schema):
        allowed = [field.name for field in dataclasses.fields(schema)]
        refuse_unknown(cfg, allowed, prefix)
        for name in allowed:
            if name not in cfg or OmegaConf.is_missing(cfg, name):
                raise ConfigError(f"{prefix}{name}: missing; leave ~{prefix}{name} out, or give it a value")
            if not OmegaConf.is_interpolation(cfg, name) and isinstance(cfg[name], DictConfig):
                _check_names(cfg[name], f"{prefix}{name}.")
