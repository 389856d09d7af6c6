"""Report on many runs: their tables joined, a summary over seeds, figures, verdicts, and a page."""

import fcntl
import glob
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench import plots
from rankbench.analyses import ANALYSES
from rankbench.analyses.runner import draw, judge_all
from rankbench.claims import CLAIMS, figures_published
from rankbench.config import FigureKeys, StudyKeys
from rankbench.keys import ConfigError, as_typed, closest, unknown
from rankbench.plots.observed import FIGURES
from rankbench.plots.pages import MOST_PANELS, joined, pages_of_analysis, pages_of_final_numbers
from rankbench.plots.sweep import column_in_words, draw_scatter, draw_sweep
from rankbench.report.page import write_page
from rankbench.report.study import check_conditions, rank_correlation, values_of
from rankbench.runs.files import regular, write_text
from rankbench.runs.records import read_yaml
from rankbench.runs.run import OBSERVED, OUTPUTS, Run
from rankbench.runs.sweep import Sweep
from rankbench.runs.tables import WHO, booleans_as_words, latex, markdown, over_seeds, read_table, write_table

# Keys that are not variables of an experiment: where it runs, on what, how often it is evaluated, what is measured.
SILENT = ("out", "beyond_memory", "seed", "replicas", "device", "threads", "run", "analysis", "claims", "published")
SILENT += ("trainer.eval_every", "trainer.checkpoint_every", "observe.every")
KINDS = (*plots.KINDS, ".svg")
MOST_PANELS_OVER_STEPS = 6  # of a figure of a watched training, which has a row of them for each value


