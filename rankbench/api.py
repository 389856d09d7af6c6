"""rankbench from Python: train, load, load_sweep, analyze and plot, each of which does the same as its command.

A mistake raises ConfigError with the line that the command would print. The working directory, torch's threads,
Hydra's state and the loggers are restored afterwards.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from torch import nn

from rankbench.analyses import ANALYSES
from rankbench.analysing.modules import building_once, offering
from rankbench.analysing.runner import analyze_into, analyze_trained, draw_curves, measure, options_of
from rankbench.analysing.subjects import check_finite, subjects_of
from rankbench.commands import analyze as analyze_command
from rankbench.commands.checks import check_corpus, check_job, check_single
from rankbench.commands.compose import as_keys, compose, load_plugins
from rankbench.commands.failures import leaving_nothing
from rankbench.config.arguments import typed_arguments
from rankbench.config.keys import ConfigError, check_known, closest
from rankbench.config.plugins import named as named_plugins
from rankbench.config.schema import AnalyzeConfig, FigureKeys, TrainConfig
from rankbench.judging import figures_published
from rankbench.judging import published as published_numbers
from rankbench.plots import Figure, show_in_notebook
from rankbench.plots.pages import one_facet
from rankbench.plots.training import FIGURES
from rankbench.progress import logging_to
from rankbench.report.figures import analysis_of, doubting, final_pages
from rankbench.report.jobs import runs_in
from rankbench.report.joined_tables import Runs, load_runs
from rankbench.runs.machine import Machine
from rankbench.runs.run import OBSERVED, Run, find_run
from rankbench.runs.tables import by_layer, column_help
from rankbench.training.loop import Interrupted
from rankbench.training.loop import train as train_run

__all__ = ["analyze", "by_layer", "load", "load_sweep", "plot", "train"]

Folder = str | os.PathLike[str]


@contextmanager
def _keeping_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end."""
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logging_to(path: Path | None) -> AbstractContextManager[None]:
    # a notebook or program with its own log handlers already shows rankbench's log
    return logging_to(path, to_terminal=not logging.getLogger().handlers)


@typed_arguments()
@_keeping_threads()
def train(*overrides: str, out: Folder | None = None) -> Run:
    """Train a run as `rankbench train` does, and run the analyses that its config names.

        run = rankbench.train("model=san", "model.layers=12", "replicas=5")

    overrides: the words of the command line. out: the run's folder; None for a new one under outputs/train. A run that
    is already in this folder continues. A finished run is returned as it is, unless it is given more trainer.steps.

    Raises ConfigError for an invalid config, and for a sweep, which only the command can run. If interrupted, it writes
    a checkpoint and raises KeyboardInterrupt; the same call with the same folder continues.
    """
    cfg = cast(TrainConfig, compose("train", *overrides))
    if out is not None:
        if twice := [word for word in overrides if word.startswith("out=")]:
            raise ConfigError(
                f"{twice[0]}: the keyword out={os.fspath(out)} also names a folder; leave one of them out"
            )
        cfg.out = os.fspath(out)
    check_job(cfg)
    check_single(cfg)
    run = Run(Path(cfg.out))
    with _logging_to(run.folder / "train.log"):
        try:
            train_run(cfg, run, _command("train", overrides, out))
        except Interrupted as stop:
            raise KeyboardInterrupt(f"{stop}; the same call with out={cfg.out!r} continues") from None
        draw_curves(cfg, run)
        if cfg.analysis:
            analyze_trained(cfg, run)
    return run


@typed_arguments()
def load(folder: Folder, *, plugins: str | Sequence[str] = ()) -> Run:
    """The run in a folder, or the newest one under outputs/ for "latest"; ConfigError if there is none.

    plugins: modules that the run was made with, as the command's key; they are imported.
    """
    load_plugins(_names_of(plugins))
    run = find_run(os.fspath(folder))
    if not (run.folder / "config.yaml").exists() and runs_in(run.folder):
        raise ConfigError(f"{folder}: a folder of runs; rankbench.load_sweep reads them, or give the folder of one")
    _ = run.config  # refuses a folder that holds no run
    return run


@typed_arguments()
def load_sweep(folder: Folder, *, plugins: str | Sequence[str] = ()) -> Runs:
    """The runs of a sweep's folder, with their varied keys and joined tables.

        runs = rankbench.load_sweep("outputs/train/heads")
        runs.keys, runs.final, runs.table("paths"), runs[0].config

    folder: the sweep's folder, a folder of such folders, a glob of them, or "latest". ConfigError if there is no run.
    plugins: as in `load`.
    """
    load_plugins(_names_of(plugins))
    return load_runs(os.fspath(folder))


