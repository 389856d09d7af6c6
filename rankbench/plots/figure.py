"""Parts that all figures share: style, axes, lines with their spread, published marks, legend, and output files.

A line is the mean over seeds, in some figures the geometric one (rankbench.plots.captions). Up to ten seeds are drawn
one by one behind it; more seeds are drawn as a band, the 95 % interval of the mean. Every series has its own marker.
"""

import functools
import io
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from rankbench.plots.names import choice_in_words, in_a_paper
from rankbench.plots.readings import png_field, readings_of, with_spots
from rankbench.plots.style import (
    GREY,
    INK,
    LEGEND_LETTER,
    MARKERS,
    STYLE,
    colour_of,
    dashes_of,
    marker_of,
    panel_size,
    points_of,
)
from rankbench.runs.files import replacing
from rankbench.runs.intervals import half_width
from rankbench.runs.tables import mean_and_spread

KINDS = (".png", ".pdf")  # file types in which a figure is saved
FLOOR, BELOW = "rounding error of a forward pass", "at or below its rounding error"
TRIANGLE: dict[str, Any] = {"marker": "v", "markerfacecolor": "white", "markeredgewidth": 0.8, "markersize": 5.5}
WIDEST, NARROWER = 1.6, 0.2  # widths of the first series, and how much less the next is, so that it hides none
WIDTHS = 6  # this many series have a width of their own; the next one has that of the first
PAGE, LOWEST = 9.0, 1.6  # inches: height of a page, and the least height of a panel, even if the page is then too short
OVERHANG = 1.1  # of a panel's height: a longer label of y is broken into lines, as titles are that are wider than it
CLOSEST = 0.08  # of the axis: ticks that are closer would print over each other
FEW_SEEDS = 10  # up to this number each seed is drawn, because they say more than an interval
FEW_POINTS = 30  # along x; up to this number seeds are drawn as points, beyond it as thin lines
LINE, LINES = 0.145 / 7, 3  # inches for each point: height of a legend's line; lines that fit into every figure
MOST_ROWS, SIDE_BY_SIDE = 6, 4  # facets below each other; panels side by side where there are more facets


