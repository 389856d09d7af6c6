"""Report on many runs: their tables joined, a summary over seeds, figures, verdicts, and a page."""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench.analysing.runner import judge_all
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, closest
from rankbench.config.schema import StudyKeys
from rankbench.judging import CLAIMS, figures_published, published, statements_of
from rankbench.report.differences import baseline_in, differences, printed, sentences
from rankbench.report.figures import (
    Drawing,
    draw_differences_in_parts,
    draw_final,
    draw_study,
    draw_tables,
    final_value,
)
from rankbench.report.jobs import SILENT, config_of, flattened, keys_of, runs_in, shared, values_by_job, varying_keys
from rankbench.report.joined_tables import Joined, columns_of, for_print, read_all, summarise
from rankbench.report.page import records, write_page
from rankbench.report.study import (
    OF_RUN,
    check_words,
    is_done,
    rows_that_count,
    studied_columns,
    table_of,
    with_columns,
)
from rankbench.runs.files import write_json, write_text
from rankbench.runs.records import or_empty, read_json
from rankbench.runs.run import OBSERVED, Run
from rankbench.runs.tables import RUN_COLUMNS, booleans_as_words, latex, markdown, read_table, write_table

WRITTEN = ".report.json"  # the runs of a report and its files, in its folder


def check_study(chosen: StudyKeys, jobs: list[Path], baseline: str | None = None) -> None:
    """Raise ConfigError for a key that no run has, a column that cannot be drawn, and a baseline that is no run's. All
    names are checked before a table is read, which can take long."""
    varying = varying_keys(jobs)[0]
    keys = _with_chosen(varying, chosen, jobs)
    axes = [key for key in keys if key not in OF_RUN]
    baseline_in(baseline, pd.DataFrame(list(values_by_job(jobs, axes).values()), columns=axes))
    columns = columns_of(jobs, keys) if chosen.value or chosen.where else {"": []}
    check_words(chosen, columns)
    drawn = (name for value in chosen.value for name in columns[table_of(value, columns[""])])
    known = dict.fromkeys([*keys_of(jobs), *drawn])
    for name, key in chosen.places.items():
        if key is not None and key not in known:
            raise ConfigError(
                f"report.{name}={key}: no key of these runs{closest(key, list(known))}; "
                f"those that vary are {', '.join(varying) or 'none'}"
            )
    if chosen.value:
        joined = read_all(jobs, keys)
        studied_columns(chosen, joined.tables, joined.final, keys)


def _with_chosen(keys: list[str], chosen: StudyKeys, jobs: list[Path]) -> list[str]:
    """The varied keys and the runs' keys that the user chose for a figure."""
    known = keys_of(jobs)
    return list(dict.fromkeys([*keys, *(key for key in chosen.places.values() if key in known)]))


def gather_sweep(folder: Path, varied: list[str]) -> list[str]:
    """Write the report of a finished sweep into its folder. varied: the keys that the sweep varied."""
    jobs = [job for job in runs_in(folder) if job != folder and "runs" not in config_of(job)]
    known = {key for job in jobs for key in flattened(config_of(job))} | set(RUN_COLUMNS)
    # a sweep over presets, groups or runs varies more keys than it names
    is_named = set(varied) <= (known | set(SILENT)) - {"run"}
    named = [key for key in varied if key not in SILENT] if is_named else None
    return gather(jobs, folder, named) if any((job / "config.yaml").exists() for job in jobs) else []


