"""What the commands refuse before they write: what their own checks refuse, folders that cannot be written, and texts
that are missing."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from rankbench.config import plugins
from rankbench.config.keys import ConfigError, refuse_null_byte
from rankbench.config.presets import Preset, described
from rankbench.config.schema import SCHEMAS, AnalyzeConfig, BaseConfig, Config, TrainConfig
from rankbench.runs.files import regular
from rankbench.runs.records import or_empty, read_yaml
from rankbench.runs.sweep import JOBS


def check_job(cfg: Config, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for a job that its command refuses, or whose text is missing or does not fit."""
    with doubting_plugins():
        check_everything(cfg, words)
        check_corpus(cfg)


@contextmanager
def doubting_plugins() -> Iterator[None]:
    """Turn an error in our own code into a ConfigError if there are plug-ins, which then break a promise."""
    try:
        yield
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        if isinstance(error, ConfigError) or not plugins.LOADED or plugins.frames_of_user(error):
            raise
        raise ConfigError(
            f"plugins=[{','.join(sorted(plugins.LOADED))}]: rankbench fails with what it brings "
            f"({type(error).__name__}: {error}); docs/EXTENDING.md says what is asked of it; HYDRA_FULL_ERROR=1 shows "
            "where"
        ) from error


def check_everything(cfg: Config, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for a config or for words that its command refuses. A text may be missing."""
    command = next(name for name, schema in SCHEMAS.items() if type(cfg) is schema)
    import_module(f"rankbench.commands.{command}").check(cfg, words)


def check_folder(name: str, key: str = "out") -> None:
    """Refuse an output folder that has no name, or that cannot be made or written."""
    if not name:
        raise ConfigError(f"{key}=: is empty; leave it out, or give a folder")
    refuse_null_byte(key, name)
    existing = (out := Path(name)).absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{key}={out}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={out}: {existing} cannot be written; give another folder")
    check_records(out)


def check_single(cfg: Config) -> None:
    """Refuse a single run in the folder of a sweep, which could then not be continued, and whose tables it would write
    over; and in the folder of another kind of run."""
    if isinstance(cfg, BaseConfig):
        if (Path(cfg.out) / JOBS).exists():
            raise ConfigError(f"out={cfg.out}: the folder of a sweep; give the run a folder of its own")
        check_kind(cfg, Path(cfg.out))


def check_kind(cfg: Config, folder: Path) -> None:
    """Refuse a training in the folder of an analysis, an analysis in that of a training, and both in that of a training
    watched by rankbench.observe: their configs would be written over."""
    there = or_empty(read_yaml, folder / "config.yaml")
    kinds = {"observe": "a watched training", "run": "an analysis", "trainer": "a training run"}
    kind = next((kinds[key] for key in kinds if key in there), None)
    own = {TrainConfig: kinds["trainer"], AnalyzeConfig: kinds["run"]}.get(type(cfg), kind)
    if kind not in (None, own):
        raise ConfigError(f"out={folder}: the folder of {kind}; give another folder")


def check_records(folder: Path) -> None:
    """Refuse a folder with a pipe or a folder where Hydra writes its records: the write would hang or fail."""
    for path in (folder / "multirun.yaml", *folder.glob(".hydra/*")):
        regular(path)


def preset_in(words: Sequence[str]) -> tuple[str, Preset | None]:
    """The name of the preset that the words name, of several the last, and the preset, if there is one."""
    name = next((word.partition("=")[2] for word in reversed(words) if word.startswith("experiment=")), "")
    return name, described().get(name) if name else None


def measured(cfg: BaseConfig) -> BaseConfig:
    """The config whose task and model the command works with: its own, or that of the run named by run=."""
    if not isinstance(cfg, AnalyzeConfig) or cfg.run is None:
        return cfg
    from rankbench.runs.run import find_run

    run = find_run(cfg.run)
    if run.folder.is_file():
        raise ConfigError(f"run={cfg.run}: a file; give the folder of a run, or run=latest")
    plugins.require(run.config.plugins, run.folder)
    return run.config


def check_corpus(cfg: Config) -> None:
    """Refuse a text that is missing or does not fit, and what a plug-in brings that does not keep its promises: the
    sequences of a task, the weights of an attention, an update rule, the table of an analysis. A check of its own, as a
    preset is valid without its corpus."""
    from rankbench.analysing.modules import is_foreign

    if isinstance(cfg, BaseConfig) and not is_foreign(cfg):
        from rankbench.analysing.runner import try_analyses
        from rankbench.model import build_model
        from rankbench.model.kind_check import check_kind
        from rankbench.model.weighting_check import check_weighting
        from rankbench.tasks import Corpus, build_task, check_sample
        from rankbench.training.optimizers import check_optimizer

        of_networks = measured(cfg)
        if isinstance(task := build_task(of_networks.task), Corpus):
            task.splits()
            build_model(of_networks.model, task)
        elif not type(task).__module__.startswith("rankbench."):
            check_sample(task)
        if of_networks.model.kind in plugins.brought("MODELS"):
            check_kind(of_networks.model, task)
        if of_networks.model.attention in plugins.brought("ATTENTIONS"):
            check_weighting(of_networks.model.attention)
        if isinstance(cfg, TrainConfig) and cfg.optimizer.name in plugins.brought("OPTIMIZERS"):
            check_optimizer(cfg.optimizer)
        try_analyses(cfg, of_networks)
