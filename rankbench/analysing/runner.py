"""Analyses of a run or of a fresh model: for each analysis a table, a figure and a digest; then the claims."""

import dataclasses
import hashlib
import logging
import time
from collections.abc import Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rankbench import __version__, plots
from rankbench.analyses import ANALYSES, Subject
from rankbench.analyses.analysis import NEEDS
from rankbench.analysing.first_screen import first_screen, heading_of, name_of
from rankbench.analysing.kept_seeds import SECONDS_KEPT, KeptSeeds
from rankbench.analysing.modules import checked_subjects, described, is_foreign, network_table
from rankbench.analysing.subjects import check_finite, fresh_subjects, subjects_of, subjects_of_run
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, check_known, typed
from rankbench.config.schema import AnalyzeConfig, BaseConfig, TrainConfig
from rankbench.judging import (
    CLAIMS,
    Facet,
    figures_published,
    judge,
    published,
    statement_line,
    statements_of,
    table_of,
)
from rankbench.judging.claim import NOTHING
from rankbench.measures.states import NotFinite
from rankbench.model import skeleton
from rankbench.model.kinds import kinds_of_task
from rankbench.plots.residual import draw_overview
from rankbench.plots.training import draw_metrics
from rankbench.progress import bar
from rankbench.runs.files import write_json, write_text
from rankbench.runs.machine import Machine, explaining_memory, git_state, source_digest
from rankbench.runs.records import or_empty, read_json
from rankbench.runs.run import Run, config_text, find_run
from rankbench.runs.summary import FORMAT
from rankbench.runs.sweep import JOBS
from rankbench.runs.tables import RUN_COLUMNS, column_help, read_table, with_who, write_table
from rankbench.tasks import Task, build_task

# Everything that determines a table: its name in analyses.json, and in words
KEY = {
    "options": "options",
    "subjects": "networks and their training",
    "rankbench": "rankbench's version",
    "code": "rankbench's source",
    "corpus": "the corpus",
}

TRIED: set[str] = set()  # plug-ins' analyses that this process has tried
TRIED_SEED, TRIED_SEQUENCES = 2**32 - 1, 4  # a seed that hardly any run has, so that no seed's own failure is met

log = logging.getLogger(__name__)


def check_analyses(cfg: BaseConfig, measured: BaseConfig) -> None:
    """Raise ConfigError for an unknown analysis, wrong options, or an analysis that does not fit the task or model.

    measured: the config of the task and the model; if the command measures a run, the run's own.
    """
    options = options_of(cfg)
    for subject in _subjects_to_check(cfg, measured):
        for name, chosen in options.items():
            _check_needs(name, subject, measured)
            if (check := ANALYSES[name].check) is not None:
                check(subject, chosen)


def _subjects_to_check(cfg: BaseConfig, measured: BaseConfig) -> Sequence[Subject]:
    if isinstance(cfg, AnalyzeConfig) and is_foreign(cfg):
        return checked_subjects(cfg)
    task = build_task(measured.task)
    if isinstance(cfg, AnalyzeConfig) and cfg.uncounted:
        kinds_of_task(task).check(cfg.uncounted, "uncounted")
    training = measured if isinstance(measured, TrainConfig) else None
    networks = {"initialised": skeleton(measured.model, task)}
    return [Subject("planned", measured.seed, task, networks=networks, training=training)]


def _check_needs(name: str, subject: Subject, measured: BaseConfig) -> None:
    """Raise ConfigError for a subject that lacks what the analysis needs."""
    lacking = [need for need in NEEDS if need in ANALYSES[name].needs - subject.has]
    if not lacking:
        return
    fit = [other for other, analysis in ANALYSES.items() if analysis.needs <= subject.has]
    what, instead = f"model.kind={measured.model.kind}", f"use {', '.join(fit)}"
    if isinstance(measured, AnalyzeConfig) and is_foreign(measured):
        what = f"model={measured.module}" if measured.checkpoint is None else f"model.path={measured.checkpoint}"
    elif lacking == ["history"]:
        what, instead = "a fresh network", "give run=<folder>"
    raise ConfigError(f"analysis={name}: needs {NEEDS[lacking[0]]}; {what} does not fit; {instead}")