def gather(
    jobs: list[Path],
    folder: Path,
    varied: list[str] | None = None,
    chosen: StudyKeys | None = None,
    statistic: str = "mean",
    column: str | None = None,
    live: str = "",
    baseline: str | None = None,
) -> list[str]:
    """Join the runs' tables, with a column for each varied key; then summarise, draw, judge, and write a page.

    sweep.csv: a row for each job and seed with its status and final numbers. summary.csv, .md and .tex: means over
    seeds. differences.csv: from a baseline (`baseline_in`). varied: None to find the keys in the runs' configs.
    statistic: mean | best, over seeds, for the figure of final numbers. column: single | double, the figures' width.
    live: the status line of a page that is going to be rewritten, else empty. Returns lines for the reader.
    """
    varying, follows = varying_keys(jobs)
    chosen = chosen or StudyKeys()
    keys = _with_chosen(varying if varied is None else varied, chosen, jobs)
    joined = read_all(jobs, keys)
    names, statuses, _, tables, final = joined
    folder.mkdir(parents=True, exist_ok=True)
    before = _files_in(folder)
    studied = studied_columns(chosen, tables, final, keys)
    write_table(with_columns(final, studied, chosen, keys), folder / "sweep.csv")
    seeds = booleans_as_words(read_table(folder / "sweep.csv"))
    lines = [*_states_of(joined), *_plugins_not_named(jobs), f"-> {folder / 'sweep.csv'}"]
    lines += [f"{value}: {words}" for value, rows in studied.items() if (words := rows_that_count(chosen, rows))]
    axes = [key for key in keys if key not in OF_RUN]
    summary = summarise(seeds, axes, (value for value in studied if "." in value))
    lines += _write_summary(summary, studied, folder)
    compared, in_words, lines_of_differences = _differences(seeds, summary, axes, baseline, folder)
    lines += lines_of_differences
    configs = [config_of(job) for job in jobs]
    claims = _claims_of(configs, tables)
    how = Drawing(folder, chosen, statistic, column, _figure_published(configs))
    captions = _drawn(seeds, studied, compared, tables, keys, how)
    lines += [f"-> {folder / name}.png, .pdf and .svg" for name in captions]
    lines += judge_all(claims, tables, folder, axes)
    write_page(
        folder,
        {names[job]: (job, statuses[job], values) for job, values in values_by_job(jobs, keys).items()},
        seeds,
        summary,
        captions,
        judged=statements_of(records(read_table(folder / "verdicts.csv"))) if claims else [],
        differences=records(compared),
        sentences=in_words,
        published=records(published(how.published)) if how.published else [],
        follows=follows if varied is None else {},
        asked=shared(configs),
        live=live,
    )
    _remove_earlier(folder, before, jobs)
    return [*lines, f"-> {folder / 'report.html'}"]


def _files_in(folder: Path) -> dict[str, tuple[int, int]]:
    """The files of a folder, each with what tells whether it was written since."""
    files = (path for path in folder.glob("[!.]*") if path.is_file())
    return {path.name: ((stat := path.stat()).st_ino, stat.st_mtime_ns) for path in files}


def _remove_earlier(folder: Path, before: dict[str, tuple[int, int]], jobs: list[Path]) -> None:
    """Remove what an earlier report wrote and this one did not, if it was of a run that this one is not of. before: see
    `_files_in`."""
    earlier, now = or_empty(read_json, folder / WRITTEN), _files_in(folder)
    runs = {os.path.relpath(job, folder) for job in jobs}
    files = {name for name in now if before.get(name) != now[name]}
    kept = {name for name in earlier.get("files", ()) if name in now} - files
    if not runs.issuperset(earlier.get("runs", ())):
        for name in kept:
            (folder / name).unlink()
        kept = set()
    write_json(folder / WRITTEN, {"runs": sorted(runs), "files": sorted(files | kept)})