def save(figure: Figure, path: Path, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    """Write the figure as one file of each kind; returns their paths. PNG and SVG hold the readings of its marks."""
    written = []
    with matplotlib.rc_context(STYLE), _laid_out(figure):
        readings = readings_of(figure)
        for suffix in kinds:
            target = path.with_suffix(suffix)
            # no date in the file: the same table gives the same bytes
            kept: Any = {
                ".png": {"pil_kwargs": {"pnginfo": png_field(readings)}},
                ".pdf": {"metadata": {"CreationDate": None}},
                ".svg": {"metadata": {"Date": None}},
            }[suffix]
            image = io.BytesIO()  # on a full disk matplotlib's own errors would hide the disk's
            figure.savefig(image, format=suffix[1:], **kept)
            content = image.getvalue()
            with replacing(target) as part:
                part.write_bytes(with_spots(content, readings) if suffix == ".svg" else content)
            written.append(target)
    return written


@contextmanager
def _laid_out(figure: Figure) -> Iterator[None]:
    """Arrange the figure once for all of its files: matplotlib would do so for each file, and draw each twice."""
    engine, dpi = figure.get_layout_engine(), figure.dpi
    try:
        if engine is not None:
            if STYLE["savefig.dpi"] != "figure":
                figure.dpi = STYLE["savefig.dpi"]
            engine.execute(figure)
            figure.set_layout_engine(None)
        yield
    finally:
        figure.dpi = dpi
        figure.set_layout_engine(engine)


class Layout(ConstrainedLayoutEngine):
    """matplotlib's own layout, with labels of y and titles that are longer than their panels broken into lines: they
    would run into others, or out of the figure."""

    def execute(self, figure: Figure) -> None:
        """Arrange the figure; once more if texts had to be broken."""
        super().execute(figure)
        if _break_labels(figure):
            super().execute(figure)


def _break_labels(figure: Figure) -> bool:
    """Break the texts that are too long; returns whether there were any."""
    is_broken = False
    for axes in figure.axes:
        width, length = axes.get_window_extent().width, axes.title.get_window_extent().width
        if axes.get_title() and length > width:
            text = axes.get_title()
            axes.title.set_text(_filled(text, int(max(map(len, text.split("\n"))) * width / length)))
            is_broken = True
        label, height = axes.yaxis.label, axes.get_window_extent().height
        length = label.get_window_extent().height if label.get_text() else 0.0
        if length > OVERHANG * height and "\n" not in label.get_text():
            text = label.get_text()
            label.set_text(_filled(text, int(len(text) * height / length)))
            is_broken = True
    return is_broken


def _filled(text: str, letters: int) -> str:
    """Break a text, but none of its formulas, into lines of at most this many letters."""
    whole = re.sub(r"\$[^$]*\$", lambda formula: formula[0].replace(" ", "\0"), text)
    lines = (textwrap.fill(line, max(1, letters), break_long_words=False) for line in whole.split("\n"))
    return "\n".join(lines).replace("\0", " ")


def show_in_notebook() -> None:
    """Let a notebook show a Figure that is the last value of a cell, even if pyplot was never used there."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None and Figure not in (png := shell.display_formatter.formatters["image/png"]):
        png.for_type(Figure, _png)


def _png(figure: Figure) -> bytes:
    image = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(image, format="png", dpi="figure")
    return image.getvalue()


def save_pages(
    figures: Iterable[tuple[Figure, str]], path: Path, kinds: tuple[str, ...] = KINDS
) -> dict[str, list[Path]]:
    """Write one figure as <path>, several as <path>_1, <path>_2 ..., each with its note at the top. Removes the files
    of an earlier call with another number of figures. Returns the files by the figures' names."""
    figures = list(figures)
    names = [path.name] if len(figures) == 1 else [f"{path.name}_{number}" for number in range(1, len(figures) + 1)]
    for old in path.parent.glob(f"{path.name}*"):
        if re.fullmatch(rf"{re.escape(path.name)}(_\d+)?\.(png|pdf|svg)", old.name) and old.stem not in names:
            old.unlink()
    written = {}
    for name, (figure, note) in zip(names, figures, strict=True):
        if note:
            figure.suptitle(in_a_paper(note.replace("$", r"\$")), fontsize=STYLE["font.size"], wrap=True)
        written[name] = save(figure, path.with_name(name), kinds)
    return written


def styled(draw: Callable[..., Figure]) -> Callable[..., Figure]:
    """Decorate a drawing function to use STYLE, and to draw the words in its table as they are, not as formulas."""

    @functools.wraps(draw)
    def styled(table: pd.DataFrame, *args: Any, **kwargs: Any) -> Figure:
        with matplotlib.rc_context(STYLE):
            return draw(_without_formulas(table), *args, **kwargs)

    return styled


def _without_formulas(table: pd.DataFrame) -> pd.DataFrame:
    """Escape the dollar signs in a table's words: matplotlib reads a formula between two of them."""

    def escaped(value: Any) -> Any:
        return re.sub(r"(?<!\\)\$", r"\\$", value) if isinstance(value, str) else value

    words = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    return table.assign(**{name: table[name].map(escaped) for name in words})


def empty_figure(width: float, height: float) -> Figure:
    """A figure of this size in inches, with a canvas on which texts can be measured."""
    figure = Figure(figsize=(width, height), layout=Layout())
    FigureCanvasAgg(figure)
    return figure


def facets_of(table: pd.DataFrame, facet: str | None) -> list[tuple[str, pd.DataFrame]]:
    """(label, rows) of each value of the facet; the whole table without a label if there is none."""
    if facet is None:
        return [("", table)]
    return [(f"{facet}={value}", rows) for value, rows in table.groupby(facet, sort=False)]


def by_kind(table: pd.DataFrame, facet: str | None) -> pd.Series:
    """In words, each row's kind of attention and of weights, and its value of the facet if there is one."""
    kind = table.attention.map(choice_in_words) + " attention, " + table.weights + " weights"
    return kind if facet is None else kind + f", {facet}=" + table[facet].astype(str)


def inputs_in_words(inputs: str) -> str:
    """The range of inputs, which a table has as 0..1, for a title, which is not broken within it."""
    return "inputs in [{},\N{NO-BREAK SPACE}{}]".format(*inputs.split(".."))


def grid_of(
    table: pd.DataFrame, facet: str | None, columns: int, share_y: Any = True, share_x: Any = True
) -> tuple[Figure, np.ndarray, list[tuple[str, pd.DataFrame]]]:
    """An empty figure with a row of axes for each value of the facet, and (label, rows) of each value.

    Many facets are placed side by side, and panels in many rows are lower, so that the figure does not become too long.
    """
    facets = facets_of(table, facet)
    per_row = max(1, SIDE_BY_SIDE // columns) if len(facets) > MOST_ROWS else 1
    num_rows = -(-len(facets) // per_row)
    figure = empty_figure(panel_size()[0] * columns * per_row, height_of_panels(num_rows) * num_rows + 0.7)
    axes = figure.subplots(num_rows, columns * per_row, squeeze=False, sharex=share_x, sharey=share_y)
    grid = axes.reshape(num_rows * per_row, columns)
    for unused in grid[len(facets) :].flat:
        unused.remove()
    return figure, grid[: len(facets)], facets


def height_of_panels(rows: int) -> float:
    """Height of a panel in inches: that of the style, or less if this many rows would not fit onto a page."""
    return min(panel_size()[1], max(LOWEST, PAGE / rows))


def title(*parts: str) -> str:
    """Join the parts into one line with names as in a paper; `Layout` breaks it if it is wider than its panel."""
    return in_a_paper(" · ".join(part for part in parts if part))


def line(axes: Axes, rows: pd.DataFrame, x: str, value: str, label: str, number: int, **means: Any) -> None:
    """Draw `mean_line` in the style of a series. number: index of the series in the panel."""
    style: dict[str, Any] = {"marker": marker_of(number), "linestyle": dashes_of(number)}
    # an equal line that is drawn later lies on top of a wider one
    width = WIDEST - NARROWER * (number % WIDTHS)
    style["linewidth"] = width * matplotlib.rcParams["lines.linewidth"]
    style["markersize"] = width * matplotlib.rcParams["lines.markersize"]
    mean_line(axes, rows, x, value, colour_of(number), label=label, **style, **means)


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

    floor: the column that is above 0 where the value is at or below its rounding error; means with such a row are
    marked.
    """
    summary = mean_and_spread(rows, [x], value, geometric=geometric)
    below = below_in(summary[x], rows, floor)
    axes.plot(summary[x], summary["mean"].mask(below), color=colour, **style)
    spread(axes, summary[x], summary, colour)
    below_rounding(axes, summary[x], summary["mean"], below, colour)


def spread(axes: Axes, x_values: pd.Series, summary: pd.DataFrame, colour: Any) -> None:
    """Draw the seeds behind a line of means at these x values: one by one if few, else the mean's 95 % interval."""
    num_seeds = summary.num_seeds.max()
    if num_seeds > FEW_SEEDS:
        axes.fill_between(x_values, summary["low"], summary["high"], color=colour, alpha=0.2, linewidth=0)
    elif num_seeds > 1:
        by_seed = pd.DataFrame(list(summary.of_seed), index=x_values.to_numpy())
        if len(by_seed) > FEW_POINTS:
            axes.plot(by_seed, color=colour, alpha=0.35, linewidth=0.5, zorder=1)
        else:
            points = by_seed.stack()
            x_of_seeds = points.index.get_level_values(0)
            axes.scatter(x_of_seeds, points, s=7, color=colour, alpha=0.45, linewidths=0, zorder=1.5)


def below_in(x_values: pd.Series, rows: pd.DataFrame, column: str) -> pd.Series:
    """Whether any of the rows at each of these values of x is below its floor; older tables may lack the column."""
    if column not in rows:
        return pd.Series(False, index=x_values.index)
    return x_values.isin(rows[x_values.name][rows[column] > 0])


def below_rounding(axes: Axes, x_values: pd.Series, values: pd.Series, below: pd.Series, colour: Any) -> None:
    """Mark values drawn at their rounding error, which are not measurements: open triangles on a dotted line."""
    if below.any():
        reached = below | below.shift(1, fill_value=False) | below.shift(-1, fill_value=False)
        axes.plot(x_values, values.where(reached), linestyle=":", linewidth=0.8, color=colour, zorder=1.5)
        axes.plot(x_values[below], values[below], linestyle="none", color=colour, zorder=3, **TRIANGLE)
        axes.plot([], [], linestyle="none", color=INK, label=BELOW, **TRIANGLE)


def floor(axes: Axes, floors: pd.Series) -> None:
    """Draw the rounding error of a forward pass against its index, dotted, if the panel reaches down to it."""
    if len(floors) and axes.get_ylim()[0] < 100 * floors.max():
        axes.plot(floors.index, floors, color=GREY, linestyle=":", linewidth=1, label=FLOOR, zorder=1)


def in_words(variant: str) -> str:
    """A variant's name for a legend; a sweep's key that may follow it keeps its spelling."""
    return ", ".join(part if "=" in part else choice_in_words(part) for part in variant.split(", "))


def of_weights_in_words(weights: str) -> str:
    """`trained weights` of a kind of weights; a sweep's setting that takes its place is left as it is."""
    return weights if "=" in weights else f"{weights} weights"


def level(axes: Axes, rows: pd.DataFrame, column: str, label: str, colour: str, dashes: str | tuple) -> None:
    """Draw a horizontal line at a measured baseline, with its spread; nothing if it was not measured.

    dashes: a line style of matplotlib.
    """
    if column not in rows or rows[column].isna().all():
        return
    per_seed = rows.groupby("seed")[column].mean().dropna()
    axes.axhline(per_seed.mean(), color=colour, linestyle=dashes, linewidth=1, label=label, zorder=1)
    if len(per_seed) > FEW_SEEDS:
        half = half_width(per_seed.std(), len(per_seed))
        axes.axhspan(per_seed.mean() - half, per_seed.mean() + half, color=colour, alpha=0.1, linewidth=0, zorder=0)
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
    """Give an x axis integer ticks, and its label on the outer panels only."""
    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.label_outer()
    if len(axes.get_shared_y_axes().get_siblings(axes)) == 1:  # its y axis is not shared
        axes.tick_params(labelleft=True)


def legend(figure: Figure, grid: np.ndarray) -> None:
    """Add one legend under the panels, with each label once; the figure grows so that the panels keep their height."""
    _label_lowest(grid)
    place_legend(figure, grid.flat)


def place_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """Add the legend of these panels, in as many columns as the figure has room for."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles |= {label: handles.pop(label) for label in (BELOW, FLOOR) if label in handles}  # after the series
    handles = {in_a_paper(label): handle for label, handle in handles.items()}
    # as many columns as fit with the longest label, its handle and the space between columns
    size = points_of("legend.fontsize")
    room = figure.get_figwidth() / (0.5 + LEGEND_LETTER * size * max(map(len, handles), default=1))
    columns = max(1, min(len(handles), int(room), 2 if len(handles) > 4 else 4))
    lines = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + LINE * size * max(0, lines - LINES))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns)


def _label_lowest(grid: np.ndarray) -> None:
    """Give the panels above an empty cell the x labels and numbers that the row below would have."""
    lowest = {}
    for axes in grid.flat:
        lowest[axes.get_subplotspec().colspan.start] = axes
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
