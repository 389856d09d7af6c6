"""The commands. torch is loaded only when the work of a command begins."""

import functools
import gc
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from omegaconf import DictConfig

COMMANDS = {
    "train": "train one run, all its seeds; with an experiment that names analyses, analyse it too",
    "analyze": "measure a run (run=<folder>|latest) or a fresh model: analysis=[residual,paths]",
    "report": "gather runs into one page: runs=<folder>|latest; experiment=all for the scoreboard of presets",
    "plot": "draw a table again: paths.csv plot.column=single; one of its columns: report.value=accuracy",
    "bench": "speed, side by side with the alternatives",
    "data": "fetch a corpus: corpus=ptb",
}
USAGE = f"""rankbench: what do heads, depth, skips, MLPs and norms do to the rank and the smoothness of a transformer?

Usage: rankbench COMMAND [key=value ...] [-m] [--cfg job]

{chr(10).join(f"  {name:<8} {what}" for name, what in COMMANDS.items())}

  rankbench COMMAND --help   its keys, groups and defaults
  rankbench explain KEY      what a key means, its values, and which presets set it: explain model.norm
  rankbench list             the presets, with what each costs and the run that stands for it here
  rankbench --version
  rankbench completion bash|zsh|fish   Tab completion: eval "$(rankbench completion bash)"

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
    gc.disable()  # until the work begins: imports leave no garbage, and collecting takes a fifth of the start-up
    try:
        _dispatch(sys.argv[1:])
        sys.stdout.flush()
    except OSError as error:  # the output is a file on a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):  # the reader of our output has exited: `rankbench train --help | head`
            raise SystemExit(141) from None
        refuse("", one_line_of(error))
    finally:
        gc.enable()


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
    elif "--version" in words:  # after a command, Hydra would print its own version
        from rankbench import __version__

        print(f"rankbench {__version__}")
    elif words[0] in ("list", "explain", "completion"):
        from rankbench.commands.callback import refusing
        from rankbench.commands.completion import script
        from rankbench.commands.usage import explained, list_of_presets

        texts = {"list": list_of_presets, "explain": explained, "completion": script}
        with refusing("completion" if words[0] == "completion" else ""):
            print(texts[words[0]](words[1:]))
    elif words[0] == "__complete":
        from rankbench.commands.completion import candidates

        print("\n".join(candidates(words[1:])))
    elif words[0] == "data" and (sweep := {"-m", "--multirun"} & set(words)):
        refuse("data", f"{sweep.pop()}: a corpus is fetched on its own; leave it out")
    elif words[0] in COMMANDS:
        _run(words[0], words[1:])
    else:
        from rankbench.keys import closest

        near = closest(words[0], list(COMMANDS))
        refuse("", f"{words[0]}: unknown command{near}; commands are {', '.join(COMMANDS)}")


def _run(command: str, words: list[str]) -> None:
    """Hand over to Hydra, and turn a user's mistake into one line."""
    import hydra
    from hydra._internal.utils import get_args_parser

    from rankbench.commands.compose import as_keys, register
    from rankbench.commands.messages import explaining, not_an_option
    from rankbench.config import conf_dir
    from rankbench.keys import ConfigError

    register()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # let Hydra hand us its exceptions instead of printing them
    parser = get_args_parser()
    parser.error = lambda message: refuse(command, f"{message}; options are -m, --cfg job, --info defaults, --help")
    try:
        # argparse accepts positional words only in one consecutive block
        words = sorted(as_keys(command, words), key=lambda word: word not in ("-m", "--multirun"))
        parsed, unknown = parser.parse_known_args(words)
        if wrong := [word for word in unknown if word.startswith("-") or not parsed.help]:
            refuse(command, not_an_option(wrong[0], command))
        for option in ("config_name", "config_path", "experimental_rerun"):  # Hydra's, for programs with one command
            if getattr(parsed, option) is not None:
                parser.error(f"--{option.replace('_', '-')}: not an option of rankbench")
        if parsed.overrides:  # next to the others, because argparse accepts positional words only in one block
            first = words.index(parsed.overrides[0])
            words = [*words[:first], *_named_after_what_varies(parsed.overrides), *words[first:]]
        sys.argv = [f"rankbench {command}", *words]
        with nullcontext() if wants_traceback else explaining(command, words):
            if parsed.help:
                from rankbench.commands.usage import usage

                return print(usage(command, [*parsed.overrides, *unknown]))
            is_plain = parsed.config_dir is None and not any(map(_may_set_the_mode, parsed.overrides))
            with _gathering_after_a_failure(), _mode_unset() if is_plain else nullcontext():
                hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=command)(JOBS[command])()
    except BrokenPipeError:
        raise
    except (ConfigError, OSError) as error:  # OSError: a disk that is full or that cannot be written
        if wants_traceback:
            raise
        refuse(command, one_line_of(error))
    except KeyboardInterrupt:
        from rankbench.commands.callback import Gate

        sweep = Gate.open_sweep
        again = "" if sweep is None else f"; the same command with out={sweep.hydra.sweep.dir} continues"
        refuse(command, f"interrupted{again}", 130)