def try_analyses(cfg: BaseConfig, measured: BaseConfig) -> None:
    """Measure a small fresh network on a few sequences with each analysis of a plug-in, once in a process, so that what
    is wrong with it is known before the work begins. One that needs a training cannot be tried.

    measured: as in `check_analyses`.
    """
    for name, options in options_of(cfg).items():
        if name in TRIED or name not in plugins.brought("ANALYSES") or "history" in ANALYSES[name].needs:
            continue
        TRIED.add(name)
        small = dataclasses.replace(measured.model, layers=min(measured.model.layers, 2))
        machine = Machine.prepare(dataclasses.replace(cfg, device="cpu", precision="fp64"))
        (subject,) = fresh_subjects(dataclasses.replace(measured, model=small, seed=TRIED_SEED, replicas=1), machine)
        few = {part: getattr(subject, part)[:TRIED_SEQUENCES] for part in ("train", "test")}
        tried, before = dataclasses.replace(subject, **few), _fingerprint([subject])
        measure(name, options, [tried])
        if _fingerprint([subject]) != before or any(module.training for module in subject.modules.values()):
            raise ConfigError(
                f"analysis={name}: its table changes the module that it measures, which other analyses measure, too; "
                "let it work on a copy, as copy.deepcopy(module)"
            )


def options_of(cfg: BaseConfig) -> dict[str, Any]:
    """The typed options of each analysis in the config; ConfigError for an unknown analysis, claim or figure."""
    check_known("analysis", cfg.analysis, ANALYSES)
    check_known("claims", cfg.claims, CLAIMS)
    for name in cfg.claims:
        if CLAIMS[name].table not in cfg.analysis:
            raise ConfigError(
                f"claims={name}: judged by analysis={CLAIMS[name].table}, which this command does not run"
            )
    if cfg.published is not None and cfg.published not in (known := figures_published()):
        raise ConfigError(f"published={cfg.published}: no published numbers; allowed are {', '.join(known)}")
    return {name: typed(ANALYSES[name].options, options, f"analysis.{name}") for name, options in cfg.analysis.items()}


def analyze_trained(cfg: TrainConfig, run: Run) -> list[str]:
    """Run the analyses that a training config names, in its run's folder. They compute in float64 whatever the
    training's precision, because sums are checked to rounding. Returns lines for the reader."""
    machine = Machine.prepare(dataclasses.replace(cfg, precision="fp64"))
    with run.locked(), explaining_memory(machine):
        lines = analyze(cfg, subjects_of_run(run, machine), run.folder)
        run.record_files(_tables_of(cfg))
    return lines


def draw_curves(cfg: TrainConfig, run: Run) -> list[Path]:
    """Draw loss and accuracy of a run's training over its steps, in its folder; returns the files."""
    if not cfg.figures:
        return []
    return next(iter(plots.save_pages([(draw_metrics(run.metrics), "")], run.folder / "metrics", _kinds(cfg)).values()))


def _kinds(cfg: BaseConfig) -> tuple[str, ...]:
    """The suffixes of the files of a figure."""
    return tuple(f".{kind}" for kind in cfg.figures)


