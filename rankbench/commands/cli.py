"""The commands. This module knows Hydra, and nothing else does; torch is loaded only when a command's work begins."""

import functools
import io
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig


COMMANDS = {
    "train": "train one run, all its seeds; with an experiment that names analyses, analyse it too",
    "analyze": "measure a run (run=<folder>|latest) or a fresh model: analysis=[residual,paths]",
    "report": "gather runs into one page: runs=<folder>|latest; experiment=all for the scoreboard of presets",
    "bench": "speed, side by side with the alternatives",
    "data": "fetch a corpus: corpus=ptb",
}
USAGE = f"""rankbench: what do heads, depth, skips, MLPs and norms do to the rank and the smoothness of a transformer?

Usage: rankbench COMMAND [key=value ...] [-m] [--cfg job]

{chr(10).join(f"  {name:<8} {what}" for name, what in COMMANDS.items())}

  rankbench COMMAND --help   its keys, groups and defaults
  rankbench --version
  rankbench completion bash  Tab completion: eval "$(rankbench completion bash)"

Examples:
  rankbench train experiment=demo
  rankbench train model=san_skip model.layers=12 replicas=5
  rankbench train -m model.heads=1,2,4 replicas=3
  rankbench analyze run=latest analysis=[paths] analysis.paths.readout=raw
  rankbench analyze model=mine.py:build inputs=tokens.npy analysis=[spectrum,residual]
  rankbench report runs=latest
  rankbench report experiment=all
"""


