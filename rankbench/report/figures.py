"""The figures of a report with their captions: final numbers, chosen columns, analyses, and watched trainings."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rankbench import plots
from rankbench.analyses import ANALYSES
from rankbench.analysing.runner import draw
from rankbench.config.keys import ConfigError, check_known
from rankbench.config.plugins import frames_of_user
from rankbench.config.schema import FigureKeys, StudyKeys
from rankbench.plots.pages import MOST_PANELS, joined, pages_of_analysis, pages_of_final_numbers
from rankbench.plots.sweep import column_in_words, draw_differences, draw_scatter, draw_sweep
from rankbench.plots.training import FIGURES
from rankbench.report.differences import BY_SEED
from rankbench.report.study import (
    axes_of,
    column_of,
    is_done,
    rank_correlations,
    rows_that_count,
    studied_columns,
    with_columns,
)
from rankbench.runs.run import OBSERVED, Run
from rankbench.runs.tables import RUN_COLUMNS, booleans_as_words, read_table, write_table

KINDS = (*plots.KINDS, ".svg")
MOST_ROWS = 30  # configurations in a figure of differences
OVER = {  # kinds of rank correlations, in words
    "configurations": "over the configurations, as mean over seeds with its 95 % interval",
    "seeds": "over the seeds of a configuration, with its 95 % interval",
}
MOST_PANELS_OVER_STEPS = 6  # in a figure of a watched training, which has a row of panels for each value


@dataclass(frozen=True)
class Drawing:
    """How figures are drawn: into which folder, by what the user chose, with the mean or the best of the seeds, as wide
    as one column of a page or two (single | double), beside which published figure's numbers."""

    folder: Path
    chosen: StudyKeys
    statistic: str = "mean"
    width: str | None = None
    published: str | None = None


def draw_final(seeds: pd.DataFrame, keys: list[str], how: Drawing) -> dict[str, str]:
    """Write the figure of the final numbers by the varied keys, if there is one; return its pages' captions."""
    return _saved(final_pages(seeds, keys, how.chosen, how.statistic), "sweep", how)


def _saved(pages: list[tuple[plots.Figure, str, str]], stem: str, how: Drawing, where: str = "") -> dict[str, str]:
    """Write the pages of a figure, each a figure with its note and caption; return the captions by file name. where:
    what the notes and captions say of the rows."""
    noted = ((plots.fit(figure, how.width), joined(where, note)) for figure, note, _ in pages)
    names = plots.save_pages(noted, how.folder / stem, KINDS)
    return {name: joined(caption, where) for name, (_, _, caption) in zip(names, pages, strict=True)}


def final_pages(
    seeds: pd.DataFrame, keys: list[str], chosen: FigureKeys, statistic: str = "mean"
) -> list[tuple[plots.Figure, str, str]]:
    """Pages of the figure of the final numbers by the varied keys: figure, note and caption of each.

    Keys that are neither x, series nor facet are panels, too; if the user chose both series and facet, the figure
    averages over them.
    """
    done = seeds[is_done(seeds)]
    value = final_value(done)
    if value is None or not keys:
        return []
    return _pages_by_keys(done, keys, chosen, statistic, value, f"Final {value.replace('_', ' ')}")


def final_value(done: pd.DataFrame) -> str | None:
    """The final number that a report draws, if there is one."""
    return next((name for name in ("test_accuracy", "test_loss") if name in done and done[name].notna().any()), None)


def _pages_by_keys(
    done: pd.DataFrame, keys: list[str], chosen: FigureKeys, statistic: str, value: str, what_is_drawn: str
) -> list[tuple[plots.Figure, str, str]]:
    x, series, facet = figure_keys(done, keys, chosen)
    # a key that report.where has fixed has one value
    rest = [key for key in keys if key not in (x, series, facet) and done[key].nunique(dropna=False) > 1]
    averaged = rest if chosen.series and chosen.facet else []
    panels = [key for key in (facet, *rest) if key and key not in averaged]
    pages = pages_of_final_numbers(_without_gaps(done, keys), panels, averaged, MOST_PANELS, (chosen.facet,))
    num_seeds = done.dropna(subset=[value]).groupby(keys, dropna=False).seed.nunique().max()
    what = "mean over seeds; bars are its 95 % interval" if statistic == "mean" else "best of the seeds"
    seeds = f"{what}, of {num_seeds} seeds" if num_seeds > 1 else "one seed, so no interval"
    by = ", ".join(key for key in keys if key not in averaged)
    names = [joined(f"{what_is_drawn} by {by}: {seeds}", page.note) for page in pages]
    figures = [draw_sweep(page.rows, x, series, page.facet, value, statistic) for page in pages]
    return [(figure, page.note, name) for figure, page, name in zip(figures, pages, names, strict=True)]