def analyze_into(cfg: AnalyzeConfig, command: list[str] | None = None) -> list[str]:
    """Write everything that `rankbench analyze` leaves in the folder `cfg.out`: a record of config and machine, tables,
    figures, verdicts and a summary. command: see `Machine.record`. Returns lines for the reader."""
    machine, folder = Machine.prepare(cfg), Path(cfg.out)
    machine.log_threads(cfg.threads)
    with Run(folder).locked(), explaining_memory(machine):
        subjects = subjects_of(cfg, machine)
        _check_others(cfg, subjects, folder)
        write_text(folder / "config.yaml", config_text(cfg))
        write_json(folder / "environment.json", machine.record(command))
        run = None if cfg.run is None else str(find_run(cfg.run).folder.resolve())
        lines = analyze(cfg, subjects, folder)
        seeds = [{"seed": subject.seed, "status": "finished"} for subject in subjects]
        summary = {"format": FORMAT, "status": "finished", "run": run, "analyses": list(cfg.analysis), "seeds": seeds}
        write_json(folder / "summary.json", summary | {"files": Run(folder).checksums(_tables_of(cfg))})
    return lines


def _check_others(cfg: AnalyzeConfig, subjects: Sequence[Subject], folder: Path) -> None:
    """Refuse a folder with a table of other networks, which is not going to be measured again."""
    recorded = or_empty(read_json, folder / "analyses.json")
    others = {name: its for name, its in recorded.items() if name not in cfg.analysis and isinstance(its, dict)}
    there = [name for name in others if name.isidentifier() and (folder / f"{name}.csv").exists()]
    if there and any(others[name].get("subjects") != _fingerprint(subjects) for name in there):
        raise ConfigError(
            f"out={folder}: holds {there[0]}.csv of other networks or seeds; give another folder, or measure it again, "
            f"as in analysis=[{','.join([*cfg.analysis, *there])}]"
        )


def _tables_of(cfg: BaseConfig) -> list[str]:
    return [f"{name}.csv" for name in (*cfg.analysis, "verdicts")]


def analyze(cfg: BaseConfig, subjects: Sequence[Subject], folder: Path) -> list[str]:
    """Run each analysis of the config on every subject and write <name>.csv and its figure; then verdicts.csv.

    A table in the folder is not computed again if everything in KEY is the same. Returns lines for the reader: digests,
    files, verdicts.
    """
    options = options_of(cfg)
    check_finite(subjects)
    done_file = folder / "analyses.json"
    done, changed = read_json(done_file) if done_file.exists() else {}, Run(folder).changed_files()
    same = {
        "subjects": _fingerprint(subjects),
        "rankbench": __version__,
        "code": source_digest() + plugins.digest(),
        "corpus": _corpus_digest(subjects[0].task),
    }
    lines, tables, network = [], {}, None
    if is_foreign(cfg):
        network = network_table(subjects[0])
        write_table(network, folder / "network.csv")
        lines.append(f"-> {folder / 'network.csv'}")
        if not (is_overview := {"residual", "paths"} <= set(options)):
            lines += described(subjects[0])
    for name, chosen in options.items():
        csv, key = folder / f"{name}.csv", {"options": dataclasses.asdict(chosen)} | same
        reason = _why_computed(csv, done.get(name), key, changed)
        if reason is None:
            log.info("%s is up to date (same %s)", csv, ", ".join(KEY.values()))
        else:
            log.info("%s is computed%s", csv, reason)
            began, kept = time.perf_counter(), KeptSeeds(folder / f"{name}.unfinished", key)
            rows = measure(name, chosen, subjects, kept)
            if csv.exists():  # figures and verdicts of other rows
                plots.remove_pages(folder / name)
                for judged in ("verdicts.csv", "statements.csv"):
                    (folder / judged).unlink(missing_ok=True)
            write_table(rows, csv)
            kept.drop()
            done[name] = key | {"git": git_state(), "seconds": round(time.perf_counter() - began, 2)}
            write_json(done_file, done)
        tables[name] = read_table(csv)
        if network is None or not is_overview or name not in ("residual", "paths"):
            lines.append(_returned(name, "digest", ANALYSES[name].digest(tables[name]), str))
        lines.append(f"-> {csv}")
    pages = {name: [plots.Page(table, None, "")] for name, table in tables.items() if cfg.figures}
    lines += [drawn_line(files) for files in draw(pages, folder, cfg.published, _kinds(cfg)).values()]
    if network is not None and is_overview:
        lines += _overview(cfg, subjects[0], network, tables, folder)
    return lines + judge_all(cfg.claims, tables, folder, None, is_job=(folder.parent / JOBS).exists())


