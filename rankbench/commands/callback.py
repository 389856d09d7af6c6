"""Hydra's callback: what happens before a command's folder is made, and after a sweep's last job."""

import os
import re
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from rankbench import plugins
from rankbench.commands.cli import refuse
from rankbench.commands.compose import load_plugins, register, resolve
from rankbench.commands.finished_jobs import finished_job, recipe, surroundings
from rankbench.commands.messages import explaining
from rankbench.commands.resolvers import job_folder
from rankbench.commands.sweeper import SkippingSweeper
from rankbench.commands.workers import end_with
from rankbench.config import (
    OBJECTIVES,
    AnalyzeConfig,
    BaseConfig,
    BenchConfig,
    Config,
    DataConfig,
    DrawingConfig,
    PlotConfig,
    ReportConfig,
    TrainConfig,
)
from rankbench.keys import ConfigError, as_typed, check_known, refuse_null_byte
from rankbench.runs.files import WriteError, regular
from rankbench.runs.records import read_yaml
from rankbench.runs.sweep import Job, Sweep


class Gate(Callback):
    """Hydra's callback: refuses a wrong config before its folder is made, and gathers what a sweep's jobs wrote.

    Hydra turns an exception raised here into a warning and continues, so every failure prints its line and exits at
    once.
    """

    def on_run_start(self, config: DictConfig, **_: Any) -> None:
        """Check the config of a single run."""
        with refusing(config.hydra.job.name):
            _check_job(_job_config(config), _typed_words(config))

    def __reduce__(self) -> tuple:
        """Make unpickling in a launcher's process register our resolvers there."""
        sweep = Gate.open_sweep
        # jobs of the other launchers are meant to outlive the command, or are ended by their cluster
        by_joblib = sweep is not None and sweep.hydra.launcher._target_.endswith("JoblibLauncher")
        return _in_a_worker, (os.getpid() if by_joblib else None,)

    open_sweep: DictConfig | None = None  # between a sweep's start and its gathering

    def on_multirun_start(self, config: DictConfig, config_name: str, **_: Any) -> None:
        """Check the config of every job of a sweep, if the sweeper knows them beforehand, and list them in its
        folder."""
        with refusing(config.hydra.job.name):
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

    def on_job_end(self, job_return: JobReturn, **_: Any) -> None:
        """Drop a job's configs: Hydra keeps what each job returned until the sweep's end, a sixth of a MiB each."""
        job_return.cfg = job_return.hydra_cfg = None

    def on_multirun_end(self, **_: Any) -> None:
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
    _check_job(cfg, same)
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
        _check_job(cfg, words)
        own_words = tuple(_resolved(word, composed) for word in words)
        job = Job(job_folder(number, composed.hydra.job.override_dirname, _root_=composed), own_words)
        if type(cfg) is TrainConfig:
            Run(sweep.folder / job.folder).check_same(cfg)
            _check_records(sweep.folder / job.folder)
        yield job


def _resolved(word: str, composed: DictConfig) -> str:
    """The word with the job's own value where it refers to another key: Hydra writes `${model.skip}` as `$\\{...}`."""
    key, _, text = word.partition("=")
    return f"{key}={OmegaConf.select(composed, key.lstrip('+'))}" if re.search(r"\$\\?\{", text) else word


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Turn a ConfigError, an error of composition or a disk error into one line and exit code 1; a bug of ours shows
    its traceback."""
    try:
        with explaining(command, []):
            yield
    except BrokenPipeError:  # the reader of our output has exited
        raise
    except (ConfigError, OSError) as error:
        refuse(command, str(error))
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def _typed_words(config: DictConfig) -> list[str]:
    """The overrides as they were typed. Reading them from the config one by one would resolve `${...}` in them, to
    values that belong to none of the sweep's jobs."""
    return OmegaConf.to_container(config.hydra.overrides.task, resolve=False)


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


def check_everything(cfg: Config, writes: bool = True) -> None:
    """Raise ConfigError for an invalid config, before any folder is made or any result is written.

    writes: whether the caller is going to write to the folder `cfg.out`.
    """
    if isinstance(cfg, DataConfig):
        return
    if isinstance(cfg, DrawingConfig):
        from rankbench.plots import check_style

        check_style(cfg.plot.style)
    if isinstance(cfg, ReportConfig):
        _check_report(cfg)
        return
    if isinstance(cfg, PlotConfig):
        from rankbench.claims import figures_published
        from rankbench.report.figures import drawable

        _check_folder(Path(cfg.out))
        check_known("published", [] if cfg.published is None else [cfg.published], figures_published())
        if not cfg.table:
            raise ConfigError('table="": which one? give a CSV file, as in `rankbench plot residual.csv`')
        drawable(Path(cfg.table), cfg.report)
        return
    from rankbench.analyses.runner import check_analyses
    from rankbench.runs.machine import Machine
    from rankbench.runs.run import Run, find_run
    from rankbench.tasks import build_task
    from rankbench.training.memory import check_memory
    from rankbench.training.seeds_side_by_side import check_scores
    from rankbench.training.writers import check_writers

    if writes:
        _check_folder(Path(cfg.out))
    machine = Machine.prepare(cfg)
    check_analyses(cfg, _measured(cfg))
    if not isinstance(cfg, AnalyzeConfig) or not (cfg.run or cfg.module or cfg.checkpoint):
        check_memory(cfg, build_task(cfg.task), machine)
    if type(cfg) is TrainConfig:
        check_scores(cfg, build_task(cfg.task))
        Run(Path(cfg.out)).check_begun(cfg, {"device": str(machine.device)})
        check_writers(cfg.trainer.writers)
    if isinstance(cfg, AnalyzeConfig):
        if not cfg.analysis:
            raise ConfigError("analysis=[]: nothing to measure; name at least one, as in analysis=[paths]")
        if (Path(cfg.out) / "metrics.csv").exists():  # its config.yaml would be overwritten
            raise ConfigError(f"out={cfg.out}: the folder of a training run; give analyze a folder of its own")
        if cfg.run is not None:
            run = find_run(cfg.run)
            if not (weights := run.folder / "checkpoint.safetensors").exists():
                raise ConfigError(f"{weights}: missing; the run there has not reached its first checkpoint")
            first, last = run.config.seed, run.config.seed + run.config.replicas - 1
            if any(not first <= seed <= last for seed in cfg.seeds or ()):
                raise ConfigError(f"seeds={cfg.seeds}: the seeds of {run.folder} are {first} to {last}")
        elif cfg.seeds is not None:
            raise ConfigError(
                f"seeds={cfg.seeds}: chooses among the seeds of a run; give run= (fresh weights: seed= and replicas=)"
            )
    if isinstance(cfg, BenchConfig):
        from rankbench.bench import check_benchmarks

        check_benchmarks(cfg)