def _drawn(
    seeds: pd.DataFrame,
    studied: dict[str, pd.DataFrame],
    compared: pd.DataFrame,
    tables: dict[str, pd.DataFrame],
    keys: list[str],
    how: Drawing,
) -> dict[str, str]:
    """Draw all figures of a report, and write the joined tables; returns the figures' captions by file name."""
    done, chosen, axes = seeds[is_done(seeds)], how.chosen, [key for key in keys if key not in OF_RUN]
    captions = draw_study(studied, done, axes, how, final_value(done))
    # only figures of the study can have columns of tables as x, series or facet
    elsewhere: dict[str, Any] = {place: None for place, key in chosen.places.items() if key not in keys}
    how = replace(how, chosen=replace(chosen, **elsewhere))
    captions |= draw_final(seeds, axes, how)
    if len(compared):
        where = "; ".join(filter(None, dict.fromkeys(rows_that_count(chosen, rows) for rows in studied.values())))
        captions |= draw_differences_in_parts(read_table(how.folder / "differences.csv"), where, how)
    for name, table in tables.items():
        write_table(table, how.folder / f"{name}.csv")
    over_steps_first = {name: tables[name] for name in ("metrics", *OBSERVED, *tables) if name in tables}
    return captions | draw_tables(over_steps_first, axes, how)


def _plugins_not_named(jobs: list[Path]) -> list[str]:
    """A line where runs were made with plug-ins that the user has not named: their tables are not read."""
    names = {name for job in jobs for name in config_of(job).get("plugins") or () if name not in plugins.LOADED}
    words = f"plugins=[{','.join(sorted(names))}]"
    return [f"tables of plug-ins that are not named are left out; to read them, add {words}"] if names else []


def _write_summary(summary: pd.DataFrame, studied: dict[str, pd.DataFrame], folder: Path) -> list[str]:
    if summary.empty:
        return []
    write_table(summary, folder / "summary.csv")
    write_text(folder / "summary.md", markdown(summary))
    write_text(folder / "summary.tex", latex(for_print(summary, studied)))
    return [f"-> {folder / 'summary.csv'}, .md and .tex"]


def _differences(
    seeds: pd.DataFrame, summary: pd.DataFrame, axes: list[str], baseline: str | None, folder: Path
) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Write the differences from the baseline; returns them, what they say, and lines for the reader."""
    done = seeds[is_done(seeds)]
    measured = [name.removesuffix("_mean") for name in summary if name.endswith("_mean")] if axes else []
    reference = baseline_in(baseline, (done if baseline is None else seeds)[axes])
    compared = differences(done, axes, measured, reference)
    in_words = sentences(compared, axes, reference)
    if compared.empty:
        lines = [] if baseline is None else [f"report.baseline={baseline}: no finished seeds to compare it with"]
        return compared, in_words, lines
    write_table(compared, folder / "differences.csv")
    return compared, in_words, [*printed(in_words), f"-> {folder / 'differences.csv'}"]


def _claims_of(configs: list[dict[str, Any]], tables: dict[str, pd.DataFrame]) -> list[str]:
    """The claims that the runs ask for, as far as there is a table for them."""
    requested = dict.fromkeys(claim for config in configs for claim in config.get("claims") or ())
    return [name for name in requested if name in CLAIMS and CLAIMS[name].table in tables]


def _states_of(joined: Joined) -> Iterator[str]:
    """The number of jobs by status, then the jobs that have not finished and those whose files have changed."""
    counts = Counter(joined.statuses.values())
    jobs = "1 job" if len(joined.statuses) == 1 else f"{len(joined.statuses)} jobs"
    yield f"{jobs}, {', '.join(f'{count} {status}' for status, count in counts.items())}"
    for job, status in joined.statuses.items():
        if status != "finished":
            yield f"{joined.names[job]}: {status}{f' ({joined.damage[job]})' if job in joined.damage else ''}"
    for job, name in joined.names.items():
        if job not in joined.damage and (changed := Run(job).changed_files()):
            yield f"{name}: changed since it was written, so tables are left out: {', '.join(changed)}"


def _figure_published(configs: list[dict[str, Any]]) -> str | None:
    """The published figure that all of these runs repeat, if there is one."""
    named = {config["published"] for config in configs if config.get("published")}
    return named.pop() if len(named) == 1 and named.issubset(figures_published()) else None
