"""Hydra's compositions. What many command lines share, the choice and merging of YAML files, is composed once."""

import functools
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rankbench.commands.messages import groups
from rankbench.commands.resolvers import RESOLVERS
from rankbench.config import plugins
from rankbench.config.schema import SCHEMAS, conf_dir

MOST_KEPT = 64  # compositions, about 20 KiB each
NAMING = {"experiment", "model", "model.name", "checkpoint", "module", "run"}  # keys that a folder's name is taken from
LONGEST_NAME = 40  # characters of a preset's or a model's name in that of a folder


class PluginFolders(SearchPathPlugin):
    """Makes Hydra look for YAML files in the folders of plug-ins, after the shipped ones."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders."""
        for folder in plugins.folders()[1:]:
            search_path.append("rankbench.plugins", f"file://{folder}")


def register() -> None:
    """Register the schemas and the plug-ins' folders with Hydra, and the resolvers with OmegaConf. Calling it again
    does no harm."""
    Plugins.instance().register(PluginFolders)
    _store_schemas()
    for resolver in RESOLVERS:
        OmegaConf.register_new_resolver(resolver.__name__, resolver, replace=True)


@functools.cache
def _store_schemas() -> None:
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(group="schema", name=name, node=schema, package="_global_")


@contextmanager
def initialised() -> Iterator[None]:
    """Hydra with our configs; afterwards the global state of a running Hydra app is restored."""
    register()
    running, version, job = GlobalHydra.instance(), VersionBase.instance(), JobRuntime.instance()
    before = running.hydra, version.version_base, job.conf.copy()
    running.clear()
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            yield
    finally:
        GlobalHydra.set_instance(running)  # Hydra has replaced it by a copy
        running.hydra, version.version_base, job.conf = before


def composed(command: str, *words: str, return_hydra_config: bool = False) -> DictConfig:
    """The config of a command line as hydra.compose composes it, unchecked."""
    with initialised():
        config = composed_here(command, words)
    if not return_hydra_config:
        with open_dict(config):
            del config["hydra"]
    return config


def composed_here(command: str, words: Sequence[str]) -> DictConfig:
    """The same with Hydra's own part, by the Hydra that is initialised.

    The words that only set values, as seed=3, change a copy of what the others choose and merge.
    """
    overrides = parsed(words)
    values = [override for override in overrides if _sets_a_value(command, override)]
    others = [override for override in overrides if override not in values]
    # words that add or remove keys, or set several at once, depend on their order; a user's folder may hold many files
    if any(not _is_plain(override) or override.key_or_group == "hydra.searchpath" for override in others):
        return hydra.compose(command, list(words), return_hydra_config=True)
    chosen = tuple(override.input_line for override in others)
    config = pickle.loads(_composition(command, chosen, _yaml_files(plugins.folders())))
    for override in values:
        try:
            OmegaConf.update(config, override.key_or_group, override.value(), merge=True)
        except OmegaConfBaseException:  # let Hydra refuse it
            return hydra.compose(command, list(words), return_hydra_config=True)
    record_words(config, overrides)
    return config


def name_folder(config: DictConfig, varied: Iterable[str] = ()) -> None:
    """Add the name of the preset, the network or the model to a folder that is named after the time alone.

    varied: the keys of a sweep; if one of them is in NAMING, the folder has no name.
    """
    plain: Any = OmegaConf.to_container(config)
    folder = str(plain.get("out") or "")
    if not folder.endswith("}") or "${now:" not in folder or NAMING & set(varied):
        return
    name = config.hydra.runtime.choices.get("experiment")
    if not name:
        given = config.get("checkpoint") or config.get("module")
        model = plain.get("model")
        name = re.split("[/:]", given.rstrip("/"))[-1] if given else isinstance(model, dict) and config.model.name
    if name and not config.get("run"):
        name = re.sub(r"[^\w.+-]+", "-", str(name))[:LONGEST_NAME]
        config.out = f"{folder}_{name}"


def parsed(words: Iterable[str]) -> list[Override]:
    """The words as Hydra's overrides; glob(...) needs a Hydra that is initialised."""
    running = GlobalHydra.instance()
    loader = running.config_loader() if running.is_initialized() else None
    return OverridesParser.create(loader).parse_overrides(list(words))


def record_words(config: DictConfig, overrides: Iterable[Override]) -> None:
    """Write the words of a command line into Hydra's part of its config, as Hydra does."""
    own, name = config.hydra, config.hydra.job.config.override_dirname
    typed = [override for override in overrides if not override.is_hydra_override()]
    lines = sorted(str(override.input_line) for override in typed if override.key_or_group not in name.exclude_keys)
    own.overrides.task.clear()
    own.overrides.task.extend([override.input_line for override in typed])
    own.job.override_dirname = name.item_sep.join(lines).replace("=", name.kv_sep)
    own.runtime.cwd = os.getcwd()


def _sets_a_value(command: str, override: Override) -> bool:
    """Whether the word only sets a value, and so decides nothing about the YAML files."""
    key = override.key_or_group
    return ("." in key or key in _ungrouped(command)) and _is_plain(override) and not override.is_hydra_override()


def _is_plain(override: Override) -> bool:
    """Whether the word is key=value, with one value, no sign before it and no package."""
    signs = override.is_add() or override.is_force_add() or override.is_delete()
    return not (signs or override.is_sweep_override() or override.package or isinstance(override.value(), dict))


@functools.cache
def _ungrouped(command: str) -> set[str]:
    """The command's keys without a dot that are no groups of YAML files."""
    return {field.name for field in fields(SCHEMAS[command])} - set(groups())


@functools.lru_cache(MOST_KEPT)
def _composition(command: str, words: tuple[str, ...], yaml_files: tuple) -> bytes:
    """The composition of these words, pickled. yaml_files: what it was read from, so that a changed file is read."""
    return pickle.dumps(hydra.compose(command, list(words), return_hydra_config=True))


def _yaml_files(folders: Iterable[Path]) -> tuple:
    """The YAML files in these folders, with the times at which they were written."""
    paths = (os.path.join(parent, name) for folder in folders for parent, _, names in os.walk(folder) for name in names)
    return tuple((path, os.stat(path).st_mtime_ns) for path in paths if path.endswith(".yaml") and os.path.exists(path))