@dataclass(frozen=True)
class Runs:
    """Several runs, such as those of a sweep, and the keys whose values differ between them.

    `runs[0]` is the first run; `for run in runs` visits all of them in the order of the sweep's jobs, including jobs
    that failed or never began. In the tables every varied key is a column.
    """

    folders: list[Path]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.folders)

    def __getitem__(self, number: int) -> Run:
        return Run(self.folders[number])

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self.folders)

    def table(self, name: str) -> pd.DataFrame:
        """Concatenate the runs' tables of an analysis; ConfigError if no run has one."""
        tables = {folder: _tables_at(folder, [name]) for folder in self.folders}
        table = _joined(name, tables, _names(self.folders), self._values)
        if table is None:
            names = sorted({table.stem for folder in self.folders for table in folder.glob("*.csv")})
            raise ConfigError(
                f"{name}: no run has such a table{closest(name, names)}; there are {', '.join(names) or 'none'}; "
                'rankbench.analyze(run, "paths") measures one run after the other'
            )
        return self._labelled(table, name)

    @property
    def metrics(self) -> pd.DataFrame:
        """Concatenate `Run.metrics` of all runs that have begun to train."""
        names, values = _names(self.folders), self._values
        begun = [run for run in self if (run.folder / "metrics.csv").exists()]
        if not begun:
            raise ConfigError("metrics: none of the runs has begun to train")
        parts = [run.metrics.assign(run=names[run.folder], **values[run.folder]) for run in begun]
        return self._labelled(pd.concat(parts, ignore_index=True), "metrics")

    @property
    def final(self) -> pd.DataFrame:
        """A row for each run and seed with its status and final numbers, as in a report's sweep.csv."""
        statuses = {folder: status_of(folder) for folder in self.folders}
        return self._labelled(_final_numbers(_names(self.folders), statuses, self._values), "sweep")

    @property
    def _values(self) -> dict[Path, dict[str, str]]:
        keys = [key for key in self.keys if key not in WHO]
        return {folder: _values(folder, keys) for folder in self.folders}

    def _labelled(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """Convert the values of varied keys to numbers where possible, and put the table's name into `attrs`."""
        for key in self.keys:
            with suppress(ValueError):
                table[key] = pd.to_numeric(table[key].replace("", None))
        table.attrs = {"analysis": name, "varied": list(self.keys)}
        return table


def load_runs(text: str) -> Runs:
    """The runs given by `runs=`, with the keys that vary between them."""
    folders = find_runs(text)
    return Runs(folders, varying_keys(folders)[0])


def find_runs(text: str) -> list[Path]:
    """The runs given by `runs=`, in order; ConfigError if there is none. `latest`: the newest sweep or run.

    Folders of analyses count only if there is no folder of training.
    """
    if text == "latest":
        dated = [(max(map(_written, runs)), runs) for folder in OUTPUTS.glob("train/*") if (runs := runs_in(folder))]
        if not dated:
            raise ConfigError(f"runs=latest: no run under {OUTPUTS.resolve()}; train one with `rankbench train`")
        return max(dated)[1]
    folders = [Path(text)] if Path(text).exists() else sorted(map(Path, glob.glob(text, recursive=True)))
    jobs = list(dict.fromkeys(job for folder in folders for job in runs_in(folder)))
    configs = {job: _config(job) for job in jobs}
    jobs = [job for job in jobs if "bench" not in configs[job]]
    trained = [job for job in jobs if "run" not in configs[job]]
    if not any((job / "config.yaml").exists() for job in jobs):
        raise ConfigError(f"runs={text}: no run there; give a run's or a sweep's folder, a glob, or runs=latest")
    return trained or jobs


def runs_in(folder: Path) -> list[Path]:
    """The runs at or below a folder, with jobs in the order of their numbers.

    A sweep's jobs include those without a config, which have not begun or failed before they wrote one.
    """
    if (folder / "config.yaml").is_file():
        return [folder]
    if (folder / ".hydra").is_dir() and (folder.parent / "multirun.yaml").exists():
        return [folder]
    if not folder.exists() and folder.name in {job.folder for job in Sweep(folder.parent).missing()}:
        return [folder]
    if not folder.is_dir():
        return []
    below = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    below += [folder / job.folder for job in Sweep(folder).missing()]
    return [run for path in sorted(below, key=_number) for run in runs_in(path)]


def _written(job: Path) -> int:
    return max(
        (path.stat().st_mtime_ns for path in (job / "summary.json", job / "config.yaml") if path.exists()), default=0
    )


def _number(job: Path) -> tuple[int, str]:
    """Sort key for jobs by number: 2 before 10."""
    number = job.name.partition("_")[0]
    return (int(number) if number.isdigit() else -1, job.name)


def check_study(chosen: StudyKeys, jobs: list[Path]) -> None:
    """Raise ConfigError for a key that no run has, and for a column that cannot be drawn."""
    varying = varying_keys(jobs)[0]
    keys = _with_chosen(varying, chosen, jobs)
    studied = _studied(chosen, *_read_all(jobs, keys)[3:], keys) if chosen.value or chosen.where else {}
    known = dict.fromkeys([*_keys_of(jobs), *(str(name) for rows in studied.values() for name in rows)])
    for name, key in chosen.places.items():
        if key is not None and key not in known:
            raise ConfigError(
                f"report.{name}={key}: no key of these runs{closest(key, list(known))}; "
                f"those that vary are {', '.join(varying) or 'none'}"
            )


def _keys_of(jobs: list[Path]) -> list[str]:
    """All keys of the runs' configs."""
    return list(dict.fromkeys(["task", "model", *(key for job in jobs for key in _flat(_config(job)))]))


def _with_chosen(keys: list[str], chosen: FigureKeys | None, jobs: list[Path]) -> list[str]:
    """The varied keys and the runs' keys that the user chose for a figure."""
    known = _keys_of(jobs) if chosen else []
    added = [key for key in chosen.places.values() if key in known and key not in keys] if chosen else []
    return [*keys, *dict.fromkeys(added)]


def gather_sweep(folder: Path, varied: list[str]) -> list[str]:
    """Write the report of a finished sweep into its folder. varied: the keys that the sweep varied."""
    jobs = [job for job in runs_in(folder) if job != folder and not {"bench", "runs"} & _config(job).keys()]
    known = {key for job in jobs for key in _flat(_config(job))} | set(WHO)
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
) -> list[str]:
    """Join the runs' tables, with a column for each varied key; then summarise, draw, judge, and write a page.

    sweep.csv: a row for each job and seed with its status and final numbers. summary.csv, .md and .tex: means over
    seeds. For each analysis, the jobs' tables are concatenated. varied: None to find the keys in the runs' configs.
    statistic: mean | best, over seeds, for the figure of final numbers.
    Returns lines for the reader.
    """
    varying, follows = varying_keys(jobs)
    keys = _with_chosen(varying if varied is None else varied, chosen, jobs)
    names, statuses, damage, tables, final = _read_all(jobs, keys)
    studied = _studied(chosen, tables, final, keys)
    write_table(_with_columns(final, studied, chosen, keys), folder / "sweep.csv")
    seeds = booleans_as_words(read_table(folder / "sweep.csv"))
    lines = [
        f"{len(jobs)} jobs, {', '.join(f'{count} {status}' for status, count in Counter(statuses.values()).items())}"
    ]
    lines += [
        f"{names[job]}: {status}{f' ({damage[job]})' if job in damage else ''}"
        for job, status in statuses.items()
        if status != "finished"
    ]
    for job in jobs:
        if job not in damage and (changed := Run(job).changed_files()):
            lines.append(f"{names[job]}: changed since it was written, so tables are left out: {', '.join(changed)}")
    lines.append(f"-> {folder / 'sweep.csv'}")
    summary = summarise(seeds, keys, (value for value in studied if "." in value))
    if len(summary):
        write_table(summary, folder / "summary.csv")
        write_text(folder / "summary.md", markdown(summary))
        write_text(folder / "summary.tex", latex(summary))
        lines.append(f"-> {folder / 'summary.csv'}, .md and .tex")
    captions = _draw_study(studied, seeds, keys, chosen, statistic, folder) if chosen else {}
    if chosen:  # a column of a table is a place in the figures of the study alone
        chosen = replace(chosen, **{place: None for place, key in chosen.places.items() if key not in keys})
    captions |= _draw_final(seeds, keys, chosen, statistic, folder)
    for name, table in tables.items():
        write_table(table, folder / f"{name}.csv")
    configs = {job: _config(job) for job in jobs}
    requested = dict.fromkeys(claim for config in configs.values() for claim in config.get("claims") or ())
    claims = [name for name in requested if name in CLAIMS and CLAIMS[name].table in tables]
    figures = list({config.get("published") for config in configs.values() if config.get("published")})
    figure_published = figures[0] if len(figures) == 1 and figures[0] in figures_published() else None
    facets = [key for key in keys if key not in ("run", "seed")]
    captions |= _draw_analyses(tables, facets, chosen, figure_published, folder)
    captions |= _draw_observed({name: tables[name] for name in FIGURES if name in tables}, facets, chosen, folder)
    lines += [f"-> {folder / name}.png, .pdf and .svg" for name in captions]
    lines += judge_all(claims, tables, folder, facets)
    write_page(
        folder,
        {names[job]: (job, statuses[job], _values(job, keys)) for job in jobs},
        {"seeds": seeds, "summary": summary},
        captions,
        figure_published,
        follows if varied is None else {},
        bool(claims),
    )
    return [*lines, f"-> {folder / 'report.html'}"]