def _measured(cfg: BaseConfig) -> BaseConfig:
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
    """Refuse a text that is missing or does not fit. A check of its own, as a preset is valid without its corpus."""
    from rankbench.analyses.modules import is_foreign

    if isinstance(cfg, BaseConfig) and not is_foreign(cfg):
        from rankbench.model import build_model
        from rankbench.tasks import Corpus, build_task

        measured = _measured(cfg)
        if isinstance(task := build_task(measured.task), Corpus):
            task.splits()
            build_model(measured.model, task)


def _check_report(cfg: ReportConfig) -> None:
    from rankbench.report.jobs import find_runs
    from rankbench.report.report import check_study
    from rankbench.report.results import check_pages
    from rankbench.report.scoreboard import EVERY, check_experiment

    _check_folder(Path(cfg.out))
    if (Path(cfg.out) / "config.yaml").exists():  # its tables would be overwritten
        raise ConfigError(f"out={cfg.out}: the folder of a run; give report a folder of its own")
    if cfg.pages is not None:
        if cfg.scoreboard != EVERY:
            raise ConfigError(f"pages={cfg.pages}: the pages cover all presets; add experiment=all")
        _check_folder(Path(cfg.pages), "pages")
        check_pages(Path(cfg.pages))
    if cfg.scoreboard is not None:
        check_experiment(cfg.scoreboard)
        chosen = {f"report.{name}": value for name, value in vars(cfg.report).items() if name != "open"}
        chosen |= {f"plot.{name}": value for name, value in vars(cfg.plot).items()}
        for name in (name for name, value in chosen.items() if value):
            raise ConfigError(
                f"{name}={as_typed(chosen[name])}: with experiment={cfg.scoreboard} the figures are those that the "
                "runs have drawn; leave it out, or give runs=<folder> in place of experiment="
            )
        return
    check_study(cfg.report, find_runs(cfg.runs))


def _check_folder(out: Path, key: str = "out") -> None:
    """Refuse an output folder that cannot be made or written."""
    refuse_null_byte(key, str(out))
    existing = out.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{key}={out}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={out}: {existing} cannot be written; give another folder")
    _check_records(out)


def _check_records(folder: Path) -> None:
    """Refuse a folder with a pipe or a folder where Hydra writes its records: the write would hang or fail."""
    for path in (folder / "multirun.yaml", *folder.glob(".hydra/*")):
        regular(path)


def _check_job(cfg: Config, words: list[str]) -> None:
    """Refuse a wrong config, and words that would change nothing: a run brings its own model, task and seeds."""
    _check_verb(cfg, words)
    check_everything(cfg)
    check_corpus(cfg)
    if isinstance(cfg, AnalyzeConfig):
        for word in words:
            key = word.lstrip("+~").partition("=")[0]
            if cfg.run is not None and key.split(".")[0] in ("model", "task", "seed", "replicas"):
                raise ConfigError(f"{word}: the run in run={cfg.run} has its own {key}; leave one of the two out")
            foreign = cfg.module or cfg.checkpoint
            if foreign is not None and key.split(".")[0] in ("model", "task"):
                raise ConfigError(
                    f"{word}: {foreign} is not a network of rankbench and has no {key}; leave one of the two out"
                )


def _check_verb(cfg: Config, words: list[str]) -> None:
    """Refuse a preset under the wrong command: it would train a network that nobody measures, or measure an untrained
    one. Any preset may say how a run, a module or a checkpoint is measured."""
    name = next((word.partition("=")[2] for word in words if word.startswith("experiment=")), None)
    if name is None or not isinstance(cfg, TrainConfig | AnalyzeConfig) or isinstance(cfg, BenchConfig):
        return
    from rankbench.presets import described

    preset = described().get(name)
    wanted = preset and preset.verb
    if wanted == "analyze" and isinstance(cfg, TrainConfig):
        raise ConfigError(f"experiment={name}: trains nothing; use `rankbench analyze experiment={name}`")
    if wanted == "train" and isinstance(cfg, AnalyzeConfig) and not (cfg.run or cfg.module or cfg.checkpoint):
        raise ConfigError(
            f"experiment={name}: trains what it measures; use `rankbench train experiment={name}`, or give run="
        )
