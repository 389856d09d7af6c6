"""The figures of a sweep: numbers of its runs against the keys that varied, and against each other; and differences
between its configurations and their baseline."""

from collections.abc import Iterator
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import empty_figure, height_of_panels, styled, title
from rankbench.plots.marks import FEW_SEEDS, is_wide, spans_orders, spread, tick, ticks, with_legend
from rankbench.plots.names import in_a_paper, key_in_words, settings_of
from rankbench.plots.style import GREY, colour_of, dashes_of, marker_of, panel_size
from rankbench.runs.intervals import LEVEL
from rankbench.runs.tables import booleans_as_words, mean_and_spread, over_seeds, scale_of

MOST_NAMED = 12  # configurations that each have a colour and a name in a scatter plot
# Inches, in the figure of differences: a configuration's row and each further line of its name, the title and the axis
# of a panel, and the legend
ROW, LINE, AROUND, LEGEND_HEIGHT = 0.21, 0.13, 0.75, 0.35
MOST_LETTERS = 30  # in a line of a configuration's name; and of a word on the x axis, which would take all of the room


@styled
def draw_sweep(
    table: pd.DataFrame,
    x: str,
    series: str | None = None,
    facet: str | None = None,
    value: str = "test_accuracy",
    statistic: str = "mean",
) -> Figure:
    """A number of each run against a varied key: the mean over seeds, with bars for its 95 % interval; up to ten seeds
    are points.

    With statistic="best", the number of the best seed (largest accuracy or smallest loss). Test accuracies are shown
    with those of constant answers, if the table has them. A line for each value of `series`, a panel for each value of
    `facet`. Other keys are averaged over within each seed. Words, including true and false, are in the order of the
    rows; on the x axis they are spaced evenly, and no line joins them.
    """
    table = booleans_as_words(table)
    figure, grid, facets = _panels(table, facet)
    lines = _in_order(table[series]) if series else [""]
    scale = "positive" if is_wide(table[value]) and scale_of(value) != "share" else scale_of(value)
    shown = [table[value]]
    words = None if pd.api.types.is_numeric_dtype(table[x]) else _in_order(table[x])
    everywhere = pd.Series(range(len(words))) if words else table[x]
    steps = np.diff(np.unique(everywhere))
    is_even = len(steps) > 1 and np.allclose(steps, steps[0])  # as numbers of layers often are
    is_log = not words and spans_orders(everywhere) and not is_even
    for axes, (label, rows_of_panel) in zip(grid.flat, facets, strict=False):
        for number, line in enumerate(lines):
            rows = rows_of_panel[rows_of_panel[series] == line] if series else rows_of_panel
            summary = over_seeds(rows, [x], value, scale)
            if summary.empty:
                continue
            x_values = _aside(
                summary[x].map(words.index) if words else summary[x], everywhere, number, len(lines), is_log
            )
            style: dict[str, Any] = {"color": colour_of(number), "marker": marker_of(number)}
            style |= {"linestyle": "none" if words else dashes_of(number), "capsize": 2, "elinewidth": 0.8}
            name = f"{series}={tick(line)}" if series else ""
            if statistic == "best":
                best = summary.largest if value.endswith("accuracy") else summary.smallest
                axes.errorbar(x_values, best, label=name or "best seed", **style)
                continue
            num_seeds, ends = summary.num_seeds.max(), [summary.low95, summary.high95]
            shown += ends
            name = name or ("mean over seeds, 95 % CI" if num_seeds > 1 else "one seed")
            axes.errorbar(x_values, summary["mean"], [abs(end - summary["mean"]) for end in ends], label=name, **style)
            if num_seeds <= FEW_SEEDS:
                of_seeds = mean_and_spread(rows.dropna(subset=[value]), [x], value)
                spread(axes, x_values, of_seeds, style["color"])
        if value == "test_accuracy":
            _baselines(axes, rows_of_panel, x, words, series, lines)
        if facet:
            axes.set_title(title(f"{facet}={tick(label)}"))
        _x_axis(axes, table[x], words, is_log)
        axes.tick_params(labelbottom=True)
    if scale == "positive" and is_wide(pd.concat(shown)):
        grid[0, 0].set_yscale("log")
    for row in grid:
        row[0].set_ylabel(column_in_words(value) + (", best seed" if statistic == "best" else ""))
    return with_legend(figure, grid)