def _named_after_what_varies(words: list[str]) -> list[str]:
    """Have Hydra name the folders of a sweep's jobs after the keys that vary between them, and no others."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except (OverrideParseException, ValueError):  # Hydra reports it later; ValueError: a number of too many digits
        return []
    varied = {override.key_or_group for override in overrides if override.is_sweep_override()}
    fixed = {override.key_or_group: None for override in overrides if not override.is_delete()}
    same = [key for key in fixed if key not in varied]
    return [f"hydra.job.config.override_dirname.exclude_keys=[{','.join(same)}]"] if same else []


def _may_set_the_mode(word: str) -> bool:
    """Whether the word can set `hydra.mode`. Presets do, so `rankbench train experiment=...` can be a sweep."""
    return word.lstrip("+~").startswith(("experiment", "hydra", "cluster", "search"))


@contextmanager
def _mode_unset() -> Iterator[None]:
    """Make Hydra take `hydra.mode` as not set: to find that out, it would compose the whole config."""
    from hydra._internal.hydra import Hydra

    look_up = Hydra.get_mode
    Hydra.get_mode = lambda *_, **__: None
    try:
        yield
    finally:
        Hydra.get_mode = look_up


@contextmanager
def _gathering_after_a_failure() -> Iterator[None]:
    """Gather the tables of a sweep even if one of its jobs failed, then raise the job's error."""
    try:
        yield
    except Exception:
        from rankbench.commands.callback import Gate

        if Gate.open_sweep is not None:
            with suppress(SystemExit):  # a failed report has printed its line, and the command fails anyway
                Gate().on_multirun_end()
        raise


def refuse(command: str, message: str, code: int = 1) -> NoReturn:
    """Print the line of a refusal, and exit."""
    from rankbench.keys import shortened

    message = shortened(message)
    print(f"rankbench {command}: {message}" if command else f"rankbench: {message}", file=sys.stderr)
    raise SystemExit(code) from None


def one_line_of(error: Exception) -> str:
    """The text of a refusal, or of a disk error with the file concerned, which Hydra's own writes do not name."""
    if not isinstance(error, OSError) or error.errno is None:
        return str(error)
    if error.filename is not None:
        named = f"{error.filename}: cannot be made, read or written ({error.strerror})"
        for word in sys.argv[1:]:
            if word.startswith("out=") and _holds(str(error.filename), word[4:]):
                return f"{word}: {named}; give another folder"
        return named
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    written = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, io.TextIOWrapper)]
    name = os.path.relpath(written[-1].name) if written else "standard output"
    return f"{name}: could not be written ({error.strerror})"


def _holds(path: str, folder: str) -> bool:
    """Whether the path is the folder or one of its parents."""
    return Path(folder).absolute().is_relative_to(Path(path).absolute())


def one_line(job: Callable[["DictConfig"], Any]) -> Callable[["DictConfig"], Any]:
    """End a single run with one line if its job raises a ConfigError or a disk error. In a sweep Hydra gets the error,
    and the other jobs continue."""

    @functools.wraps(job)
    def job_of_one_line(config: "DictConfig") -> Any:
        from rankbench.keys import ConfigError

        try:
            return job(config)
        except (ConfigError, OSError) as error:
            hydra, in_sweep = _hydra_of_job()
            if in_sweep or isinstance(error, BrokenPipeError):
                raise
            refuse(hydra.job.name, one_line_of(error))

    return job_of_one_line


