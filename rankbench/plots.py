"""Tables to figures, fit for a paper: the one module that knows matplotlib. It never sees a model.

Every figure is drawn from its CSV alone. A line is the mean over seeds and its band one standard deviation over seeds
(of the logarithms where the axis is logarithmic). Colours are Okabe and Ito's, told apart by the colour-blind; every
series has a marker of its own.
"""

import functools
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
from rankbench.tables import last_of_layer, mean_and_spread

COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
MARKERS = ["o", "s", "^", "D", "v", "P"]
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
}


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the figure as PNG and PDF beside each other; returns the two paths."""
    written = []
    with matplotlib.rc_context(STYLE):
        for suffix in (".png", ".pdf"):
            target = path.with_suffix(suffix)
            with replacing(target) as part:
                # no date in the file: the same table gives the same bytes
                metadata = {"CreationDate": None} if suffix == ".pdf" else {"Software": None}
                figure.savefig(part, format=suffix[1:], metadata=metadata)
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
            axes.set_title(" · ".join(part for part in (f"{kind} weights", label) if part))
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
            axes.set_title(" · ".join(part for part in (f"{scheme} paths", label) if part))
            _layers(axes, "path length (heads used)")
        row[0].set_ylabel("accuracy (share of tokens)")
    _legend(figure, grid)
    return figure


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
