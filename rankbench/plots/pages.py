"""Layout of a sweep's figures: which keys are lines, which are panels, and where a new page begins.

Two configurations never share a line, with one exception: if the user names both series and facet, a line is the mean
over the values of the remaining keys, and the figure says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from rankbench.plots.figure import in_words
from rankbench.plots.names import settings_of
from rankbench.plots.style import DASHES, colours

MOST_PANELS = 24  # of a figure in one file
OWN_LINES = "network"  # facet of panels that replace a figure's own lines


@dataclass(frozen=True)
class Page:
    """Rows of one figure. facet: the column whose values are its panels; note: the figure's note on all rows."""

    rows: pd.DataFrame
    facet: str | None
    note: str


def pages_of_final_numbers(
    table: pd.DataFrame,
    panels: list[str],
    averaged: list[str],
    most_panels: int,
    kept: tuple[str | None, ...] = (),
) -> list[Page]:
    """Pages of the table with a panel for each combination of the keys in `panels`.

    averaged: keys for the note. kept: keys that the user chose, whose values share a page if possible.
    """
    note = f"averaged over {', '.join(averaged)}" if averaged else ""
    return [replace(page, note=joined(page.note, note)) for page in _split(table, panels, most_panels, kept)]


def pages_of_analysis(
    table: pd.DataFrame,
    keys: list[str],
    x: str | None,
    series: str | None,
    facet: str | None,
    lines: str | None,
    drawn_apart: tuple[str, ...],
    most_panels: int,
) -> list[Page]:
    """Pages of an analysis' table from runs that differ in the keys.

    x, series, facet: the keys that the user chose. If both series and facet are chosen, the figure averages over the
    keys that are none of the three. The figure has its own x axis, so the values of the key x are panels.
    lines: the column whose values are the figure's lines. A series joins these lines while there are enough colours,
    and replaces them otherwise; without such a column the series' values are panels.
    drawn_apart: for a figure without a facet, the columns that distinguish its runs. Configurations that it would mix
    get their own lines or pages.
    """
    keys = [key for key in keys if table[key].nunique() > 1]
    averaged = [key for key in keys if key not in (x, series, facet)] if series and facet else []
    panels = [key for key in keys if key not in averaged and key not in (series, facet)]
    panels = [*dict.fromkeys(key for key in (facet, series) if key in keys), *panels]
    if drawn_apart:
        of_run = table.groupby("run")[[*drawn_apart, *panels]].max()
        panels = [key for key in panels if of_run.groupby(list(drawn_apart), dropna=False)[key].nunique().max() > 1]
        most_panels = 1
        if lines and panels and table.groupby([lines, *panels], dropna=False).ngroups <= len(colours()):
            table, panels = table.assign(**{lines: _line_names(table, lines, panels)}), []
    elif lines:
        series = series if series in panels else None if series else _series_of_choice(table, lines, panels, facet)
        if series and table[series].nunique() <= len(colours()) * len(DASHES):  # as many as readers can tell apart
            panels.remove(series)
            if table[lines].nunique() > max(1, len(colours()) // table[series].nunique()):  # too many for one panel
                panels.append(OWN_LINES)
                names = table[lines].map(in_words).str.replace(" ", "\N{NO-BREAK SPACE}")  # titles do not break them
                table = table.assign(**{OWN_LINES: names, lines: ""})
            table = table.assign(**{lines: _line_names(table, lines, [series])})
    return pages_of_final_numbers(table, panels, averaged, most_panels, (series, facet))


def _series_of_choice(table: pd.DataFrame, lines: str, panels: list[str], facet: str | None) -> str | None:
    """Choose the key whose values replace a figure's only line: numbers before words, then the key with most values. A
    key with more values than there are colours does not qualify."""
    fit = [key for key in panels if key != facet and table[key].nunique() <= len(colours())]
    if table[lines].nunique() > 1 or not fit:
        return None
    return max(fit, key=lambda key: (pd.to_numeric(table[key], errors="coerce").notna().all(), table[key].nunique()))


def _line_names(table: pd.DataFrame, lines: str, keys: list[str]) -> pd.Series:
    """Name of each row's line when the keys join the column `lines`: `no_skip, model.layers=2`. If that column has only
    one value, the name is `model.layers=2`."""
    settings = settings_of(table, keys)
    return table[lines].str.cat(settings, sep=", ") if table[lines].nunique() > 1 else settings


def _split(table: pd.DataFrame, panels: list[str], most_panels: int, kept: tuple[str | None, ...]) -> Iterator[Page]:
    """Split the table into pages: one page if it has few panels, else one for each value of some key, and so on. A
    key with another value in each panel gives pages of `most_panels` values. kept: keys that share a page if possible.
    """
    if not panels:
        yield Page(table, None, "")
        return
    combinations = table[panels].drop_duplicates()
    if len(panels) > 1:  # the first key's values stay together
        combinations = combinations.sort_values(panels, key=lambda keys: pd.factorize(keys, use_na_sentinel=False)[0])
    if len(combinations) <= most_panels and most_panels > 1:
        yield Page(_with_facet(table, panels, combinations), panels[0], "")
    elif most_panels == 1 or not (unique := [key for key in panels if combinations[key].is_unique]):
        key = _page_key(combinations, [key for key in panels if key not in kept] or panels, most_panels)
        others = [other for other in panels if other != key]
        for value in dict.fromkeys(combinations[key]):
            for page in _split(table[table[key] == value], others, most_panels, kept):
                yield replace(page, note=joined(f"{key}={value}", page.note))
    else:
        values = list(combinations[unique[-1]])
        for begin in range(0, len(values), most_panels):
            values_of_page = values[begin : begin + most_panels]
            rows = _with_facet(table[table[unique[-1]].isin(values_of_page)], panels, combinations)
            yield Page(rows, panels[0], f"{unique[-1]}={values_of_page[0]} to {values_of_page[-1]}")


def _page_key(combinations: pd.DataFrame, keys: list[str], most_panels: int) -> str:
    """The key that gives the fewest pages that are small enough; if there is none, the key with most values."""
    enough = [key for key in keys if combinations.groupby(key).size().max() <= most_panels]
    num_values = combinations.nunique()
    return min(enough, key=num_values.get) if enough else max(keys, key=num_values.get)


def one_facet(table: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Join the values of all keys in the column of the first, so that each panel has one configuration.

    The column model.heads then holds `2, model.layers=6`.
    """
    if len(keys) < 2:
        return table
    return table.assign(**{keys[0]: table[keys[0]].astype(str) + ", " + settings_of(table, keys[1:])})


def _with_facet(table: pd.DataFrame, panels: list[str], combinations: pd.DataFrame) -> pd.DataFrame:
    """Give the table one facet for all keys of the panels, with its rows in the order of the combinations."""
    if len(panels) == 1:
        return table
    rows, order = (pd.MultiIndex.from_frame(part) for part in (table[panels], combinations))
    return one_facet(table.iloc[np.argsort(order.get_indexer(rows), kind="stable")], panels)


def joined(*parts: str) -> str:
    """Join the non-empty parts with semicolons."""
    return "; ".join(part for part in parts if part)