def _hydra_of_job() -> tuple["DictConfig", bool]:
    """Hydra's part of the running job's config, and whether the job is one of a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    return hydra, hydra.mode == RunMode.MULTIRUN


@contextmanager
def _working(command: str, out: str) -> Iterator[None]:
    """Write the log of a command into its folder, and add to the line about a signal or a full disk how to continue."""
    from rankbench.progress import logging_to
    from rankbench.runs.files import WriteError
    from rankbench.training.loop import Interrupted

    hydra, in_sweep = _hydra_of_job()
    continues = f"the same command with out={hydra.sweep.dir if in_sweep else out} continues"
    with logging_to(Path(out) / f"{command}.log"):
        try:
            yield
        except (Interrupted, KeyboardInterrupt) as stop:
            refuse(command, f"{str(stop) or 'interrupted'}; {continues}", code=130)
        except WriteError as error:
            raise WriteError(f"{error}; {continues}") from None


@one_line
def train_job(config: "DictConfig") -> float:
    """`rankbench train`. Returns the objective for a sweeper: by default the final test accuracy (regression: loss)."""
    from rankbench.analyses.runner import analyze_trained, draw_curves, drawn_line
    from rankbench.commands.finished_jobs import recipe, record, surroundings
    from rankbench.runs.run import Run, objective_value
    from rankbench.tasks import build_task
    from rankbench.training.loop import train

    cfg = _prepared(config)
    run = Run(Path(cfg.out))
    hydra, in_sweep = _hydra_of_job()
    made_from = recipe(hydra.job.num, hydra.overrides.task, surroundings(hydra)) if in_sweep else None
    with _working("train", cfg.out):
        summary = train(cfg, run)
        trained = [row for row in summary["seeds"] if row["status"] != "diverged"]
        score = "test_loss" if any(row.get("test_accuracy") is None for row in trained) else "test_accuracy"
        scores = [row[score] for row in trained]
        mean = sum(scores) / len(scores) if scores else float("nan")
        printed = " ".join(f"{value:.3f}" for value in scores)
        lines = [f"{score.replace('_', ' ')} {mean:.3f} (mean of {len(trained)} seeds: {printed})", f"-> {run.folder}"]
        if not in_sweep:  # the report of a sweep has its curves
            lines.append(drawn_line(draw_curves(run)))
        print("\n".join(lines))
        if cfg.analysis and (trained or cfg.objective is None):  # a search continues if every seed diverged
            lines += (analysed := analyze_trained(cfg, run))
            print("\n".join(analysed))
        if in_sweep:
            texts = getattr(build_task(cfg.task), "files", [])
            record(run.folder, made_from, hydra.job.override_dirname, texts, "\n".join(lines).split("\n"))
    return mean if cfg.objective is None else objective_value(summary, cfg.objective)


@one_line
def analyze_job(config: "DictConfig") -> None:
    """`rankbench analyze`."""
    from rankbench.analyses.runner import analyze_into

    cfg = _prepared(config)
    with _working("analyze", cfg.out):
        print("\n".join(analyze_into(cfg)))


@one_line
def report_job(config: "DictConfig") -> None:
    """`rankbench report`."""
    from rankbench.plots import drawn_with
    from rankbench.report.jobs import find_runs
    from rankbench.report.live import watched
    from rankbench.report.report import gather
    from rankbench.report.scoreboard import scoreboard

    cfg = _prepared(config)
    if cfg.scoreboard is not None:
        pages = None if cfg.pages is None else Path(cfg.pages)
        print("\n".join(scoreboard(cfg.scoreboard, Path(cfg.out), pages)))
        if cfg.report.open:
            _show(Path(cfg.out) / "scoreboard.html")
    else:
        how = {"chosen": cfg.report, "statistic": cfg.statistic, "column": cfg.plot.column}
        jobs, folder = find_runs(cfg.runs), Path(cfg.out)
        if cfg.runs == "latest":
            print(f"runs=latest: {os.path.commonpath(jobs)}")
        with drawn_with(cfg.plot.style):
            written = watched(cfg.runs, folder, **how) if cfg.report.watch else [gather(jobs, folder, **how)]
            for number, lines in enumerate(written):
                print("\n".join(lines), flush=True)
                if cfg.report.open and number == 0:
                    _show(folder / "report.html")


def _show(page: Path) -> None:
    """Open a page in the user's browser."""
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print(f"report.open=true: no browser here; open {page}")


@one_line
def plot_job(config: "DictConfig") -> None:
    """`rankbench plot`."""
    from rankbench.plots import drawn_with
    from rankbench.report.figures import redraw

    cfg = _prepared(config)
    how = cfg.report, cfg.statistic, cfg.published, cfg.plot.column
    with drawn_with(cfg.plot.style):
        print("\n".join(redraw(Path(cfg.table), Path(cfg.out), *how)))


@one_line
def bench_job(config: "DictConfig") -> None:
    """`rankbench bench`."""
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
    from rankbench.commands.compose import resolve
    from rankbench.tasks.corpora import CORPORA, fetch, folder_of

    cfg = resolve(config)
    folder = folder_of(cfg.corpus) if cfg.folder is None else Path(cfg.folder)
    fetch(cfg.corpus, folder)
    print(f"{CORPORA[cfg.corpus].note}\n-> {folder}; now task=char_lm task.path={cfg.folder or cfg.corpus}")


def _prepared(config: "DictConfig") -> Any:
    """The job's config, checked, with `out` set to the folder that Hydra gave it: in a sweep each job has its own."""
    from rankbench.commands.callback import check_everything
    from rankbench.commands.compose import resolve
    from rankbench.commands.finished_jobs import announce
    from rankbench.runs.sweep import Sweep

    hydra, in_sweep = _hydra_of_job()
    cfg = resolve(config, hydra.overrides.task)
    if hydra.runtime.choices.get("hydra/launcher") in ("joblib", "submitit_local"):
        from rankbench.runs.machine import share_gpus

        share_gpus(hydra.job.num)  # ray and Slurm hand out GPUs themselves
    check_everything(cfg)
    if in_sweep:
        announce(hydra.job.num, len(Sweep(Path(hydra.sweep.dir)).jobs()), hydra.job.override_dirname)
    cfg.out = os.path.relpath(hydra.runtime.output_dir)
    if not gc.isenabled():  # the first job of a process: the work begins, and garbage is collected from here on
        gc.freeze()  # what is imported stays, so no collection needs to look through it
        gc.enable()
    return cfg


JOBS: dict[str, Callable[["DictConfig"], Any]] = {
    "train": train_job,
    "analyze": analyze_job,
    "report": report_job,
    "plot": plot_job,
    "bench": bench_job,
    "data": data_job,
}
