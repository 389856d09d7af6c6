"""What is drawn into a panel: lines with their spread, published marks, levels, axes, legends.

A line is the mean over seeds, in some figures the geometric one (rankbench.plots.captions). Up to ten seeds are drawn
one by one behind it; more seeds are drawn as a band, the 95 % interval of the mean. Every series has its own marker.
"""

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.names import in_a_paper, in_lines
from rankbench.plots.style import GREY, INK, LEGEND_LETTER, MARKERS, colour_of, dashes_of, marker_of, points_of
from rankbench.runs.intervals import ends95, half_width
from rankbench.runs.tables import mean_and_spread, scale_of

FLOOR, BELOW = "rounding error of a forward pass", "at or below its rounding error"
TRIANGLE: dict[str, Any] = {"marker": "v", "markerfacecolor": "white", "markeredgewidth": 0.8, "markersize": 5.5}
WIDEST, NARROWER = 1.6, 0.2  # widths of the first series, and how much less the next is, so that it hides none
WIDTHS = 6  # this many series have a width of their own; the next one has that of the first
CLOSEST = 0.08  # of the axis: ticks that are closer would print over each other
FEW_SEEDS = 10  # up to this number each seed is drawn, because they say more than an interval
APART = 0.04  # of a panel's diagonal: distance of marks on a line of more points than these
BAR = 5  # points: width of an interval at a single x
FEW_POINTS = 30  # along x; up to this number seeds are drawn as points, beyond it as thin lines
HANDLE = 0.5  # inches: a legend's handle with the space around it
LINE, LINES = 0.145 / 7, 3  # inches for each point: height of a legend's line; lines that fit into every figure


def line(axes: Axes, rows: pd.DataFrame, x: str, value: str, label: str, number: int, **means: Any) -> None:
    """Draw `mean_line` in the style of a series. number: index of the series in the panel."""
    width = WIDEST - NARROWER * (number % WIDTHS)  # an equal line that is drawn later lies on top of a wider one
    style: dict[str, Any] = {"label": label, "marker": marker_of(number), "linestyle": dashes_of(number)}
    style |= {"linewidth": width * rcParams["lines.linewidth"], "markersize": width * rcParams["lines.markersize"]}
    mean_line(axes, rows, x, value, colour_of(number), **style, **means)


def mean_line(
    axes: Axes,
    rows: pd.DataFrame,
    x: str,
    value: str,
    colour: Any,
    *,
    geometric: bool = False,
    floor: str = "",
    **style: Any,
) -> None:
    """Draw the mean of a value over the seeds along x, with the seeds. style: of the line.

    floor: the column that is above 0 where the value is at or below its rounding error; means of such rows alone are
    marked.
    """
    summary = mean_and_spread(rows, [x], value, geometric=geometric)
    below = below_in(summary[x], rows, floor)
    measured = summary["mean"].mask(below)
    axes.plot(summary[x], measured, color=colour, **{"markevery": marks_apart(summary[x]), **style})
    is_alone = measured.notna() & measured.shift(1).isna() & measured.shift(-1).isna()
    if is_alone.any() and not style.get("marker"):  # the line does not show what it joins to nothing
        axes.plot(summary[x][is_alone], measured[is_alone], linestyle="none", marker="o", color=colour)
    spread(axes, summary[x], summary, colour)
    below_rounding(axes, summary[x], summary["mean"], below, colour)


def marks_apart(x_values: Sized) -> float | None:
    """Distance in the panel's diagonals of marks that would lie upon each other at these x; None: all are drawn."""
    return APART if len(x_values) > FEW_POINTS else None


def spread(axes: Axes, x_values: pd.Series, summary: pd.DataFrame, colour: Any) -> None:
    """Draw the seeds behind a line of means at these x values: one by one if few, else the mean's 95 % interval."""
    num_seeds = summary.num_seeds.max()
    if num_seeds > FEW_SEEDS:
        edge = 0 if len(x_values) > 1 else BAR  # a band at one x has no width
        axes.fill_between(x_values, summary["low"], summary["high"], color=colour, alpha=0.2, linewidth=edge)
    elif num_seeds > 1:
        by_seed = pd.DataFrame(list(summary.of_seed), index=x_values.to_numpy())
        if len(by_seed) > FEW_POINTS:
            axes.plot(by_seed, color=colour, alpha=0.35, linewidth=0.5, zorder=1)
        else:
            points = by_seed.stack()
            x_of_seeds = points.index.get_level_values(0)
            axes.scatter(x_of_seeds, points, s=7, color=colour, alpha=0.45, linewidths=0, zorder=1.5)