def _read_all(
    jobs: list[Path], keys: list[str]
) -> tuple[dict[Path, str], dict[Path, str], dict[Path, str], dict[str, pd.DataFrame], pd.DataFrame]:
    """The runs' names, statuses and damage; their tables, joined, by name; and the final numbers of every seed."""
    names = _names(jobs)
    # run, task, model and seed are columns already
    values = {job: _values(job, [key for key in keys if key not in WHO]) for job in jobs}
    read, damage = _read(jobs)
    statuses = {job: "damaged" if job in damage else status_of(job) for job in jobs}
    every = (*ANALYSES, *OBSERVED)
    tables = {name: table for name in every if (table := _joined(name, read, names, values)) is not None}
    return names, statuses, damage, tables, _final_numbers(names, statuses, values)


def _studied(
    chosen: StudyKeys | None, tables: dict[str, pd.DataFrame], final: pd.DataFrame, keys: list[str]
) -> dict[str, pd.DataFrame]:
    """The rows of each column that the user chose; ConfigError if one does not exist or needs a narrower choice."""
    if chosen is None or not chosen.value:
        if chosen and chosen.where:
            raise ConfigError(f"report.where={chosen.where}: chooses rows for report.value, which is empty")
        return {}
    final = final[_is_done(final)] if "status" in final else final
    sources = {}
    for value in chosen.value:
        table, _, column = value.rpartition(".")
        if table and table not in tables:
            raise ConfigError(f"report.value={value}: {unknown('table', table, tables)}")
        sources[value] = tables[table] if table else final
        if column not in sources[value]:
            columns = [f"{table}.{name}" if table else name for name in sources[value] if name not in WHO]
            raise ConfigError(unknown("report.value", value, columns))
        if not pd.api.types.is_numeric_dtype(sources[value][column]):
            raise ConfigError(f"report.value={value}: a column of words; give one of numbers")
    check_conditions(chosen.where, sources.values())
    if len(sources) > 1 and (axes := _axes(chosen, keys, *sources.values())):
        raise ConfigError(
            f"report.value=[{','.join(sources)}]: compared run by run, and {axes[0]} has several rows for each run; "
            f"give one column, or choose one row, as in report.where={axes[0]}=last"
        )
    return {
        value: values_of(table, value, chosen.where, _axes(chosen, keys, table)) for value, table in sources.items()
    }


