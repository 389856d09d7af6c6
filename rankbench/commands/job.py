"""What the jobs of all commands share: their checked config, their log, and the one line of a refusal."""

import functools
import gc
import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rankbench.commands import failures
from rankbench.commands.checks import check_everything
from rankbench.commands.compose import resolve
from rankbench.commands.failures import INTERRUPTED, quit_silently, refusal_of, refuse, remove_records
from rankbench.commands.finished_jobs import announce
from rankbench.progress import logging_to
from rankbench.runs.files import WriteError
from rankbench.runs.sweep import Sweep


def one_line(job: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Turn an error of a job into its refusal, if it has one. A single run ends with its line. In a sweep Hydra gets
    it, the other jobs continue, and no folder is left of a job without results."""

    @functools.wraps(job)
    def job_of_one_line(config: DictConfig) -> Any:
        try:
            return job(config)
        except BrokenPipeError:  # Hydra would print a line of its own
            quit_silently()
        except BaseException as error:
            if (refusal := refusal_of(error)) is None or failures.wants_traceback:
                raise
            hydra, in_sweep = hydra_of_job()
            if in_sweep:
                remove_records(Path(hydra.runtime.output_dir))
                raise refusal from None
            refuse(hydra.job.name, refusal)

    return job_of_one_line


def hydra_of_job() -> tuple[Any, bool]:
    """Hydra's part of the running job's config, and whether the job is one of a sweep."""
    hydra = HydraConfig.get()
    return hydra, hydra.mode == RunMode.MULTIRUN


def typed_words(hydra: Any) -> list[str]:
    """The overrides as they were typed. Reading them from the config one by one would resolve `${...}` in them, to
    values that belong to none of the sweep's jobs."""
    words: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return words


@contextmanager
def working(command: str, out: str) -> Iterator[None]:
    """Write the log of a command into its folder, and add to the line about a signal or a full disk how to continue."""
    from rankbench.training.loop import Interrupted

    hydra, in_sweep = hydra_of_job()
    continues = f"the same command with {shlex.quote(f'out={hydra.sweep.dir if in_sweep else out}')} continues"
    with logging_to(Path(out) / f"{command}.log"):
        try:
            yield
        except (Interrupted, KeyboardInterrupt) as stop:
            refuse(command, f"{str(stop) or 'interrupted'}; {continues}", INTERRUPTED)
        except WriteError as error:
            raise WriteError(f"{error}; {continues}") from None


def prepared(config: DictConfig) -> Any:
    """The job's config, checked, with `out` set to the folder that Hydra gave it: in a sweep each job has its own."""
    hydra, in_sweep = hydra_of_job()
    cfg: Any = resolve(config, typed_words(hydra))
    cfg.out = os.path.relpath(hydra.runtime.output_dir)
    if in_sweep and hydra.runtime.choices.get("hydra/launcher") in ("joblib", "submitit_local"):
        from rankbench.runs.machine import share_gpus

        share_gpus(hydra.job.num)  # ray and Slurm hand out GPUs themselves
    check_everything(cfg)
    if in_sweep:
        announce(hydra.job.num, len(Sweep(Path(hydra.sweep.dir)).jobs()), hydra.job.override_dirname)
    if not gc.isenabled():  # the first job of a process: the work begins, and garbage is collected from here on
        if not gc.get_freeze_count():
            gc.freeze()  # what is imported stays, so no collection needs to look through it; later, garbage would, too
        gc.enable()
    return cfg
