"""Start what a command line asks for: one job, or the jobs of a sweep or of a search."""

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobReturn, configure_log, run_job
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from rankbench.commands.checks import check_job, check_single
from rankbench.commands.compose import resolve
from rankbench.commands.composition import composed_here, name_folder, parsed, record_words, register
from rankbench.commands.failures import leaving_nothing
from rankbench.commands.job import typed_words
from rankbench.commands.sweeps import sweep
from rankbench.config.keys import ConfigError

SECONDS_BETWEEN_LOOKS = 1  # of a worker at the sweep's process
SECONDS_TO_SAVE = 10  # for a training to finish its step and save a checkpoint


def start(command: str, words: list[str], job: Callable[[DictConfig], Any], wants_sweep: bool) -> None:
    """Run a command's job with these words, or all jobs of the sweep that -m or a preset makes of them.

    Nothing is written before all configs are checked.
    """
    overrides = parsed([*_naming_after_what_varies(words), *words])
    varied = [override for override in overrides if override.is_sweep_override()]
    config = composed_here(command, [str(override.input_line) for override in overrides if override not in varied])
    is_sweep = wants_sweep or config.hydra.mode == RunMode.MULTIRUN
    if varied and not is_sweep:
        hydra.compose(command, words)  # raises Hydra's error
    for override in varied:
        if override.is_hydra_override():
            raise ConfigError(f"{override.input_line}: a sweep varies no key of Hydra; give one value")
    record_words(config, overrides)
    name_folder(config, [override.key_or_group for override in varied])
    mode = RunMode.MULTIRUN if is_sweep else RunMode.RUN
    if config.hydra.mode != mode:
        config.hydra.mode = mode
        config.hydra.overrides.hydra.append(f"hydra.mode={mode.name}")
    configure_log(config.hydra.hydra_logging, config.hydra.verbose)
    # jobs of the other launchers are meant to outlive the command, or are ended by their cluster
    by_joblib = config.hydra.launcher._target_.endswith("JoblibLauncher")
    configs: Any = JobConfigs(os.getpid() if by_joblib else None)  # of Hydra's interface what launchers use
    context = HydraContext(configs, JobCallbacks(config))
    if is_sweep:
        sweep(config, context, job)
    else:
        _run(config, context, job)


def _naming_after_what_varies(words: list[str]) -> list[str]:
    """The word that has Hydra name the folders of a sweep's jobs after the keys that vary between them alone."""
    overrides = parsed(words)
    varied = {override.key_or_group for override in overrides if override.is_sweep_override()}
    keys = dict.fromkeys(override.key_or_group for override in overrides if not override.is_delete())
    same = [key for key in keys if key not in varied]
    return [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(same)}]"] if same else []


def _run(config: DictConfig, context: HydraContext, job: Callable[[DictConfig], Any]) -> None:
    """Run a single job."""
    words = typed_words(config.hydra)
    check_job(cfg := resolve(config, words), words)
    check_single(cfg)
    told = {"config": config, "config_name": config.hydra.job.config_name}
    context.callbacks.on_run_start(**told)
    with leaving_nothing(Path(config.hydra.run.dir)):
        returned = run_job(job, config, "hydra.run.dir", None, context)
        context.callbacks.on_run_end(**told, job_return=returned)
        _ = returned.return_value  # raises the job's error


class JobConfigs:
    """Composes the config of each of a sweep's jobs for Hydra's launchers, also in the processes that they start.

    ends_with: the process with which those processes end; None: they may outlive it.
    """

    def __init__(self, ends_with: int | None) -> None:
        self.ends_with = ends_with

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        """The config of the job with these words. `${now:...}` and the sweep's folder are the same in all jobs."""
        words = [*master_config.hydra.overrides.hydra, *sweep_overrides]
        config = composed_here(master_config.hydra.job.config_name, words)
        if "out" in config and not any(word.startswith("out=") for word in sweep_overrides):
            config.out = master_config.out
        OmegaConf.copy_cache(from_config=master_config, to_config=config)
        return config

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Prepare the process to which a launcher has sent the configs."""
        self.__dict__ = state
        register()
        if self.ends_with is not None:
            _end_with(self.ends_with)


@cache  # each of a worker's jobs asks for it
def _end_with(sweep: int) -> None:
    """End this process soon after the process `sweep`, its parent, has ended in any way, even killed."""
    threading.Thread(target=_watch, args=(sweep,), name="end with the sweep", daemon=True).start()


def _watch(sweep: int) -> None:
    while os.getppid() == sweep:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    # after its training the worker would wait for another job forever
    time.sleep(SECONDS_TO_SAVE)
    os.kill(os.getpid(), signal.SIGKILL)


class JobCallbacks(Callbacks):
    """The callbacks of the config, which the user may have added."""

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Drop a job's configs: Hydra keeps what each job returned until the sweep's end, a sixth of a MiB each."""
        super().on_job_end(config, job_return)
        job_return.cfg = job_return.hydra_cfg = None