@typed_arguments("subject")
@_keeping_threads()
def analyze(
    subject: Run | Folder | Sequence[str] | nn.Module,
    *names: Any,
    out: Folder | None = None,
    device: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
    plugins: str | Sequence[str] = (),
    mask: str | None = None,
    output: str | int | None = None,
    layers: Sequence[str] | None = None,
    token_axis: int | None = None,
    **options: Any,
) -> dict[str, pd.DataFrame]:
    """Run analyses as `rankbench analyze` does, and return their tables by name.

        rankbench.analyze(run, "residual", "paths", sequences=64)
        rankbench.analyze(["model=san", "model.layers=12", "replicas=3"], "residual")
        rankbench.analyze(module, inputs, "spectrum", "attention")

    subject: a run, its folder, or "latest"; for fresh models a list with the words of the command line; or any torch
    module, which is copied. After a module come its inputs: a tensor, a tuple of arguments, or a dict of arguments by
    name, in which `targets` are the targets for scoring the output. names: the analyses; without any, those of the
    command or of the words' preset. out: a folder for the tables, figures and verdicts; without one, nothing is written
    and no claim is judged. device, precision, threads, plugins, and for modules mask, output, layers, token_axis: as
    the command's keys; precision is fp64 by default.

    options: each is set in every one of these analyses that has it. To set options of one analysis alone, give its
    name and a dict: paths={"sequences": 64}.

    A table's `attrs["columns"]` says what its columns mean.

    Raises ConfigError for a subject that cannot be measured, and for an option that none of the analyses has.
    """
    own = _names_of(plugins)
    given: dict[str, Any] = {"device": device, "precision": precision, "threads": threads, "mask": mask}
    given |= {"output": output, "token_axis": token_axis}
    lists = {"plugins": own or None, "layers": layers}
    given |= {key: f"[{','.join(entries)}]" for key, entries in lists.items() if entries is not None}
    load_plugins([*own, *(named_plugins(subject) if isinstance(subject, list | tuple) else ())])
    if isinstance(subject, nn.Module):
        if not names or isinstance(names[0], str):
            raise ConfigError(f"{type(subject).__name__}: needs inputs; as in analyze(module, inputs, 'spectrum')")
        with building_once(), offering(subject, names[0]) as spec:
            named = names[1:] or ("residual", "spectrum", "attention")
            return analyze([f"module={spec}"], *named, out=out, **given | {"plugins": own, "layers": layers}, **options)
    if callable(subject):
        name = getattr(subject, "__name__", type(subject).__name__)
        raise ConfigError(f"{name}: not a module; give an instance of torch.nn.Module, as in analyze(Net(), inputs)")
    cfg, words = _composed(subject, names, given, out)
    words += _set_options(cfg, options)
    with building_once():
        analyze_command.check(cfg, writes=out is not None)
        check_corpus(cfg)
        if out is None:
            with _logging_to(None):
                return _tables_of(cfg)
        check_single(cfg)
        with leaving_nothing(Path(cfg.out)), _logging_to(Path(cfg.out) / "analyze.log"):
            analyze_into(cfg, _command("analyze", words, out))
            return {name: Run(Path(cfg.out)).table(name) for name in cfg.analysis}


def _tables_of(cfg: AnalyzeConfig) -> dict[str, pd.DataFrame]:
    subjects = subjects_of(cfg, Machine.prepare(cfg))
    check_finite(subjects)
    tables = {name: measure(name, chosen, subjects) for name, chosen in options_of(cfg).items()}
    for name, table in tables.items():
        table.attrs |= {"analysis": name, "columns": column_help(name, table)}
    return tables


def _composed(
    subject: Run | Folder | Sequence[str], names: tuple[str, ...], given: dict[str, Any], out: Folder | None
) -> tuple[AnalyzeConfig, list[str]]:
    """The config of `analyze`, and the words of the command that has it."""
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"analyze: an analysis is of type {type(name).__name__}; give names, as in 'residual', 'paths'"
            )
    check_known("analysis", names, ANALYSES)
    words = [f"analysis=[{','.join(names)}]"] if names else []
    words += [f"{key}={value}" for key, value in given.items() if value is not None]
    run = None
    if isinstance(subject, list | tuple):
        words = [*subject, *words]
    elif isinstance(subject, Run | str | os.PathLike):
        run = subject if isinstance(subject, Run) else _load_subject(subject)
    else:
        raise ConfigError(f"{subject!r}: nothing to analyse; give a run, a run's folder, or a list of overrides")
    cfg = cast(AnalyzeConfig, compose("analyze", *words))
    analyze_command.check_keys(cfg, as_keys("analyze", words))
    for word in words:
        if word.startswith(("out=", "run=")):
            raise ConfigError(f"{word}: not in the list; give the folder as {'subject' if word[0] == 'r' else 'out='}")
    if out is not None:
        cfg.out = os.fspath(out)
    if run is not None:
        cfg.run = str(run.folder)
        words.append(f"run={cfg.run}")
    return cfg, words


