"""Hydra's callback: what happens before a command's folder is made, and after a sweep's last job."""

import os
import re
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rankbench.commands.checks import check_corpus, check_records
from rankbench.commands.compose import load_plugins, register, resolve
from rankbench.commands.failures import quit_silently, refuse, refusing
from rankbench.commands.finished_jobs import finished_job, recipe, surroundings
from rankbench.commands.messages import explaining
from rankbench.commands.resolvers import job_folder
from rankbench.commands.sweeper import SkippingSweeper
from rankbench.commands.workers import end_with
from rankbench.config import OBJECTIVES, SCHEMAS, Config, TrainConfig
from rankbench.keys import ConfigError
from rankbench.runs.files import WriteError
from rankbench.runs.records import read_yaml
from rankbench.runs.sweep import Job, Sweep


class Gate(Callback):
    """Hydra's callback: refuses a wrong config before its folder is made, and gathers what a sweep's jobs wrote.

    Hydra turns an exception raised here into a warning and continues, so every failure prints its line and exits at
    once.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Check the config of a single run."""
        with _ending(config.hydra.job.name):
            check_job(_job_config(config), _typed_words(config))

    def __reduce__(self) -> tuple:
        """Make unpickling in a launcher's process register our resolvers there."""
        sweep = Gate.open_sweep
        # jobs of the other launchers are meant to outlive the command, or are ended by their cluster
        by_joblib = sweep is not None and sweep.hydra.launcher._target_.endswith("JoblibLauncher")
        return _in_a_worker, (os.getpid() if by_joblib else None,)

    open_sweep: Any = None  # its config, between a sweep's start and its gathering

    def on_multirun_start(self, config: DictConfig, **others: Any) -> None:
        """Check the config of every job of a sweep, if the sweeper knows them beforehand, and list them in its
        folder."""
        config_name = others["config_name"]
        with _ending(config.hydra.job.name):
            if config.hydra.launcher._target_.endswith("SlurmLauncher") and shutil.which("srun") is None:
                raise ConfigError(
                    "cluster=slurm: no srun here; start it on a machine of the cluster, or try cluster=submitit_local"
                )
            if config.hydra.sweeper._target_.endswith("BasicSweeper"):
                sweep = Sweep(Path(config.hydra.sweep.dir))
                SkippingSweeper.jobs = BasicSweeper.split_arguments(_sweep_overrides(config), None)[0]
                SkippingSweeper.finished = {}
                jobs = list(_checked_jobs(config, config_name, sweep))
                sweep.check_same(jobs)
                sweep.list_jobs(jobs)
            else:
                _check_search(config, config_name)
        Gate.open_sweep = config

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Drop a job's configs: Hydra keeps what each job returned until the sweep's end, a sixth of a MiB each."""
        job_return.cfg = job_return.hydra_cfg = None

    def on_multirun_end(self, config: DictConfig | None = None, **_: Any) -> None:
        """Join the jobs' results. Hydra does not call this if a job failed; the command line then does."""
        from rankbench.report.report import gather_sweep

        config, Gate.open_sweep = Gate.open_sweep, None
        folder = Path(config.hydra.sweep.dir)
        before = _written_at(folder)
        try:
            overrides = _sweep_overrides(config)
            varied = [override.get_key_element() for override in overrides if override.is_sweep_override()]
            for line in [*gather_sweep(folder, varied), *_best_trial(folder, config)]:
                print(line)
        except BrokenPipeError:
            quit_silently()
        except Exception as error:
            reason = " ".join(str(error).split())
            reason = reason if isinstance(error, ConfigError | WriteError) else f"{type(error).__name__}: {reason}"
            written = [name for name, time in sorted(_written_at(folder).items()) if before.get(name) != time]
            refuse(
                config.hydra.job.name,
                f"the sweep's report failed ({reason}); every job's results are in {folder}, and of the report "
                f"{', '.join(written) or 'nothing'}; `rankbench report runs={folder}` makes the report again",
            )


def _best_trial(folder: Path, config: DictConfig) -> list[str]:
    """Lines about the best trial of a search; none for a sweep."""
    from rankbench.runs.tables import short

    results = folder / "optimization_results.yaml"  # Optuna's sweeper writes it
    if config.hydra.sweeper._target_.endswith("BasicSweeper") or not results.is_file():
        return []
    best = read_yaml(results)
    words = " ".join(f"{key}={short(value)}" for key, value in best["best_params"].items())
    return [f"best trial: {words}, {config.objective} {best['best_value']:.4g}", f"-> {results}"]