def below_in(x_values: pd.Series, rows: pd.DataFrame, column: str) -> pd.Series:
    """Whether all of the rows at each of these values of x are at their floors; older tables may lack the column."""
    if column not in rows:
        return pd.Series(False, index=x_values.index)
    return ~x_values.isin(rows[x_values.name][~(rows[column] > 0)])


def below_rounding(axes: Axes, x_values: pd.Series, values: pd.Series, below: pd.Series, colour: Any) -> None:
    """Mark values drawn at their rounding error, which are not measurements: open triangles on a dotted line."""
    if below.any():
        reached = below | below.shift(1, fill_value=False) | below.shift(-1, fill_value=False)
        axes.plot(x_values, values.where(reached), linestyle=":", linewidth=0.8, color=colour, zorder=1.5)
        style = {"linestyle": "none", "color": colour, "zorder": 3, "markevery": marks_apart(x_values), **TRIANGLE}
        axes.plot(x_values[below], values[below], **style)
        axes.plot([], [], linestyle="none", color=INK, label=BELOW, **TRIANGLE)


def floor(axes: Axes, floors: pd.Series) -> None:
    """Draw the rounding error of a forward pass against its index, dotted, if the panel reaches down to it."""
    if len(floors) and axes.get_ylim()[0] < 100 * floors.max():
        axes.plot(floors.index, floors, color=GREY, linestyle=":", linewidth=1, label=FLOOR, zorder=1)


def level(axes: Axes, rows: pd.DataFrame, column: str, label: str, colour: str, dashes: str | tuple) -> None:
    """Draw a horizontal line at a measured baseline, with its spread; nothing if it was not measured."""
    if column not in rows or rows[column].isna().all():
        return
    per_seed = rows.groupby("seed")[column].mean().dropna()
    axes.axhline(per_seed.mean(), color=colour, linestyle=dashes, linewidth=1, label=label, zorder=1)
    if len(per_seed) > FEW_SEEDS:
        half = half_width(per_seed.std(), len(per_seed))
        axes.axhspan(*ends95(per_seed.mean(), half, scale_of(column)), color=colour, alpha=0.1, linewidth=0, zorder=0)
    elif len(per_seed) > 1:
        across = axes.get_yaxis_transform()
        look: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 0.5, "alpha": 0.35, "zorder": 0}
        axes.hlines(per_seed, xmin=0, xmax=1, transform=across, **look)


def published_marks(axes: Axes, published: pd.DataFrame | None, label: str, ours: dict[str, int] | None = None) -> None:
    """Mark the published numbers of this panel: open marks if they have an x, else a short line at the right.

    ours: index of our series by the published series' name; these are drawn as stars in our series' colour.
    """
    if published is None:
        return
    rows_of_panel = published[published["where"].isna() | (published["where"] == label)]
    for number, ((source, series), rows) in enumerate(rows_of_panel.groupby(["source", "series"], sort=False)):
        points = rows.dropna(subset="x")
        name = f"{series} ({source})"
        if len(points):
            marker, colour = MARKERS[-1 - number % len(MARKERS)], colour_of(-1 - number % 5)
            style: dict[str, Any] = {"marker": marker, "color": colour, "markersize": 6}
            if ours is not None and series in ours:
                style = {"marker": "*", "color": colour_of(ours[series]), "markersize": 8}
            axes.plot(points.x, points.value, linestyle="none", label=name, mfc="none", **style)
        else:
            axes.axhline(rows.value.iloc[0], xmin=0.94, color=colour_of(-1 - number % 5), linewidth=2.5, label=name)