def draw_study(
    studied: dict[str, pd.DataFrame], runs: pd.DataFrame, keys: list[str], how: Drawing, own: str | None = None
) -> dict[str, str]:
    """Draw and write each chosen column by the keys, then the last column against each of the others. runs: a row for
    each run and seed, with these columns. own: the column that a report draws anyway. Returns the captions."""
    captions: dict[str, str] = {}
    correlations = []
    chosen, folder = how.chosen, how.folder
    wheres = {value: rows_that_count(chosen, rows) for value, rows in studied.items()}
    for value, rows in studied.items():
        column, axes, stem = column_of(rows, value), axes_of(chosen, keys, rows), value.replace(".", "_")
        write_table(rows[list(dict.fromkeys([*RUN_COLUMNS, *keys, *axes, column]))], folder / f"{stem}.csv")
        rows = booleans_as_words(read_table(folder / f"{stem}.csv")).rename(columns={column: value})
        if value != own and (keys or axes):
            pages = _pages_by_keys(rows, [*keys, *axes], chosen, how.statistic, value, column_in_words(value))
            captions |= _saved(pages, stem, how, wheres[value])
    keys = keys or ["task", "model"]
    *others, last = studied or [""]
    for other in others:
        rows = runs.dropna(subset=[other, last])
        if rows.empty:
            continue
        name, series = f"{last}_by_{other}".replace(".", "_"), figure_keys(rows, keys, chosen)[1]
        rows = _without_gaps(rows, keys)
        panels = rows.groupby(chosen.facet) if chosen.facet else [("", rows)]
        by_panel = {panel: rank_correlations(part, other, last, keys) for panel, part in panels}
        correlations += [{"x": other, "y": last, "panel": panel} | row for panel in by_panel for row in by_panel[panel]]
        figure = draw_scatter(rows, other, last, keys, by_panel, series, chosen.facet)
        kinds = [OVER[kind] for kind in OVER if any(row["over"] == kind for of in by_panel.values() for row in of)]
        caption = (
            f"{column_in_words(last)} against {column_in_words(other)}, a mark for each configuration, as means over "
            f"seeds; above, Spearman's rank correlation {' or, in other panels, '.join(kinds)} (correlations.csv)"
        )
        about = joined(*dict.fromkeys((wheres[other], wheres[last])))
        captions |= _saved([(figure, "", caption)], name, how, about)
    if correlations:
        write_table(pd.DataFrame(correlations), folder / "correlations.csv")
    return captions


def draw_differences_in_parts(table: pd.DataFrame, where: str, how: Drawing) -> dict[str, str]:
    """Write the figure of the differences from a baseline; return its pages' captions. where: the rows that count."""
    configurations = table.groupby(list(table.columns[: table.columns.get_loc("baseline")]), sort=False).ngroup()
    about = f"differences from {table.baseline.iloc[0].replace(',', ', ')}"
    pairs = "paired by seed" if set(table.pairing) == {BY_SEED} else "paired by seed where seeds are shared"
    caption = (
        f"{about}: means, {pairs}, with 95 % intervals (Student's t); filled marks have p below 0.05 after Holm's "
        "method over all of them (differences.csv)"
    )
    begins = range(0, int(configurations.max()) + 1, MOST_ROWS)
    parts = [table[configurations.between(begin, begin + MOST_ROWS - 1)] for begin in begins]
    return _saved([(draw_differences(part), about, caption) for part in parts], "differences", how, where)