def _written_at(folder: Path) -> dict[str, int]:
    """The files directly in a folder, with the times when they were last written."""
    if not folder.is_dir():
        return {}
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.is_file() and path.name[0] != "."}


def _in_a_worker(ends_with: int | None) -> Gate:
    register()
    if ends_with is not None:
        end_with(ends_with)
    return Gate()


def _check_search(config: DictConfig, config_name: str) -> None:
    """Check the keys that are the same in all trials of a search, whose jobs are not known beforehand."""
    words = _typed_words(config)
    same = [word for word in words if not OverridesParser.create().parse_override(word).is_sweep_override()]
    with explaining(config_name, words):
        cfg = resolve(hydra.compose(config_name, same), same)
    check_job(cfg, same)
    if not isinstance(cfg, TrainConfig):
        raise ConfigError(f"hydra/sweeper: {config_name} returns no number to search by; only train does")
    if cfg.objective is None:
        raise ConfigError(f"objective=null: a search needs one; allowed are {', '.join(OBJECTIVES)}")
    if len(same) == len(words) and not config.hydra.sweeper.params:
        raise ConfigError("search=optuna: nothing to vary; add a range, as optimizer.lr='tag(log,interval(1e-5,1e-2))'")


def _checked_jobs(config: DictConfig, config_name: str, sweep: Sweep) -> Iterator[Job]:
    """The jobs of a sweep, checked. Those that have finished were checked when they ran, and go to the sweeper."""
    from rankbench.runs.run import Run

    listed = sweep.jobs() if config_name == "train" else []
    if listed:
        load_plugins()  # their code belongs to the surroundings
        around = surroundings(config.hydra)
    for number, words in enumerate(SkippingSweeper.jobs):
        if number < len(listed):
            folder = sweep.folder / listed[number].folder
            if (finished := finished_job(folder, recipe(number, words, around))) is not None:
                SkippingSweeper.finished[number] = finished
                yield listed[number]
                continue
        with explaining(config_name, words):
            composed = hydra.compose(config_name, [*config.hydra.overrides.hydra, *words], return_hydra_config=True)
        cfg = _job_config(composed)
        check_job(cfg, words)
        own_words = tuple(_resolved(word, composed) for word in words)
        job = Job(job_folder(number, composed.hydra.job.override_dirname, _root_=composed), own_words)
        if type(cfg) is TrainConfig:
            Run(sweep.folder / job.folder).check_same(cfg)
            check_records(sweep.folder / job.folder)
        yield job


def _resolved(word: str, composed: DictConfig) -> str:
    """The word with the job's own value where it refers to another key: Hydra writes `${model.skip}` as `$\\{...}`."""
    key, _, text = word.partition("=")
    return f"{key}={OmegaConf.select(composed, key.lstrip('+'))}" if re.search(r"\$\\?\{", text) else word


@contextmanager
def _ending(command: str) -> Iterator[None]:
    """End the process if what is inside fails: with one line, or with the traceback of a bug of ours."""
    try:
        with refusing(command), explaining(command, []):
            yield
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _typed_words(config: DictConfig) -> list[str]:
    """The overrides as they were typed. Reading them from the config one by one would resolve `${...}` in them, to
    values that belong to none of the sweep's jobs."""
    words: Any = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    return words


def _sweep_overrides(config: DictConfig) -> list[Override]:
    """The overrides of a preset's sweep and of the command line; the command line wins where both set a key."""
    preset = [f"{key}={text}" for key, text in (config.hydra.sweeper.params or {}).items()]
    overrides = OverridesParser.create().parse_overrides([*preset, *_typed_words(config)])
    return list({override.get_key_element(): override for override in overrides}.values())


def _job_config(config: DictConfig) -> Config:
    own = config.copy()
    with read_write(own), open_dict(own):
        del own["hydra"]
    return resolve(own, _typed_words(config))


def check_job(cfg: Config, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for a job that its command refuses, or whose text is missing or does not fit."""
    check_everything(cfg, words)
    check_corpus(cfg)


def check_everything(cfg: Config, words: Sequence[str] = ()) -> None:
    """Raise ConfigError for a config or for words that its command refuses. A text may be missing."""
    command = next(name for name, schema in SCHEMAS.items() if type(cfg) is schema)
    import_module(f"rankbench.commands.{command}").check(cfg, words)
