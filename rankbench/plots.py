"""Tables to figures, fit for a paper: the one module that knows matplotlib. It never sees a model.

Every figure is drawn from its CSV alone. A line is the mean over seeds and its band one standard deviation over seeds
(of the logarithms where the axis is logarithmic). Colours are Okabe and Ito's, told apart by the colour-blind; every
series has a marker of its own.
"""

import functools
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.files import replacing
from rankbench.tables import last_of_layer, mean_and_spread, over_seeds

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
DASHES = ["-", "--", ":", "-."]
MARKERS = ["o", "s", "^", "D", "v", "P"]
KINDS = (".png", ".pdf")  # of the files that a figure is saved in
INK, GREY = "#000000", "#777777"
DODGE = 0.06  # of a layer, from one series to the next
PANEL = (3.25, 2.6)  # inches: a panel is a column wide, so its 8 pt letters are 8 pt in print
STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 7,
    "lines.linewidth": 1.2,
    "lines.markersize": 4,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # letters stay letters
    "svg.hashsalt": "rankbench",  # the same figure, the same bytes
}


def save(figure: Figure, path: Path, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    """Write the figure as files of these kinds beside each other; returns their paths."""
    written = []
    with matplotlib.rc_context(STYLE):
        for suffix in kinds:
            target = path.with_suffix(suffix)
            with replacing(target) as part:
                # no date in the file: the same table gives the same bytes
                date = {".png": "Software", ".pdf": "CreationDate", ".svg": "Date"}[suffix]
                figure.savefig(part, format=suffix[1:], metadata={date: None})
            written.append(target)
    return written


def _styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Letters and lines of STYLE for whatever the function draws."""

    @functools.wraps(draw)
    def styled(*args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


@_styled
def residual(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Relative residual by layer, a line for each variant; a column for each kind of weights, a row for each facet."""
    last = last_of_layer(table)
    weights = list(dict.fromkeys(last.weights))
    variants = list(dict.fromkeys(last.variant))
    figure, grid, facets = _grid(last, facet, len(weights))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, kind in zip(row, weights, strict=True):
            for number, variant in enumerate(variants):
                mine = rows[(rows.weights == kind) & (rows.variant == variant)]
                summary = mean_and_spread(mine, ["layer"], "relative_residual", geometric=True)
                _line(axes, summary, "layer", variant.replace("_", " "), number)
            axes.set_yscale("log")
            axes.set_title(_title(f"{kind} weights", label))
            _layers(axes, "layer (0: embedding)")
            _floor(axes, rows)
        row[0].set_ylabel(r"relative residual $\|R\|_{1,\infty}/\|X\|_{1,\infty}$")
    _legend(figure, grid)
    return figure


@_styled
def paths(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Accuracy by path length: all paths and sampled subsets, the measured baselines, the published numbers.

    A column for each scheme, a row for each facet.
    """
    schemes = list(dict.fromkeys(table.scheme))
    sizes = sorted(table.subset_size.dropna().unique())
    figure, grid, facets = _grid(table, facet, len(schemes))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, scheme in zip(row, schemes, strict=True):
            mine = rows[rows.scheme == scheme]
            everything = mine[mine.selection == "all"]
            if len(everything):
                _line(axes, mean_and_spread(everything, ["path_length"], "accuracy"), "path_length", "all paths", 0)
            for number, size in enumerate(sizes, 1):
                sampled = mean_and_spread(mine[mine.subset_size == size], ["path_length"], "accuracy")
                _line(axes, sampled, "path_length", f"{size:.0f} sampled paths", number)
            _level(axes, rows, "whole_accuracy", "whole network", INK, "-")
            _level(axes, rows, "majority_accuracy", "commonest class", GREY, "--")
            _level(axes, rows, "position_majority_accuracy", "commonest class of the position", GREY, ":")
            if scheme == "recomputed":
                _published(axes, published, label)
            axes.set_ylim(-0.02, 1.05)
            axes.set_title(_title(f"{scheme} paths", label))
            _layers(axes, "path length (heads used)")
        row[0].set_ylabel("accuracy (share of tokens)")
    _legend(figure, grid)
    return figure


@_styled
def sweep(
    table: pd.DataFrame, x: str, series: str | None = None, facet: str | None = None, value: str = "test_accuracy"
) -> Figure:
    """A final number against a varied key: mean over seeds, bars the 95 % confidence interval (Student's t).

    A line for each value of `series`, a panel for each value of `facet`. Keys that are none of the three are averaged
    over within each seed. An x of words is spaced evenly.
    """
    facets = list(table.groupby(facet, sort=True)) if facet else [("", table)]
    lines = sorted(table[series].unique()) if series else [""]
    columns = min(len(facets), 3)
    rows = -(-len(facets) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    words = None if pd.api.types.is_numeric_dtype(table[x]) else sorted(table[x].unique())
    everywhere = pd.Series(range(len(words))) if words else table[x]
    for axes, (label, mine) in zip(grid.flat, facets, strict=False):
        for number, one in enumerate(lines):
            summary = over_seeds(mine[mine[series] == one] if series else mine, [x], value)
            if summary.empty:
                continue
            place = _aside(summary[x].map(words.index) if words else summary[x], everywhere, number, len(lines))
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            style |= {"linestyle": DASHES[number // len(COLOURS) % len(DASHES)], "capsize": 2, "elinewidth": 0.8}
            name = f"{series}={_tick(one)}" if series else "mean over seeds, 95 % CI"
            axes.errorbar(place, summary["mean"], summary.ci95, label=name, **style)
        if facet:
            axes.set_title(f"{facet}={_tick(label)}")
        axes.set_xlabel(x)
        if words:
            axes.set_xticks(range(len(words)), words, rotation=30 if max(map(len, words)) > 8 else 0)
        else:
            _ticks(axes, table[x])
        axes.tick_params(labelbottom=True)
    for axes in list(grid.flat)[len(facets) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel({"test_accuracy": "final test accuracy"}.get(value, value.replace("_", " ")))
    _legend(figure, grid)
    return figure


def _aside(place: pd.Series, everywhere: pd.Series, number: int, count: int) -> pd.Series:
    """The series' places a little beside one another, so that equal values do not hide each other."""
    low, high = everywhere.min(), everywhere.max()
    shift = 0.012 * (number - (count - 1) / 2)
    if _spans_orders(everywhere):
        return place * (high / low) ** shift
    return place + shift * ((high - low) or 1)


def _spans_orders(values: pd.Series) -> bool:
    return bool(values.min() > 0 and values.max() >= 8 * values.min())


def _ticks(axes: Axes, values: pd.Series) -> None:
    """Ticks at the values that were run, where they are few; a logarithmic axis where they span much."""
    found = sorted(values.unique())
    if _spans_orders(values):
        axes.set_xscale("log")
    if len(found) <= 6:
        axes.set_xticks(found, [_tick(one) for one in found])
        axes.set_xticks([], minor=True)


def _tick(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _grid(
    table: pd.DataFrame, facet: str | None, columns: int
) -> tuple[Figure, np.ndarray, list[tuple[str, pd.DataFrame]]]:
    """An empty figure with a row of axes for each value of the facet, and these values' rows under their labels."""
    facets = [("", table)]
    if facet is not None:
        facets = [(f"{facet}={value}", rows) for value, rows in table.groupby(facet, sort=False)]
    size = (PANEL[0] * columns, PANEL[1] * len(facets) + 0.7)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(facets), columns, squeeze=False, sharex=True, sharey=True)
    return figure, grid, facets


def _title(*parts: str) -> str:
    """The parts in one line, or in several where they are wider than a panel."""
    return textwrap.fill(" · ".join(part for part in parts if part), 48, break_long_words=False)


def _line(axes: Axes, summary: pd.DataFrame, x: str, label: str, number: int) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    place = summary[x] + DODGE * number  # side by side, so that equal values do not hide each other
    axes.plot(place, summary["mean"], color=colour, marker=marker, label=label)
    axes.fill_between(place, summary["low"], summary["high"], color=colour, alpha=0.2, linewidth=0)


def _level(axes: Axes, rows: pd.DataFrame, column: str, label: str, colour: str, dashes: str) -> None:
    per_seed = rows.groupby("seed")[column].mean()
    axes.axhline(per_seed.mean(), color=colour, linestyle=dashes, linewidth=1, label=label, zorder=1)
    if len(per_seed) > 1:
        spread = per_seed.std()
        axes.axhspan(per_seed.mean() - spread, per_seed.mean() + spread, color=colour, alpha=0.1, linewidth=0, zorder=0)


def _published(axes: Axes, published: pd.DataFrame | None, label: str) -> None:
    """Published numbers of this panel: open marks where they have an x, a short line at the right where not."""
    if published is None:
        return
    mine = published[published["where"].isna() | (published["where"] == label)]
    for number, ((source, series), rows) in enumerate(mine.groupby(["source", "series"], sort=False)):
        points = rows.dropna(subset="x")
        name = f"{series} ({source})"
        if len(points):
            style = {"marker": MARKERS[-1 - number % len(MARKERS)], "mfc": "none", "color": COLOURS[-1 - number % 3]}
            axes.plot(points.x, points.value, linestyle="none", label=name, markersize=6, **style)
        else:
            axes.axhline(rows.value.iloc[0], xmin=0.94, color=COLOURS[-1 - number % 3], linewidth=2.5, label=name)


def _floor(axes: Axes, rows: pd.DataFrame) -> None:
    epsilon = np.finfo(rows["dtype"].iloc[0]).eps
    if axes.get_ylim()[0] < epsilon * 100:
        axes.axhline(epsilon, color=GREY, linestyle=":", linewidth=1, label=f"rounding of {rows['dtype'].iloc[0]}")


def _layers(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.label_outer()


def _legend(figure: Figure, grid: np.ndarray) -> None:
    """One legend under the panels, with each label once."""
    found = {}
    for axes in grid.flat:
        found |= {
            label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True) if label not in found
        }
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2 if len(found) > 4 else len(found))