def _overview(
    cfg: BaseConfig, subject: Subject, network: pd.DataFrame, tables: dict[str, pd.DataFrame], folder: Path
) -> list[str]:
    """A network that is not ours in one table, for the reader, and one figure, network.png."""
    name, of_network = name_of(subject), (tables["residual"], tables["paths"])
    lines = first_screen(name, network, *of_network, described(subject)).split("\n")
    if cfg.figures:
        figure = draw_overview(*of_network, heading_of(name, network))
        lines.append(f"look at: {plots.figure.save(figure, folder / 'network', _kinds(cfg))[0]}")
    return lines


def _fingerprint(subjects: Sequence[Subject]) -> str:
    """Digest of everything that an analysis reads: seeds, task, model, dtype, weights, and the records of training."""
    digest = hashlib.sha256()
    for subject in subjects:
        example, foreign = subject.example, subject.foreign
        facts = [subject.who, subject.task, example.kinds.left_out, foreign and (foreign.asked, foreign.half)]
        facts += [None if rows is None else rows.to_csv() for rows in (subject.history, subject.curve)]
        facts += [(weights, getattr(module, "cfg", module)) for weights, module in subject.modules.items()]
        digest.update(repr(facts).encode())
        tensors = [x for module in subject.modules.values() for x in module.state_dict().values()]
        if foreign is not None:  # ours follow from the task
            tensors += [*example.tensors, example.targets, example.lengths_B, example.special_BN]
        for x in filter(lambda x: x is not None, tensors):
            digest.update(repr((x.dtype, x.shape)).encode() + x.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _corpus_digest(task: Task) -> str | None:
    """Digest of the texts that the task reads; None for a task that generates its sequences."""
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in getattr(task, "files", [])]
    return hashlib.sha256(b"".join(digests)).hexdigest() if digests else None


def _why_computed(csv: Path, record: Any, key: dict[str, Any], changed: list[str]) -> str | None:
    """Reason to compute a table, as the end of a sentence; None if the folder has it already."""
    if not csv.exists():
        return "" if record is None else " again: the file is gone"
    if not isinstance(record, dict):
        return " again: analyses.json does not record the file that is there"
    if csv.name in changed:
        return " again: the file changed since it was written"
    changed = [KEY[name] for name in KEY if name not in record or record[name] != key[name]]
    return f" again: {', '.join(changed)} changed" if changed else None


def measure(name: str, options: Any, subjects: Sequence[Subject], kept: KeptSeeds | None = None) -> pd.DataFrame:
    """The table of one analysis: the rows of all subjects, concatenated.

    kept: keeps the rows of each subject that took long, and has those of an unfinished analysis.
    """
    analysis = ANALYSES[name]
    if analysis.trained_alone:  # a checkpoint's later seeds have fresh weights only
        subjects = [subject for subject in subjects if "trained" in subject.networks] or subjects
    progress = bar(subjects, desc=name, unit="seed")
    parts = []
    for number, subject in enumerate(progress, 1):
        began, how = time.perf_counter(), "was measured before"
        if kept is None or (rows := kept.rows(number)) is None:
            how = "is measured"
            try:
                rows = analysis.table(subject, options)
            except NotFinite as error:
                raise ConfigError(str(error)) from error
            _check_rows(name, rows)
            if kept is not None and len(subjects) > 1 and time.perf_counter() - began > SECONDS_KEPT:
                kept.keep(number, rows)
        parts.append(with_who(rows, **subject.who))
        if progress.disable:
            log.info("%s: seed %d %s (%d of %d)", name, subject.seed, how, number, len(subjects))
    return pd.concat(parts, ignore_index=True)