def log_y(axes: Axes) -> None:
    """Make the y axis logarithmic once all is drawn. Over less than a power of ten it goes from one of 1, 2, 5 to
    another, so that small differences look small; over less than two its ticks are numbers like 0.5."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high >= 100 * low:
        return
    decade = 10.0 ** np.arange(np.floor(np.log10(low)) - 1, np.ceil(np.log10(high)) + 2)
    if high < 10 * low:
        ends, numbers = np.outer(decade, (1, 2, 5)), [1, 1.5, 2, 3, 5, 7]
        low, high = ends[ends <= low].max(), ends[ends >= high].min()
    else:
        numbers = [1, 2, 5]
    within = [value for value in np.outer(decade, numbers).ravel() if low <= value <= high]
    axes.set_yticks(within, [tick(value) for value in within])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low, high)


def whole_numbers(axes: Axes, label: str) -> None:
    """Give an x axis integer ticks, few where they have many digits, and its label on the outer panels only."""
    axes.set_xlabel(label)
    is_long = axes.get_xlim()[1] >= 1000
    axes.xaxis.set_major_locator(MaxNLocator(5 if is_long else "auto", integer=True, min_n_ticks=1))
    axes.label_outer()
    cell: Any = axes.get_subplotspec()
    same_scale: list[Any] = axes.get_shared_y_axes().get_siblings(axes)
    if not any(other.get_subplotspec().colspan.stop == cell.colspan.start for other in same_scale):
        # no panel at its left has its numbers
        axes.tick_params(labelleft=True)


def with_legend(figure: Figure, grid: np.ndarray) -> Figure:
    """The figure with a legend under the panels, each label once. It grows, so that the panels keep their height.

    A panel leaves its label of x to the lowest in its column if that has the same one, with numbers.
    """
    _label_lowest(grid)
    for axes, lowest in zip(grid[:-1].flat, [*grid[-1]] * len(grid), strict=False):
        if axes.get_xlabel() and not axes.xaxis.get_tick_params()["labelbottom"]:  # a label without its numbers
            if axes.get_xlabel() == lowest.get_xlabel():
                axes.set_xlabel("")
            else:
                axes.tick_params(labelbottom=True)
    place_legend(figure, grid.flat)
    return figure


def place_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Add the legend of these panels, in as many columns as the figure has room for."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles |= {label: handles.pop(label) for label in (BELOW, FLOOR) if label in handles}  # after the series
    # as many columns as fit with the longest label, its handle and the space between columns
    size = points_of("legend.fontsize")
    most_letters = int((figure.get_figwidth() - HANDLE) / LEGEND_LETTER / size)
    handles = {in_lines(in_a_paper(label), most_letters): handle for label, handle in handles.items()}
    lines_of_labels = [line for label in handles for line in label.split("\n")]
    room = figure.get_figwidth() / (HANDLE + LEGEND_LETTER * size * max(map(len, lines_of_labels), default=1))
    columns = max(1, min(len(handles), int(room), 2 if len(handles) > 4 else 4))
    lines = -(-len(lines_of_labels) // columns)
    figure.set_figheight(figure.get_figheight() + LINE * size * max(0, lines - LINES))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _label_lowest(grid: np.ndarray) -> None:
    """Give the panels above an empty cell the x labels and numbers that the row below would have."""
    lowest = {axes.get_subplotspec().colspan.start: axes for axes in grid.flat}
    for column, axes in lowest.items():
        below = grid[-1, column % grid.shape[1]]
        if axes.get_visible() and axes is not below and axes.get_subplotspec() != below.get_subplotspec():
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(below.get_xlabel())


def spans_orders(values: pd.Series) -> bool:
    """Whether the values need a logarithmic axis: positive, the largest at least eight times the smallest."""
    return bool(values.min() > 0 and values.max() >= 8 * values.min())


def is_wide(values: pd.Series) -> bool:
    """Whether measured values need a logarithmic axis: positive, the largest at least a hundred times the smallest."""
    return bool(values.min() > 0 and values.max() >= 100 * values.min())


def ticks(axes: Axes, values: pd.Series, is_log: bool | None = None) -> None:
    """Put ticks at the values if they are few and not too close. is_log: whether the axis is logarithmic; None: if they
    span orders."""
    distinct = sorted(values.unique())
    if spans_orders(values) if is_log is None else is_log:
        axes.set_xscale("log")
    gaps = np.diff(np.log(distinct) if axes.get_xscale() == "log" else distinct)
    if len(distinct) <= 6 and (len(gaps) == 0 or gaps.min() > CLOSEST * gaps.sum()):
        axes.set_xticks(distinct, [tick(value) for value in distinct])
        axes.set_xticks([], minor=True)


def tick(value: Any) -> str:
    """A value as text for an axis or a legend."""
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)