def _axes(chosen: StudyKeys, keys: list[str], *tables: pd.DataFrame) -> list[str]:
    """The places of the figure that are columns of these tables and no keys of the runs."""
    return [key for key in chosen.places.values() if key not in keys and any(key in table for table in tables)]


def _with_columns(
    final: pd.DataFrame, studied: dict[str, pd.DataFrame], chosen: StudyKeys | None, keys: list[str]
) -> pd.DataFrame:
    """The final numbers with a column for each chosen one that has one value for each run and seed."""
    for value, rows in studied.items():
        if value not in final and chosen and not _axes(chosen, keys, rows):
            column = rows.set_index(["run", "seed"])[value.rpartition(".")[2]].rename(value)
            final = final.join(column, on=["run", "seed"])
    return final


def _is_done(seeds: pd.DataFrame) -> pd.Series:
    return (seeds.job_status == "finished") & (seeds.status != "diverged")


def varying_keys(jobs: list[Path]) -> tuple[list[str], dict[str, list[str]]]:
    """The keys whose values differ between the runs' configs, and for each of them the keys that follow it.

    The choice of a group stands for its keys: where model.name differs, a key of the model with one value for each name
    follows `model`. Likewise, any key can follow `budget`.
    """
    configs = [_flat(config) for job in jobs if (config := _config(job))]
    every = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key, "") for config in configs] for key in every}
    differ = [key for key in every if not _is_silent(key) and _num_values(key, values[key]) > 1]
    leaders = [key for key in differ if key == "budget" or (key.endswith(".name") and key.count(".") == 1)]
    keys, follows = [], {}
    for key in differ:
        leader = next((candidate for candidate in leaders if candidate != key and _leads(candidate, key, values)), None)
        if leader is None:
            keys.append(key.removesuffix(".name") if key in leaders else key)
        else:
            follows.setdefault(leader.removesuffix(".name"), []).append(key)
    return keys, follows


def _is_option(key: str) -> bool:
    """Whether the key is an option of an analysis."""
    return key.startswith("analysis.") and key.count(".") > 1


def _is_silent(key: str) -> bool:
    return not _is_option(key) and any(key == silent or key.startswith(f"{silent}.") for silent in SILENT)


def _num_values(key: str, values: list[str]) -> int:
    """Number of values of a key; for an option of an analysis, among the runs that have the analysis."""
    return len(set(values) - ({""} if _is_option(key) else set()))


def _leads(leader: str, key: str, values: dict[str, list[str]]) -> bool:
    if leader != "budget" and leader.partition(".")[0] != key.partition(".")[0]:
        return False
    pairs = set(zip(values[leader], values[key], strict=True))
    return len(pairs) == len(set(values[leader]))


def summarise(seeds: pd.DataFrame, keys: list[str], more: Iterable[str] = ()) -> pd.DataFrame:
    """Final test accuracy and loss by the varied keys, over the seeds of finished jobs: mean, interval, best; and of
    more columns mean and interval."""
    axes = [key for key in keys if key in seeds and key not in ("run", "seed")] or ["task", "model"]
    done = seeds[_is_done(seeds)]
    summary = None
    for value, best in ({"test_accuracy": "largest", "test_loss": "smallest"} | dict.fromkeys(more)).items():
        if value not in done or done[value].isna().all():
            continue
        names = {"num_seeds": f"{value}_seeds"} | ({best: f"{value}_best"} if best else {})
        names |= {column: f"{value}_{column}" for column in ("mean", "low95", "high95")}
        part = over_seeds(done, axes, value).rename(columns=names)[[*axes, *names.values()]]
        summary = part if summary is None else summary.merge(part, on=axes, how="outer")
    if summary is None:
        return pd.DataFrame()
    counted = [name for name in summary if name.endswith("_seeds")]
    summary.insert(len(axes), "num_seeds", summary[counted].max(axis=1).astype(int))
    return summary.drop(columns=counted)


