"""The jobs of a sweep: checked before the first begins, launched by Hydra's launchers, gathered after the last."""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from rankbench.commands.checks import check_job, check_kind, check_records
from rankbench.commands.compose import load_plugins, resolve
from rankbench.commands.composition import composed, composed_here, parsed
from rankbench.commands.failures import INTERRUPTED, quit_silently, refuse
from rankbench.commands.finished_jobs import FinishedJob, finished_job, recipe, surroundings
from rankbench.commands.job import typed_words
from rankbench.commands.messages import explaining
from rankbench.commands.resolvers import job_folder
from rankbench.config.keys import ConfigError, in_one_line
from rankbench.config.schema import KEYS, OBJECTIVES, TrainConfig
from rankbench.progress import counted, duration, logging_to
from rankbench.runs.files import WriteError
from rankbench.runs.records import read_yaml
from rankbench.runs.sweep import Job, Sweep


def sweep(config: DictConfig, context: HydraContext, job: Callable[[DictConfig], Any]) -> None:
    """Run the jobs of a sweep or of a search (Optuna), then gather their results, also if one of them failed."""
    command = config.hydra.job.config_name
    for key, kind in (("launcher", Launcher), ("sweeper", Sweeper)):
        known = [f"{plugin.__module__}.{plugin.__name__}" for plugin in Plugins.instance().discover(kind)]
        if (target := config.hydra[key]._target_) not in known:
            raise ConfigError(f"hydra.{key}._target_={target}: unknown; allowed are {', '.join(known)}")
    if (launcher := config.hydra.launcher._target_).endswith("SlurmLauncher"):
        if shutil.which("srun") is None:
            raise ConfigError(
                "cluster=slurm: no srun here; start it on a machine of the cluster, or try cluster=submitit_local"
            )
        from rankbench.commands.slurm import PatientLauncher  # needs the extra

        Plugins.instance().class_name_to_class[launcher] = PatientLauncher
    if command in ("train", "analyze") and (Path(config.hydra.sweep.dir) / "config.yaml").exists():
        raise ConfigError(f"out={config.hydra.sweep.dir}: the folder of a run; give the sweep a folder of its own")
    if _is_search(config):
        _check_search(config)
    else:
        grid = Grid(config)
        grid.check_and_list()
    told = {"config": config, "config_name": command}
    how: dict[str, Any] = {"config": config, "hydra_context": context, "task_function": job}
    context.callbacks.on_multirun_start(**told)
    try:
        if _is_search(config):
            Plugins.instance().instantiate_sweeper(**how).sweep(arguments=typed_words(config.hydra))
        else:
            grid.launch(Plugins.instance().instantiate_launcher(**how))
    except KeyboardInterrupt:
        out = shlex.quote(f"out={config.hydra.sweep.dir}")
        refuse(command, f"interrupted; the same command with {out} continues", INTERRUPTED)
    except Exception:
        with suppress(SystemExit):  # a failed report has printed its line, and the command fails anyway
            _gather(config)
        raise
    context.callbacks.on_multirun_end(**told)
    _gather(config)


def _is_search(config: DictConfig) -> bool:
    return not config.hydra.sweeper._target_.endswith("BasicSweeper")


class Grid:
    """All combinations of a sweep's values: the words of each job, and those jobs that have finished, by number."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.folder = Path(config.hydra.sweep.dir)
        self.jobs = jobs_of(_sweep_overrides(config))
        self.finished: dict[int, FinishedJob] = {}

    def check_and_list(self) -> None:
        """Check the config of every job, and list the jobs in the sweep's folder."""
        sweep = Sweep(self.folder)
        with logging_to(None):
            jobs = list(counted(self._checked(sweep), len(self.jobs), "checking: jobs"))
        sweep.check_same(jobs)
        sweep.list_jobs(jobs)

    def _checked(self, sweep: Sweep) -> Iterator[Job]:
        """The jobs, checked. Those that have finished were checked when they ran."""
        from rankbench.runs.run import Run

        command = self.config.hydra.job.config_name
        listed = sweep.jobs() if command == "train" else []
        if listed:
            load_plugins()  # their code belongs to the surroundings
            around = surroundings(self.config.hydra)
        for number, words in enumerate(self.jobs):
            if number < len(listed):
                folder = sweep.folder / listed[number].folder
                if (finished := finished_job(folder, recipe(number, words, around))) is not None:
                    self.finished[number] = finished
                    yield listed[number]
                    continue
            with explaining(command, words):
                job_config = composed_here(command, [*self.config.hydra.overrides.hydra, *words])
            check_job(cfg := resolve(job_config, words), words)
            own_words = tuple(_resolved(word, job_config) for word in words)
            job = Job(job_folder(number, job_config.hydra.job.override_dirname, _root_=job_config), own_words)
            check_kind(cfg, sweep.folder / job.folder)
            if type(cfg) is TrainConfig:
                Run(sweep.folder / job.folder).check_same(cfg)
                check_records(sweep.folder / job.folder)
            yield job

    def launch(self, launcher: Launcher) -> None:
        """Run the jobs that have not finished, in batches, and print the lines of the others; raises the error of the
        first job that failed in a batch.

        A launcher numbers the jobs that it gets consecutively. A parallel launcher therefore gets all jobs from the
        first to the last unfinished one; finished jobs in between notice that and end by themselves.
        """
        OmegaConf.save(self.config, self.folder / "multirun.yaml")
        most = self.config.hydra.sweeper.max_batch_size or -1
        size = most if most > 0 else len(self.jobs)  # -1: all, as in Hydra
        in_turn = self.config.hydra.launcher._target_.endswith("BasicLauncher")
        began, num_run = time.monotonic(), 0
        for first in range(0, len(self.jobs), size):
            numbers = range(first, min(first + size, len(self.jobs)))
            todo = [number for number in numbers if number not in self.finished]
            todo = todo if in_turn else list(range(todo[0], todo[-1] + 1)) if todo else []
            results: list[JobReturn] = []
            for number in numbers:
                if number not in todo:
                    self.finished[number].show(number, len(self.jobs))
                elif in_turn or number == todo[0]:
                    together = [number] if in_turn else todo
                    results += launcher.launch([self.jobs[job] for job in together], initial_job_idx=number)
                    num_run += len(together)
                    self._print_time_left(together[-1] + 1, (time.monotonic() - began) / num_run)
            failed = [returned for returned in results if returned.status == JobStatus.FAILED]
            for returned in failed[1:]:
                words = " ".join(returned.overrides or ())
                print(f"rankbench: the job {words} failed, too: {returned._return_value}", file=sys.stderr)
            for returned in failed[:1]:
                _ = returned.return_value  # raises the job's error

    def _print_time_left(self, first: int, seconds_a_job: float) -> None:
        """Print how long the jobs from the first one on will take that have not finished."""
        if left := sum(number not in self.finished for number in range(first, len(self.jobs))):
            time_left = duration(seconds_a_job * left)
            print(f"{left} job{'s' * (left > 1)} left, about {time_left}", file=sys.stderr, flush=True)