def _check_rows(name: str, rows: Any) -> None:
    """Raise ConfigError for what an analysis returned that is not the rows of one subject, and for a column of a
    plug-in's table that its `columns` do not describe."""
    if wrong := _wrong_with(rows):
        raise ConfigError(
            f"analysis={name}: its table gave {wrong}; a table returns a DataFrame with rows, without "
            f"{', '.join(RUN_COLUMNS)}"
        )
    described = column_help(name, rows)
    if name in plugins.brought("ANALYSES") and (unknown := [str(column) for column in rows if column not in described]):
        raise ConfigError(
            f"analysis={name}: its table has the column {unknown[0]}, which its columns do not describe; they describe "
            f"{', '.join(ANALYSES[name].columns)}"
        )


def _wrong_with(rows: Any) -> str:
    """Why these are no rows of a table, as the end of a sentence; empty if they are."""
    if not isinstance(rows, pd.DataFrame) or rows.empty:
        return "no rows" if isinstance(rows, pd.DataFrame) else f"a {type(rows).__name__}"
    if own := set(RUN_COLUMNS) & set(rows):
        return min(own)
    if named := [name for name in rows.index.names if name is not None]:
        return f"the index {named[0]}, which is no column (reset_index makes it one)"
    if twice := [*rows.columns[rows.columns.duplicated()]]:
        return f"two columns {twice[0]}"
    entries = (x for column in rows if rows[column].dtype.kind in "Oc" for x in rows[column])  # objects, complex
    other = next((x for x in entries if not isinstance(x, str | Real | np.bool_ | None)), None)
    return "" if other is None else f"an entry of type {type(other).__name__}, neither a number nor a text"


def _returned(name: str, part: str, value: Any, kind: type) -> Any:
    """What a part of an analysis returned; ConfigError unless it is of this kind."""
    if not isinstance(value, kind):
        raise ConfigError(f"analysis={name}: its {part} gave a {type(value).__name__}; return a {kind.__name__}")
    return value


def draw(
    pages: dict[str, list[plots.Page]],
    folder: Path,
    figure_published: str | None,
    kinds: tuple[str, ...],
    column: str | None = None,
) -> dict[str, list[Path]]:
    """Draw each page of the analyses that have a figure, in files of these kinds; returns the files by figure."""
    files: dict[str, list[Path]] = {}
    published_numbers = published(figure_published) if figure_published else None
    for name, pages_of_name in pages.items():
        if (figure := ANALYSES[name].figure) is not None:
            drawn = ((figure(page.rows, published_numbers, page.facet), page.note) for page in pages_of_name)
            checked = ((_returned(name, "figure", drawn_page, plots.Figure), note) for drawn_page, note in drawn)
            figures = ((plots.fit(drawn_page, column), note) for drawn_page, note in checked)
            files |= plots.save_pages(figures, folder / name, kinds)
    return files


def drawn_line(files: list[Path]) -> str:
    """Line for the reader that names a figure's files."""
    return f"-> {' and '.join(map(str, files))}"


def judge_all(
    claims: list[str], tables: dict[str, pd.DataFrame], folder: Path, facet: Facet, is_job: bool = False
) -> list[str]:
    """Judge the claims, if there are any, and write verdicts.csv, a row for each setting, and statements.csv, a row for
    each claim; returns the statements as lines. is_job: of a job of a sweep, whose report judges the claims that
    compare jobs, and those of which only other jobs have rows."""
    if is_job:
        claims = [name for name in claims if not (CLAIMS[name].across or CLAIMS[name].along)]
    if not claims:
        return []
    verdicts = [verdict for name in claims for verdict in judge(name, tables[CLAIMS[name].table], facet)]
    statements = statements_of(verdicts)
    write_table(pd.DataFrame(verdicts), folder / "verdicts.csv")
    write_table(table_of(statements), folder / "statements.csv")
    told = [one for one in statements if not is_job or one["settings"][0]["reason"] != NOTHING]
    return [*map(statement_line, told), f"-> {folder / 'verdicts.csv'} and {folder / 'statements.csv'}"]