@styled
def draw_scatter(
    table: pd.DataFrame,
    x: str,
    y: str,
    keys: list[str],
    correlations: dict[Any, list[dict[str, Any]]],
    series: str | None = None,
    facet: str | None = None,
) -> Figure:
    """One column of the runs against another: a mark for each configuration, as means over seeds; up to ten seeds are
    points, and all of them where correlations are over seeds. keys: the columns that distinguish configurations, which
    have a colour and a name each if there are few, else a colour for each value of `series`. correlations: by panel,
    for its title."""
    table = booleans_as_words(table.dropna(subset=[x, y]))
    others = [key for key in keys if key != facet and table[key].nunique(dropna=False) > 1]
    if others and table.groupby(others, dropna=False).ngroups <= MOST_NAMED:
        table = table.assign(configuration=settings_of(table[others].map(tick), others))
        series, name = "configuration", ""
    else:
        name = f"{series}="
    # not shared: panels whose points lie far apart would each use a corner of a common axis
    figure, grid, facets = _panels(table, facet, share_x=False)
    for axes, (label, rows_of_panel) in zip(grid.flat, facets, strict=False):
        are_over_seeds = any(numbers["over"] == "seeds" for numbers in correlations[label])
        for number, line in enumerate(_in_order(table[series]) if series else [""]):
            rows = rows_of_panel[rows_of_panel[series] == line] if series else rows_of_panel
            means = rows.groupby(keys, dropna=False)[[x, y]].mean()
            style = {"color": colour_of(number), "marker": marker_of(number)}
            label_of_mark = f"{name}{tick(line)}" if series else "mean over seeds"
            axes.plot(means[x], means[y], linestyle="none", label=label_of_mark, **style)
            num_seeds = rows.groupby(keys, dropna=False).seed.nunique().max()
            if num_seeds > 1 and (num_seeds <= FEW_SEEDS or are_over_seeds):
                axes.scatter(rows[x], rows[y], s=7, color=style["color"], alpha=0.45, linewidths=0, zorder=1.5)
        heading = [title(f"{facet}={tick(label)}")] if facet else []
        axes.set_title("\n".join([*heading, *_in_words(correlations[label])]))
        axes.set_xlabel(column_in_words(x))
        axes.tick_params(labelbottom=True)
        if is_wide(table[x]):
            axes.set_xscale("log")
    if is_wide(table[y]):
        grid[0, 0].set_yscale("log")
    for row in grid:
        row[0].set_ylabel(column_in_words(y))
    return with_legend(figure, grid)


@styled
def draw_differences(table: pd.DataFrame) -> Figure:
    """Differences from the baseline with their 95 % intervals: a panel for each column of numbers, a row for each
    configuration. Marks are filled where p is below 0.05 after Holm's method."""
    keys = list(table.columns[: table.columns.get_loc("baseline")])
    table = table.assign(name=settings_of(table, keys).map(in_a_paper).map(lambda name: fill(name, MOST_LETTERS)))
    names, columns = list(dict.fromkeys(table.name)), list(dict.fromkeys(table.column))
    row = ROW + LINE * max(name.count("\n") for name in names)
    figure, grid = _grid_of(len(columns), row * len(names) + AROUND, LEGEND_HEIGHT, share_x=False)
    for axes, column in zip(grid.flat, columns, strict=False):
        rows = table[table.column == column]
        is_shown = rows.p_holm < 2 * LEVEL
        for part, face, label in (
            (rows[is_shown], colour_of(0), "p < 0.05 after Holm"),
            (rows[~is_shown], "white", "p of 0.05 or more, or no interval"),
        ):
            if len(part):
                ends = np.stack([part.difference - part.low95, part.high95 - part.difference])
                style: dict[str, Any] = {"fmt": "o", "color": colour_of(0), "markerfacecolor": face}
                style |= {"capsize": 2, "elinewidth": 0.8, "label": label}
                axes.errorbar(part.difference, part.name.map(names.index), xerr=ends, **style)
        axes.axvline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.set_title(title(column_in_words(column)))
        axes.set_xlabel("difference from the baseline")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names)
    return with_legend(figure, grid)


def _in_words(correlations: list[dict[str, Any]]) -> Iterator[str]:
    """The rank correlations of a panel with their intervals, as lines of its title."""
    for row in correlations:
        name = f"{in_a_paper(row['configuration'])}: " if len(correlations) > 1 else ""
        plural = "" if row["num_seeds"] == 1 else "s"
        over = f" over {row['num_seeds']} seed{plural}" if row["over"] == "seeds" else ""
        if np.isnan(row["rank_correlation"]):
            yield f"{name}no rank correlation{over}: {'too few or ' if over else ''}equal values"
        else:
            interval = "" if np.isnan(row["low95"]) else f" ({row['low95']:.2f} to {row['high95']:.2f})"
            yield f"{name}rank correlation{over} {row['rank_correlation']:.2f}{interval}"