def _without_gaps(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Fill keys that some runs lack with the word `none`, so that these runs have a line or a panel, too."""
    gaps = table[keys].columns[table[keys].isna().any()]
    return table.assign(**table[gaps].map(lambda value: "none" if pd.isna(value) else plots.tick(value)))


def draw_tables(tables: dict[str, pd.DataFrame], keys: list[str], how: Drawing) -> dict[str, str]:
    """Write the figures of the tables that have one: of analyses, with a line for each configuration, of learning
    curves, and of trainings that were watched by rankbench.observe. Returns their captions by file name.

    The configs of trainings that are not ours do not say everything that differs between them, so runs with the same
    keys and seed have a panel each.
    """
    captions = {}
    places = how.chosen.x, how.chosen.series, how.chosen.facet
    for name, gathered in tables.items():
        table = _without_gaps(gathered, keys)
        if name in ANALYSES and (figure := ANALYSES[name].figure) is not None:
            kind = ANALYSES[name]
            pages = pages_of_analysis(table, keys, *places, kind.lines, kind.drawn_apart, kind.most_panels)
            files = draw({name: pages}, how.folder, how.published, KINDS, how.width)
        elif name in FIGURES and (name != "metrics" or _has_losses(table)):
            figure = FIGURES[name]
            are_alike = table.groupby([*keys, "seed"]).run.nunique().max() > 1
            layout = ("split", (), MOST_PANELS) if name == "metrics" else (None, (), MOST_PANELS_OVER_STEPS)
            pages = pages_of_analysis(table, [*keys, "run"] if are_alike else keys, *places, *layout)
            drawn = ((plots.fit(figure(page.rows, page.facet), how.width), page.note) for page in pages)
            files = plots.save_pages(drawn, how.folder / name, KINDS)
        else:
            continue
        for file, page in zip(files, pages, strict=True):
            what = plots.caption_of(name, figure, page.rows.seed.nunique())
            captions[file] = f"{joined(name, page.note)}. {what} Drawn from {name}.csv"
    return captions


def _has_losses(metrics: pd.DataFrame) -> bool:
    """Whether a training's table has losses yet, and they are numbers, not words that somebody wrote into it."""
    known = {"step", "split", "loss"} <= set(metrics) and pd.api.types.is_numeric_dtype(metrics.loss)
    return known and bool(metrics.loss.notna().any())


def figure_keys(
    seeds: pd.DataFrame, keys: list[str], chosen: FigureKeys | None = None
) -> tuple[str, str | None, str | None]:
    """The keys for x, series and facet of the figure: as chosen, else by the number of values of the keys."""
    picked = (chosen or FigureKeys()).places
    free = [key for key in keys if key not in picked.values()]
    numbers = [key for key in free if pd.api.types.is_numeric_dtype(seeds[key])]
    x = picked["x"] or max(numbers, key=lambda key: seeds[key].nunique(), default=None) or (free or keys)[0]
    free = [key for key in free if key != x]
    series = picked["series"] or (free.pop(0) if free else None)
    return x, series, picked["facet"] or (free.pop(0) if free else None)


def drawable(path: Path, chosen: StudyKeys) -> tuple[str, pd.DataFrame, list[str], dict[str, pd.DataFrame]]:
    """The table in a CSV file of a run or a report: the analysis that made it, the table, the keys that vary in it, and
    the rows of its chosen columns. ConfigError if it has no figure, or not the chosen one."""
    if not path.is_file():
        raise ConfigError(f"table={path}: no such file; give a table of a run or a report, such as residual.csv")
    is_of_run = path.name == "metrics.csv" and (path.parent / "config.yaml").exists()
    table = Run(path.parent).metrics if is_of_run else booleans_as_words(read_table(path))
    if table.empty:
        raise ConfigError(f"table={path}: has no rows to draw")
    if missing := [name for name in RUN_COLUMNS if name not in table]:
        raise ConfigError(f"table={path}: not a table of runs, because it has no column {missing[0]}")
    own = [name for name in table if "." in name and name.partition(".")[0] not in (*ANALYSES, *FIGURES)]
    keys = [name for name in ("task", "model", *own) if table[name].nunique(dropna=False) > 1]
    studied = studied_columns(chosen, {}, table, keys)
    for place, key in chosen.places.items():
        if key is not None and not (studied or keys):
            raise ConfigError(f"report.{place}={key}: no key varies in {path}; give report.value=<column>, too")
        check_known(f"report.{place}", [] if key is None else [key], map(str, table if studied else keys))
    drawn = {"sweep", *FIGURES, *(name for name, analysis in ANALYSES.items() if analysis.figure is not None)}
    named = [path.stem] if path.stem in (*ANALYSES, *drawn) else _fitting(table)
    if not studied and (len(named) != 1 or named[0] not in drawn):
        numbers = table.select_dtypes("number").columns.difference(RUN_COLUMNS, sort=False)
        instead = (
            f"choose a column, as in report.value={numbers[-1]}"
            if len(numbers)
            else "it has no column of numbers either"
        )
        raise ConfigError(f"table={path}: has no figure of its own; {instead}")
    return named[0] if named else "", table, keys, studied


@contextmanager
def doubting(what: str) -> Iterator[None]:
    """Turn an error in drawing a table that the user gives into a ConfigError: it lacks a column, or has words among
    its numbers. what: the table, in words."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError) or frames_of_user(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{what}: cannot be drawn ({reason}); it needs every column that its analysis writes, each once, with "
            "numbers as numbers"
        ) from error


def redraw(path: Path, how: Drawing) -> list[str]:
    """Draw a table's figure as a report does, or its chosen columns; return lines for the reader."""
    name, table, keys, studied = drawable(path, how.chosen)
    with doubting(f"table={path}"):
        if studied:
            runs = table[list(dict.fromkeys([*RUN_COLUMNS, *keys]))].drop_duplicates()
            captions = draw_study(studied, with_columns(runs, studied, how.chosen, keys), keys, how)
        else:
            captions = draw_final(table, keys, how) if name == "sweep" else draw_tables({name: table}, keys, how)
    if not captions:
        raise ConfigError(f"table={path}: no key varies in it, and no number of a finished run is in it")
    return [f"{caption}.\n-> {how.folder / name}.png, .pdf and .svg" for name, caption in captions.items()]


def _fitting(table: pd.DataFrame) -> list[str]:
    return [name for name, kind in ANALYSES.items() if set(kind.recognised_by) <= set(table.columns)]


def analysis_of(table: pd.DataFrame) -> str:
    """Name of the analysis or training that made the table, from `attrs` or from columns that only its table has."""
    named = table.attrs.get("analysis")
    if named in (*ANALYSES, *FIGURES, *OBSERVED, "sweep"):
        return str(named)
    fitting = _fitting(table)
    if len(fitting) != 1:
        raise ConfigError(
            f"table: {'its columns fit several' if fitting else 'its columns are not those of an'} analysis; "
            f"name it with analysis=, one of {', '.join(fitting or ANALYSES)}"
        )
    return fitting[0]