def _draw_final(
    seeds: pd.DataFrame, keys: list[str], chosen: FigureKeys | None, statistic: str, folder: Path
) -> dict[str, str]:
    """Write the figure of the final numbers by the varied keys, if there is one; returns its pages' captions."""
    pages = final_pages(seeds, keys, chosen, statistic)
    names = plots.save_pages(((figure, note) for figure, note, _ in pages), folder / "sweep", KINDS)
    return {name: caption for name, (_, _, caption) in zip(names, pages, strict=True)}


def final_pages(
    seeds: pd.DataFrame, keys: list[str], chosen: FigureKeys | None = None, statistic: str = "mean"
) -> list[tuple[plots.Figure, str, str]]:
    """Pages of the figure of the final numbers by the varied keys: figure, note and caption of each.

    Keys that are neither x, series nor facet are panels, too; if the user chose both series and facet, the figure
    averages over them.
    """
    keys = [key for key in keys if key in seeds and key not in ("run", "seed")]
    done = seeds[_is_done(seeds)]
    value = _final_value(done)
    if value is None or not keys:
        return []
    return _pages_by_keys(done, keys, chosen, statistic, value, f"Final {value.replace('_', ' ')}")


def _final_value(done: pd.DataFrame) -> str | None:
    """The final number that a report draws, if there is one."""
    return next((name for name in ("test_accuracy", "test_loss") if name in done and done[name].notna().any()), None)


def _pages_by_keys(
    done: pd.DataFrame, keys: list[str], chosen: FigureKeys | None, statistic: str, value: str, what_is_drawn: str
) -> list[tuple[plots.Figure, str, str]]:
    x, series, facet = figure_keys(done, keys, chosen)
    rest = [key for key in keys if key not in (x, series, facet)]
    averaged = rest if chosen and chosen.series and chosen.facet else []
    panels = [key for key in (facet, *rest) if key and key not in averaged]
    pages = pages_of_final_numbers(_without_gaps(done, keys), panels, averaged, MOST_PANELS, (chosen and chosen.facet,))
    num_seeds = done.dropna(subset=[value]).groupby(keys, dropna=False).seed.nunique().max()
    what = "mean over seeds; bars are its 95 % interval" if statistic == "mean" else "best of the seeds"
    seeds = f"{what}, of {num_seeds} seeds" if num_seeds > 1 else "one seed, so no interval"
    by = ", ".join(key for key in keys if key not in averaged)
    names = [joined(f"{what_is_drawn} by {by}: {seeds}", page.note) for page in pages]
    figures = [draw_sweep(page.rows, x, series, page.facet, value, statistic) for page in pages]
    return [(figure, page.note, name) for figure, page, name in zip(figures, pages, names, strict=True)]


def _draw_study(
    studied: dict[str, pd.DataFrame],
    seeds: pd.DataFrame,
    keys: list[str],
    chosen: StudyKeys,
    statistic: str,
    folder: Path,
) -> dict[str, str]:
    """Draw and write each chosen column by the keys, and the last against each other one; returns the captions."""
    captions, rank = {}, []
    keys, where = [key for key in keys if key not in ("run", "seed")], (chosen.where or "").replace(",", ", ")
    for value, rows in studied.items():
        column, axes, stem = value.rpartition(".")[2], _axes(chosen, keys, rows), value.replace(".", "_")
        write_table(rows[list(dict.fromkeys([*WHO, *keys, *axes, column]))], folder / f"{stem}.csv")
        rows = booleans_as_words(read_table(folder / f"{stem}.csv")).rename(columns={column: value})
        if value != _final_value(seeds[_is_done(seeds)]) and (keys or axes):
            pages = _pages_by_keys(rows, [*keys, *axes], chosen, statistic, value, column_in_words(value))
            noted = [(figure, joined(where, note)) for figure, note, _ in pages]
            for name, (_, _, caption) in zip(plots.save_pages(noted, folder / stem, KINDS), pages, strict=True):
                captions[name] = joined(caption, where)
    *others, last = [*studied] or [""]
    done = seeds[_is_done(seeds)]
    for other in others if keys else ():
        _, series, _ = figure_keys(done, keys, chosen)

        def note(rows: pd.DataFrame, other: str = other) -> str:
            found = rank_correlation(rows, other, last, keys)
            interval = f" ({found['low95']:.2f} to {found['high95']:.2f})" if found["num_seeds"] > 1 else ""
            return f"rank correlation {found['rank_correlation']:.2f}{interval}"

        parts = done.groupby(chosen.facet) if chosen.facet else [("", done)]
        found = [
            {"x": other, "y": last, "panel": panel} | rank_correlation(rows, other, last, keys) for panel, rows in parts
        ]
        rank += found
        figure = draw_scatter(done, other, last, keys, series, chosen.facet, note)
        name = f"{last}_by_{other}".replace(".", "_")
        plots.save_pages([(figure, where)], folder / name, KINDS)
        captions[name] = joined(
            f"{column_in_words(last)} against {column_in_words(other)}, a mark for each configuration, as means over "
            f"seeds; above, Spearman's rank correlation over {found[0]['num_configurations']} configurations, "
            f"as the mean over {found[0]['num_seeds']} seeds with its 95 % interval; numbers in correlations.csv",
            where,
        )
    if rank:
        write_table(pd.DataFrame(rank), folder / "correlations.csv")
    return captions