BASELINES = {"majority_accuracy": "commonest class", "position_majority_accuracy": "commonest class of the position"}


def _baselines(
    axes: Axes, rows: pd.DataFrame, x: str, words: list | None, series: str | None, lines: list[Any]
) -> None:
    """Draw the accuracies of constant answers: in grey, or in the colours of lines for which they differ. Two that are
    the same up to a hundredth are drawn once."""
    known = [name for name in BASELINES if name in rows and rows[name].notna().any()]
    if len(known) == 2 and (rows[known[0]] - rows[known[1]]).abs().max() < 0.01:
        known = known[:1]
    for name in known:
        differs = series is not None and np.ptp(rows.groupby(series)[name].mean()) > 0.01
        for number, line in enumerate(lines if differs else [None]):
            means = rows[rows[series] == line if differs else slice(None)].dropna(subset=[name]).groupby(x)[name].mean()
            style: dict[str, Any] = {"color": colour_of(number) if differs else GREY, "linewidth": 1, "zorder": 1}
            style |= {"linestyle": "--" if name == "majority_accuracy" else ":"}
            style |= {"label": BASELINES[name] if number == 0 else None}
            if words:
                at = means.index.map(words.index)
                axes.hlines(means, at - 0.4, at + 0.4, **style)
            elif len(means) > 1:
                axes.plot(means.index, means, **style)
            else:
                axes.axhline(means.iloc[0], **style)


def column_in_words(name: str) -> str:
    """A column's name for an axis: `effective rank (residual)` of residual.effective_rank."""
    table, _, column = name.rpartition(".")
    words = {"test_accuracy": "final test accuracy"}.get(column, column.replace("_", " "))
    return f"{words} ({table})" if table else words


def _x_axis(axes: Axes, values: pd.Series, words: list | None, is_log: bool) -> None:
    """Label the axis of a varied key, whose words are spaced evenly."""
    axes.set_xlabel(key_in_words(values.name))
    if not words:
        ticks(axes, values, is_log)
        return
    names = [in_a_paper(f"{values.name}={word}").removeprefix(f"{values.name}=") for word in words]
    names = [name.removeprefix(f"{key_in_words(values.name)} ") for name in names]  # it is below them
    half = MOST_LETTERS // 2
    names = [name if len(name) <= MOST_LETTERS else f"{name[:half]}...{name[-half:]}" for name in names]
    slanted: dict[str, Any] = {}
    if max(map(len, names)) > 8:
        slanted = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(words)), names, **slanted)
    axes.set_xlim(-0.5, len(words) - 0.5)


def _panels(table: pd.DataFrame, facet: str | None, share_x: bool = True) -> tuple[Figure, np.ndarray, list]:
    """An empty figure with a panel for each value of the facet; and (value, rows) of each."""
    is_ordered = facet is not None and pd.api.types.is_numeric_dtype(table[facet])
    facets = list(table.groupby(facet, sort=is_ordered)) if facet else [("", table)]
    return *_grid_of(len(facets), share_x=share_x), facets


def _grid_of(
    count: int, height: float | None = None, around: float = 0.5, share_x: bool = True
) -> tuple[Figure, np.ndarray]:
    """An empty figure with so many panels, up to three side by side. In inches, height: of a panel (None: that of the
    style); around: of what is above and below all panels."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = empty_figure(panel_size()[0] * columns, (height or height_of_panels(rows)) * rows + around)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x, sharey=True)
    for axes in list(grid.flat)[count:]:
        axes.set_visible(False)
    return figure, grid


def _in_order(values: pd.Series) -> list:
    """The different values: numbers from the smallest, words as they come."""
    different = list(values.unique())
    return sorted(different) if pd.api.types.is_numeric_dtype(values) else different


def _aside(x_values: pd.Series, everywhere: pd.Series, number: int, count: int, is_log: bool) -> pd.Series:
    """Shift the x values of a series a little, so that equal values do not hide each other."""
    low, high = everywhere.min(), everywhere.max()
    shift = 0.012 * (number - (count - 1) / 2)
    if is_log:
        return x_values * (high / low) ** shift
    return x_values + shift * ((high - low) or 1)