def main() -> None:
    """The `rankbench` command."""
    try:
        _dispatch(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has gone: `rankbench train --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except OSError as error:  # the output is a file on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _refuse("", one_line_of(error))


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
    elif "--version" in words:  # Hydra's own, behind a command, would tell Hydra's
        from rankbench import __version__

        print(f"rankbench {__version__}")
    elif words[0] == "completion":
        from rankbench.commands import completion
        from rankbench.commands.callback import refusing

        with refusing("completion"):
            print(completion.script(words[1:]))
    elif words[0] == "__complete":
        from rankbench.commands import completion

        print("\n".join(completion.candidates(words[1:])))
    elif words[0] == "data" and (sweep := {"-m", "--multirun"} & set(words)):
        _refuse("data", f"{sweep.pop()}: a corpus is fetched on its own; leave it out")
    elif words[0] in COMMANDS:
        _run(words[0], words[1:])
    else:
        from rankbench.keys import closest

        _refuse(
            "", f"{words[0]}: unknown command{closest(words[0], list(COMMANDS))}; commands are {', '.join(COMMANDS)}"
        )


def _run(command: str, words: list[str]) -> None:
    """Hand over to Hydra, and turn what goes wrong by the user's doing into one line."""
    import hydra
    from hydra._internal.utils import get_args_parser
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from rankbench.commands.compose import as_keys, register
    from rankbench.commands.messages import explain
    from rankbench.config import conf_dir
    from rankbench.keys import ConfigError

    register()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra hand us its exceptions instead of printing them
    try:
        words = as_keys(command, words)
    except ConfigError as error:
        _refuse(command, str(error))
    parser = get_args_parser()
    parser.error = lambda message: _refuse(command, f"{message}; options are -m, --cfg job, --info defaults, --help")
    parsed, unknown = parser.parse_known_args(words)
    if wrong := [word for word in unknown if word.startswith("-") or not parsed.help]:
        parser.error(f"{wrong[0]}: unknown option")
    if parsed.overrides:  # beside the others: argparse takes positional words in one piece only
        place = words.index(parsed.overrides[0])
        words = [*words[:place], *_named_after_what_varies(parsed.overrides), *words[place:]]
    sys.argv = [f"rankbench {command}", *words]
    task = hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(JOBS[command])
    try:
        if parsed.help:
            from rankbench.commands.usage import usage

            return print(usage(command, [*parsed.overrides, *unknown]))
        with _gathering_after_a_failure():
            task()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        if wants_traceback:
            raise
        _refuse(command, _missing_extra(error, words) or explain(error, command, words))
    except ValueError as error:
        if "Config group override" not in str(error):  # Hydra's, for model=null; any other is a fault of ours
            raise
        _refuse(command, explain(error, command, words))
    except BrokenPipeError:
        raise
    except OSError as error:  # a disk that is full or not to be written
        _refuse(command, one_line_of(error))
    except KeyboardInterrupt:
        sweep = _open_sweep()
        _refuse(command, f"interrupted; the same command with out={sweep} continues" if sweep else "interrupted", 130)


def _named_after_what_varies(words: list[str]) -> list[str]:
    """Have Hydra leave out of the names of a sweep's folders the keys that are the same in all of its jobs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except OverrideParseException:  # Hydra says what is wrong with it
        return []
    varied = {one.key_or_group for one in overrides if one.is_sweep_override()}
    fixed = [one.key_or_group for one in overrides if not one.is_sweep_override() and not one.is_delete()]
    same = [key for key in fixed if key not in varied]
    return [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(same)}]"] if same else []


def _missing_extra(error: Exception, words: list[str]) -> str | None:
    """The line about a launcher or a sweeper that is not installed, None for any other error."""
    found = re.search(r"Could not find 'hydra/(?:launcher|sweeper)/(joblib|submitit|ray|optuna)", str(error))
    if found is None:
        return None
    asked = [word for word in words if found[1] in word or word == "cluster=slurm"]
    return f"{asked[-1] if asked else found[1]}: needs the extra: pip install 'rankbench[{found[1]}]'"


def _open_sweep() -> "Path | None":
    """The folder of the sweep that has begun and not been gathered."""
    gate = sys.modules.get("rankbench.commands.callback")
    return None if gate is None or gate.Gate.open_sweep is None else gate.Gate.open_sweep.hydra.sweep.dir


@contextmanager
def _gathering_after_a_failure() -> Iterator[None]:
    """Gather the tables of a sweep of which a job failed, then let the job's error go on."""
    try:
        yield
    except Exception:
        if _open_sweep() is not None:
            with suppress(SystemExit):  # a failed report has printed its line, and the command fails anyway
                sys.modules["rankbench.commands.callback"].Gate().on_multirun_end()
        raise


def _refuse(command: str, message: str, code: int = 1) -> None:
    print(f"rankbench {command}: {message}" if command else f"rankbench: {message}", file=sys.stderr)
    raise SystemExit(code)


def one_line_of(error: Exception) -> str:
    """A refusal, or an error of the disk with the file that was written: Hydra's own files do not name themselves."""
    if not isinstance(error, OSError) or error.errno is None or error.filename is not None:
        return str(error)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    written = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, io.TextIOWrapper)]
    name = os.path.relpath(written[-1].name) if written else "standard output"
    return f"{name}: could not be written ({error.strerror})"


def one_line(job: Callable[["DictConfig"], Any]) -> Callable[["DictConfig"], Any]:
    """A job whose ConfigErrors and errors of the disk end a single run in one line; in a sweep they are Hydra's, so
    that other jobs go on."""

    @functools.wraps(job)
    def told(config: "DictConfig") -> Any:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from rankbench.keys import ConfigError

        try:
            return job(config)
        except (ConfigError, OSError) as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN or isinstance(error, BrokenPipeError):
                raise
            _refuse(HydraConfig.get().job.name, one_line_of(error))

    return told


@contextmanager
def _saying_how_to_continue(folder: str) -> Iterator[None]:
    """Add to the line of a signal or of a full disk how training goes on."""
    from rankbench.runs.files import WriteError
    from rankbench.training.loop import Interrupted

    continues = f"the same command with out={folder} continues"
    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        _refuse("train", f"{str(stop) or 'interrupted'}; {continues}", code=130)
    except WriteError as error:
        raise WriteError(f"{error}; {continues}") from None


@one_line
def train_job(config: "DictConfig") -> float:
    """`rankbench train`: returns the objective for a sweeper: by default the final test accuracy (regression: loss)."""
    from pathlib import Path

    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from rankbench.analyses.runner import analyze_trained
    from rankbench.progress import logging_to
    from rankbench.runs.run import Run, objective_value
    from rankbench.training.loop import train

    cfg = _prepared(config)
    run = Run(Path(cfg.out))
    hydra = HydraConfig.get()
    with (
        logging_to(run.folder / "train.log"),
        _saying_how_to_continue(hydra.sweep.dir if hydra.mode == RunMode.MULTIRUN else cfg.out),
    ):
        summary = train(cfg, run)
        trained = [one for one in summary["seeds"] if one["status"] != "diverged"]
        score = "test_loss" if any(one.get("test_accuracy") is None for one in trained) else "test_accuracy"
        scores = [one[score] for one in trained]
        mean = sum(scores) / len(scores) if scores else float("nan")
        told = " ".join(f"{value:.3f}" for value in scores)
        print(f"{score.replace('_', ' ')} {mean:.3f} (mean of {len(trained)} seeds: {told})\n-> {run.folder}")
        if cfg.analysis and (trained or cfg.objective is None):  # a search goes on where every seed diverged
            print("\n".join(analyze_trained(cfg, run)))
    return mean if cfg.objective is None else objective_value(summary, cfg.objective)


@one_line
def analyze_job(config: "DictConfig") -> None:
    """`rankbench analyze`."""
    from pathlib import Path

    from rankbench.analyses.runner import analyze_into
    from rankbench.progress import logging_to

    cfg = _prepared(config)
    with logging_to(Path(cfg.out) / "analyze.log"):
        print("\n".join(analyze_into(cfg)))


@one_line
def report_job(config: "DictConfig") -> None:
    """`rankbench report`."""
    from pathlib import Path

    from rankbench.report.report import find_runs, gather
    from rankbench.report.scoreboard import scoreboard

    cfg = _prepared(config)
    if cfg.scoreboard is not None:
        print("\n".join(scoreboard(cfg.scoreboard, Path(cfg.out))))
    else:
        print("\n".join(gather(find_runs(cfg.runs), Path(cfg.out), chosen=cfg.report, statistic=cfg.statistic)))


@one_line
def bench_job(config: "DictConfig") -> None:
    """`rankbench bench`."""
    from pathlib import Path

    from rankbench.bench import bench
    from rankbench.runs.files import write_json, write_text
    from rankbench.runs.machine import Machine
    from rankbench.runs.run import config_text

    cfg = _prepared(config)
    machine, folder = Machine.prepare(cfg), Path(cfg.out)
    write_text(folder / "config.yaml", config_text(cfg))
    write_json(folder / "environment.json", machine.record())
    bench(cfg, machine, folder)


@one_line
def data_job(config: "DictConfig") -> None:
    """`rankbench data`."""
    from pathlib import Path

    from rankbench.commands.compose import resolve
    from rankbench.tasks.corpora import CORPORA, fetch, folder_of

    cfg = resolve(config)
    folder = folder_of(cfg.corpus) if cfg.folder is None else Path(cfg.folder)
    fetch(cfg.corpus, folder)
    print(f"{CORPORA[cfg.corpus].note}\n-> {folder}; now task=char_lm task.path={cfg.folder or cfg.corpus}")


def _prepared(config: "DictConfig") -> Any:
    """The job's config, checked, with `out` the folder that Hydra gave it: in a sweep each job has its own."""
    from hydra.core.hydra_config import HydraConfig

    from rankbench.commands.callback import check_everything
    from rankbench.commands.compose import resolve

    cfg = resolve(config)
    if HydraConfig.get().runtime.choices.get("hydra/launcher") in ("joblib", "submitit_local"):
        from rankbench.runs.machine import share_gpus

        share_gpus(HydraConfig.get().job.num)  # ray and Slurm hand out GPUs themselves
    check_everything(cfg)
    cfg.out = os.path.relpath(HydraConfig.get().runtime.output_dir)
    return cfg


JOBS: dict[str, Callable[["DictConfig"], Any]] = {
    "train": train_job,
    "analyze": analyze_job,
    "report": report_job,
    "bench": bench_job,
    "data": data_job,
}