def _without_gaps(seeds: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Fill keys that some runs lack with the word `none`, so that these runs have a panel, too."""
    gaps = [key for key in keys if seeds[key].isna().any()]
    return seeds.assign(**{key: seeds[key].map(plots.tick, na_action="ignore").fillna("none") for key in gaps})


def _draw_analyses(
    tables: dict[str, pd.DataFrame],
    keys: list[str],
    chosen: FigureKeys | None,
    figure_published: str | None,
    folder: Path,
) -> dict[str, str]:
    """Write the figures of the analyses, each line for one configuration; returns their captions by file name."""
    captions = {}
    picked = (chosen.x, chosen.series, chosen.facet) if chosen else (None, None, None)
    for name, table in tables.items():
        if name in ANALYSES and (analysis := ANALYSES[name]).figure is not None:
            how = (analysis.lines, analysis.drawn_apart, analysis.most_panels)
            pages = pages_of_analysis(table, keys, *picked, *how)
            files = draw({name: pages}, folder, figure_published, KINDS)
            for figure, page in zip(files, pages, strict=True):
                captions[figure] = _caption(name, analysis.figure, page)
    return captions


def _caption(name: str, figure: Callable[..., plots.Figure], page: plots.Page) -> str:
    what = plots.caption_of(name, figure, page.rows.seed.nunique())
    return f"{joined(name, page.note)}. {what} Drawn from {name}.csv"


def _draw_observed(
    tables: dict[str, pd.DataFrame], keys: list[str], chosen: FigureKeys | None, folder: Path
) -> dict[str, str]:
    """Write the figures of trainings that were watched by rankbench.observe; returns their captions by file name.

    Their configs do not say all that may differ between them, so runs of the same keys and seed are panels, too.
    """
    captions = {}
    picked = (chosen.x, chosen.series, chosen.facet) if chosen else (None, None, None)
    for name, table in tables.items():
        runs_alike = table.groupby([*keys, "seed"]).run.nunique().max()
        pages = pages_of_analysis(
            table, [*keys, "run"] if runs_alike > 1 else keys, *picked, None, (), MOST_PANELS_OVER_STEPS
        )
        figures = ((FIGURES[name](page.rows, page.facet), page.note) for page in pages)
        for figure, page in zip(plots.save_pages(figures, folder / name, KINDS), pages, strict=True):
            captions[figure] = _caption(name, FIGURES[name], page)
    return captions


def figure_keys(
    seeds: pd.DataFrame, keys: list[str], chosen: FigureKeys | None = None
) -> tuple[str, str | None, str | None]:
    """The keys for x, series and facet of the figure: as chosen, else by the number of values of the keys."""
    picked = chosen.places if chosen else {"x": None, "series": None, "facet": None}
    free = [key for key in keys if key not in picked.values()]
    numbers = [key for key in free if pd.api.types.is_numeric_dtype(seeds[key])]
    x = picked["x"] or max(numbers, key=lambda key: seeds[key].nunique(), default=None) or (free or keys)[0]
    free = [key for key in free if key != x]
    series = picked["series"] or (free.pop(0) if free else None)
    return x, series, picked["facet"] or (free.pop(0) if free else None)


def _tables_at(job: Path, names: Iterable[str]) -> dict[str, pd.DataFrame]:
    return {name: Run(job).table(name) for name in names if (job / f"{name}.csv").exists()}


def _read(jobs: list[Path]) -> tuple[dict[Path, dict[str, pd.DataFrame]], dict[Path, str]]:
    """The tables of the analyses of each run, without those that changed since they were written; and, of runs with a
    file that cannot be read, which one and why."""
    read, damage = {}, {}
    for job in jobs:
        try:
            _config_at(job / "config.yaml")
            changed = Run(job).changed_files()
            read[job] = _tables_at(job, [name for name in (*ANALYSES, *OBSERVED) if f"{name}.csv" not in changed])
        except ConfigError as error:
            damage[job] = str(error)
    return read, damage


def _joined(
    name: str,
    tables: dict[Path, dict[str, pd.DataFrame]],
    names: dict[Path, str],
    values: dict[Path, dict[str, str]],
) -> pd.DataFrame | None:
    """Concatenate the runs' tables of this name, with their values of the varied keys; None if no run has it."""
    parts = [held[name].assign(run=names[job], **values[job]) for job, held in tables.items() if name in held]
    return pd.concat(parts, ignore_index=True) if parts else None


def _names(jobs: list[Path]) -> dict[Path, str]:
    """Names of the runs in tables: the folder's name, after the sweep's name if two folders have the same."""
    counts = Counter(Run(job).name for job in jobs)
    return {
        job: Run(job).name if counts[Run(job).name] == 1 else f"{job.resolve().parent.name}/{Run(job).name}"
        for job in jobs
    }


def status_of(job: Path) -> str:
    """Status of the run. `interrupted`: the summary says running, but no process is training there. `missing`: a job of
    a sweep that never began. `damaged`: its config or its summary cannot be read."""
    if not job.exists():
        return "missing"
    try:
        status = Run(job).status
        _config_at(job / "config.yaml")
    except ConfigError:
        return "damaged"
    if status != "running":
        return status
    try:
        with regular(job / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # there is no lock, so no process is training
        pass
    return "interrupted"


def _config(job: Path) -> dict[str, Any]:
    """The run's config as written; empty if there is none, or one that cannot be read: `status_of` says so. An analysis
    of a trained run takes its network, task and training from that run, if the run still exists."""
    try:
        config = _config_at(job / "config.yaml")
        if config.get("run") is None or Run(job).status != "finished":
            return config
        trained = _config_at(Path(Run(job).summary().get("run") or config["run"]) / "config.yaml")
    except ConfigError:
        return {}
    return config | {key: trained[key] for key in ("model", "task", "optimizer", "trainer") if key in trained}


def _config_at(path: Path) -> dict[str, Any]:
    """Keys of a config, empty if there is none; ConfigError for a file that is not a config."""
    if not path.exists():
        return {}
    config = read_yaml(path)
    for key, kind in {"claims": list, "published": str, "run": str}.items():
        if not isinstance(config.get(key), kind | None):
            raise ConfigError(f"{path}: not a run's config: {key}={as_typed(config[key])}")
    if not all(isinstance(claim, str) for claim in config.get("claims") or ()):
        raise ConfigError(f"{path}: not a run's config: claims={as_typed(config['claims'])}")
    return config


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and their values as a user would write them."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = as_typed(value)
    return flat


def _values(job: Path, keys: list[str]) -> dict[str, str]:
    """Values of the keys in this job's config, as text; for a group, the name of the choice. A job that has not begun
    only has its own overrides."""
    flat = _flat(_config(job)) or _own_words(job)
    return {key: flat.get(key, flat.get(f"{key}.name", "")) for key in keys}


def _own_words(job: Path) -> dict[str, str]:
    overrides = [listed.overrides for listed in Sweep(job.parent).jobs() if listed.folder == job.name]
    values = dict(word.lstrip("+").split("=", 1) for words in overrides for word in words if "=" in word)
    return {key: text.lower() if text in ("True", "False") else text for key, text in values.items()}


def _final_numbers(
    names: dict[Path, str], statuses: dict[Path, str], values: dict[Path, dict[str, str]]
) -> pd.DataFrame:
    rows = [row for job, name in names.items() for row in _summary_rows(job, name, statuses[job], values[job])]
    return pd.DataFrame(rows)


def _summary_rows(job: Path, name: str, status: str, values: dict[str, str]) -> list[dict]:
    config = _flat(_config(job))
    who = {"run": name, "task": config.get("task.name", ""), "model": config.get("model.name", "")}
    seeds = [] if status == "damaged" else Run(job).summary().get("seeds")
    seeds = seeds or [{"seed": config.get("seed", ""), "status": status}]
    return [{**who, "seed": numbers.get("seed"), **values, "job_status": status, **numbers} for numbers in seeds]