def jobs_of(overrides: Sequence[Override]) -> list[list[str]]:
    """The words of each job of a sweep; ConfigError for a word without values, or with endlessly many."""
    for override in overrides:
        if override.is_interval_sweep():
            raise ConfigError(f"{override.input_line}: is for search=optuna; give values, as in 1,2 or range(1,3)")
        if override.is_sweep_override() and not list(override.sweep_iterator()):
            raise ConfigError(f"{override.input_line}: no values; give one or more")
    return BasicSweeper.split_arguments(list(overrides), None)[0]


def _gather(config: DictConfig) -> None:
    """Join the jobs' results into the report of the sweep."""
    from rankbench.report.report import gather_sweep

    folder = Path(config.hydra.sweep.dir)
    try:
        overrides = _sweep_overrides(config)
        varied = [override.get_key_element() for override in overrides if override.is_sweep_override()]
        for line in [*gather_sweep(folder, varied), *_best_trial(folder, config)]:
            print(line)
    except BrokenPipeError:
        quit_silently()
    except Exception as error:
        reason = " ".join(str(error).split()) if isinstance(error, ConfigError | WriteError) else in_one_line(error)
        refuse(
            config.hydra.job.name,
            f"the sweep's report failed ({reason}); every job's results are in {folder}; "
            f"`rankbench report {shlex.quote(f'runs={folder}')}` makes the report again",
        )


def _best_trial(folder: Path, config: DictConfig) -> list[str]:
    """Lines about the best trial of a search; none for a sweep."""
    from rankbench.runs.tables import short

    results = folder / "optimization_results.yaml"  # Optuna's sweeper writes it
    if not _is_search(config) or not results.is_file():
        return []
    best = read_yaml(results)
    words = " ".join(f"{key}={short(value)}" for key, value in best["best_params"].items())
    return [f"best trial: {words}, {config.objective} {best['best_value']:.4g}", f"-> {results}"]


def _check_search(config: DictConfig) -> None:
    """Check the keys that are the same in all trials of a search, whose jobs are not known beforehand."""
    command, words = config.hydra.job.config_name, typed_words(config.hydra)
    same = [str(override.input_line) for override in parsed(words) if not override.is_sweep_override()]
    with explaining(command, words):
        cfg = resolve(composed(command, *same), same)
    check_job(cfg, same)
    if not isinstance(cfg, TrainConfig):
        raise ConfigError(f"hydra/sweeper: {command} returns no number to search by; only train does")
    if cfg.objective is None:
        raise ConfigError(f"objective=null: a search needs one; allowed are {', '.join(OBJECTIVES)}")
    if len(same) == len(words) and not config.hydra.sweeper.params:
        raise ConfigError("search=optuna: nothing to vary; add a range, as optimizer.lr='tag(log,interval(1e-5,1e-2))'")


def _resolved(word: str, composed: DictConfig) -> str:
    """The word with the job's own value where it refers to another key: Hydra writes `${model.skip}` as `$\\{...}`."""
    key, _, text = word.partition("=")
    return f"{key}={OmegaConf.select(composed, key.lstrip('+'))}" if re.search(r"\$\\?\{", text) else word


def _sweep_overrides(config: DictConfig) -> list[Override]:
    """The overrides of a preset's sweep and of the command line; the command line wins where both set a key."""
    if "budget" in config:  # a preset's sweep may use it
        KEYS["budget"].check("budget", config.budget)
    preset = [f"{key}={text}" for key, text in (config.hydra.sweeper.params or {}).items()]
    overrides = parsed([*preset, *typed_words(config.hydra)])
    return list({override.get_key_element(): override for override in overrides}.values())