@typed_arguments()
def plot(
    table: pd.DataFrame, *, analysis: str | None = None, facet: str | None = None, published: str | None = None
) -> Figure:
    """Draw an analysis' table, a training's (`run.metrics`, or of a watch), or a sweep's final numbers (`runs.final`),
    and return the figure, to change or save.

    analysis: the analysis that made the table; None to find it by `table.attrs` or by the columns. facet: the column
    with a panel for each of its values; None for the varied keys in a joined table of several runs, else no panels.
    published: the figure whose published numbers are drawn next to ours.

    Raises ConfigError for a table that no analysis makes.
    """
    load_plugins()
    name = analysis_of(table) if analysis is None else analysis
    drawable = [*(name for name, kind in ANALYSES.items() if kind.figure is not None), *FIGURES]
    if name in (*ANALYSES, *OBSERVED) and name not in drawable:
        raise ConfigError(f"analysis={name}: has no figure; allowed are {', '.join(drawable)}")
    check_known("analysis", [name], [*drawable, "sweep"])
    if table.empty:
        raise ConfigError(f"analysis={name}: the table has no rows to draw")
    check_known("facet", [] if facet is None else [facet], map(str, table.columns))
    check_known("published", [] if published is None else [published], figures_published())
    columns = ("job_status",) if name == "sweep" else () if name in FIGURES else ANALYSES[name].recognised_by
    if missing := [column for column in columns if column not in table]:
        raise ConfigError(f"analysis={name}: not its table, which has a column {missing[0]}")
    with doubting(f"analysis={name}"):
        figure = _figure_of(name, table, facet, published)
    show_in_notebook()
    return figure


def _figure_of(name: str, table: pd.DataFrame, facet: str | None, published: str | None) -> Figure:
    """The figure of a table of this analysis or training; ConfigError if there is nothing to draw."""
    varied = [key for key in table.attrs.get("varied", ()) if key in table]
    if name == "sweep":
        pages = final_pages(table, varied, FigureKeys(facet=facet))
        if not pages:
            raise ConfigError("analysis=sweep: no final numbers of finished runs, or no key that varies between them")
        return pages[0][0]
    if facet is None and varied:
        table, facet = one_facet(table, varied), varied[0]
    if name in FIGURES:
        return FIGURES[name](table, facet)
    draw = ANALYSES[name].figure
    assert draw is not None  # name is drawable
    return draw(table, None if published is None else published_numbers(published), facet)


def _names_of(plugins: str | Sequence[str]) -> list[str]:
    return [plugins] if isinstance(plugins, str) else list(plugins)


def _load_subject(folder: Folder) -> Run:
    if "=" in (text := os.fspath(folder)) and not Path(text).exists():
        raise ConfigError(f"{text}: no such folder; the overrides of a fresh model go in a list: [{text!r}]")
    return load(folder)


def _set_options(cfg: AnalyzeConfig, options: Mapping[str, Any]) -> list[str]:
    """Set keyword options in the config of the analyses that have them; return them as words of a command line."""
    words = []
    for key, value in options.items():
        if key in cfg.analysis and isinstance(value, Mapping):
            chosen = {key: value}
        else:
            keys = {name: [field.name for field in fields(ANALYSES[name].options)] for name in cfg.analysis}
            chosen = {name: {key: value} for name, held in keys.items() if key in held}
            if key in cfg.analysis:
                raise ConfigError(f'{key}: is an analysis; give its options by name, as in {key}={{"sequences": 64}}')
            if not chosen:
                allowed = list(dict.fromkeys(option for held in keys.values() for option in held))
                raise ConfigError(
                    f"{key}={value}: no option of {', '.join(cfg.analysis)}{closest(key, allowed)}; "
                    f"allowed are {', '.join(allowed)}"
                )
        for name, values in chosen.items():
            for option, setting in values.items():
                plain = setting.tolist() if hasattr(setting, "tolist") else setting  # NumPy's numbers
                if not isinstance(plain, str | int | float | list | tuple | dict | None):
                    raise ConfigError(f"{option} is of type {type(plain).__name__}; give a number, a text or a list")
                cfg.analysis[name][option] = plain
                typed = plain if isinstance(plain, str) else json.dumps(plain, default=str)
                words.append(f"analysis.{name}.{option}={typed}")
    return words


def _command(name: str, words: Sequence[str], out: Folder | None) -> list[str]:
    """The command line that does the same as this call, for environment.json."""
    return [f"rankbench {name}", *words, *([] if out is None else [f"out={os.fspath(out)}"])]
