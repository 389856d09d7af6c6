"""Figures as files and as grids of panels: style, pages, facets, titles, columns of print. What is drawn into a panel
is in marks."""

import functools
import io
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from rankbench.plots.marks import place_legend
from rankbench.plots.names import BETWEEN, choice_in_words, in_a_paper, in_lines
from rankbench.plots.readings import png_field, readings_of, with_spots
from rankbench.plots.style import STYLE, panel_size
from rankbench.runs.files import replacing

KINDS = (".png", ".pdf")  # file types in which a figure is saved
PAGE, LOWEST = 9.0, 1.6  # inches: height of a page, and the least height of a panel, even if the page is then too short
OVERHANG = 1.1  # of a panel's height: a longer label of y is broken into lines, as titles are that are wider than it
MOST_ROWS, SIDE_BY_SIDE = 6, 4  # facets below each other; panels side by side where there are more facets
COLUMNS = {"single": 3.25, "double": 6.75}  # inches: a column of a page, and both with the gap between them


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
        """Arrange the figure; again if titles had to be broken, and then if labels of y had to be, for which broken
        titles leave less room."""
        super().execute(figure)
        if any([_broken(axes.title, axes.title.get_window_extent().width, axes.bbox.width) for axes in figure.axes]):
            super().execute(figure)
        labels = [(axes.yaxis.label, OVERHANG * axes.bbox.height) for axes in figure.axes]
        whole = [label for label in labels if "\n" not in label[0].get_text()]
        if any([_broken(label, label.get_window_extent().height, room) for label, room in whole]):
            super().execute(figure)


def _broken(text: Text, length: float, room: float) -> bool:
    """Break the text into lines if its length is more than the room; returns whether it was."""
    words = text.get_text()
    if is_long := bool(words) and length > room:
        text.set_text(in_lines(words, int(max(map(len, words.split("\n"))) * room / length)))
    return is_long


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
    remove_pages(path, names)
    written = {}
    for name, (figure, note) in zip(names, figures, strict=True):
        if note:
            above = figure.suptitle(in_a_paper(note.replace("$", r"\$")), fontsize=STYLE["font.size"])
            _broken(above, above.get_window_extent().width, figure.bbox.width)
        written[name] = save(figure, path.with_name(name), kinds)
    return written


def remove_pages(path: Path, kept: Collection[str] = ()) -> None:
    """Remove what `save_pages` wrote there, except the figures of these names."""
    for old in path.parent.glob(f"{path.name}*"):
        if re.fullmatch(rf"{re.escape(path.name)}(_\d+)?\.(png|pdf|svg)", old.name) and old.stem not in kept:
            old.unlink()


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
    share_y="col": panels in the same column of each facet's row have one scale, so that facets can be compared.
    """
    facets = facets_of(table, facet)
    per_row = max(1, SIDE_BY_SIDE // columns) if len(facets) > MOST_ROWS else 1
    num_rows = -(-len(facets) // per_row)
    figure = empty_figure(panel_size()[0] * columns * per_row, height_of_panels(num_rows) * num_rows + 0.7)
    share = share_y is True
    axes = figure.subplots(num_rows, columns * per_row, squeeze=False, sharex=share_x, sharey=share)
    grid = axes.reshape(num_rows * per_row, columns)
    for unused in grid[len(facets) :].flat:
        unused.remove()
    for first, *others in grid[: len(facets)].T if share_y == "col" else ():
        for other in others:
            other.sharey(first)
    return figure, grid[: len(facets)], facets


def height_of_panels(rows: int) -> float:
    """Height of a panel in inches: that of the style, or less if this many rows would not fit onto a page."""
    return min(panel_size()[1], max(LOWEST, PAGE / rows))


def title(*parts: str) -> str:
    """Join the parts into one line with names as in a paper; `Layout` breaks it if it is wider than its panel."""
    return in_a_paper(BETWEEN.join(part for part in parts if part))


def in_words(variant: str) -> str:
    """A variant's name for a legend; a sweep's key that may follow it keeps its spelling."""
    return ", ".join(part if "=" in part else choice_in_words(part) for part in variant.split(", "))


def uncounted_in_words(table: pd.DataFrame) -> str:
    """What the column special_tokens says, as `left out: special tokens, first`; empty without such a column."""
    if "special_tokens" not in table or table.special_tokens.nunique() != 1:
        return ""
    special, *others = str(table.special_tokens.iloc[0]).split("+")
    kinds = ["special tokens"] * (special == "out") + others
    return f"left out: {', '.join(kinds)}" if kinds else "special tokens count"


def of_weights_in_words(weights: str) -> str:
    """`trained weights` of a kind of weights; a sweep's setting that takes its place is left as it is."""
    return weights if "=" in weights else f"{weights} weights"


@matplotlib.rc_context(STYLE)
def fit(figure: Figure, column: str | None) -> Figure:
    """Make the figure as wide as the column (single | double), if it is wider; None leaves it. Panels that would be
    narrower than a third of two columns go below each other, in reading order, with labels on their new outer sides."""
    panels: list = [axes for axes in figure.axes if axes.get_subplotspec() is not None and axes.get_visible()]
    if column is None or not panels:
        return figure
    before = figure.get_size_inches()
    width = min(COLUMNS[column], before[0])
    if figure.subfigs:  # rows of maps, which have no room in a single column
        figure.set_size_inches(COLUMNS["double"], before[1])
        return figure
    grid = panels[0].get_subplotspec().get_gridspec()
    per_row = 1 if column == "single" else 3 if grid.ncols % 3 == 0 else 2
    per_row, lines = min(per_row, grid.ncols), grid.nrows
    if per_row < grid.ncols:
        labels = {axes: _labels(axes, panels) for axes in panels}
        lines = -(-len(panels) // per_row)
        arranged = GridSpec(lines, per_row, figure=figure)
        for number, axes in enumerate(panels):
            axes.set_subplotspec(arranged[number // per_row, number % per_row])
        for number, axes in enumerate(panels):
            _label(axes, *labels[axes], panels[number + per_row : number + per_row + 1], number % per_row == 0)
    around = max(0.0, before[1] - grid.nrows * height_of_panels(grid.nrows))
    height = panel_size()[1] * min(1.0, max(0.75, width / per_row / panel_size()[0]))
    height = max(LOWEST, min(height, (PAGE - around) / lines))
    figure.set_size_inches(width, lines * height + around)
    if figure.legends:
        figure.legends[0].remove()
        place_legend(figure, panels)
    return figure


def _labels(axes: Axes, panels: list) -> tuple[str, str]:
    """The panel's labels of x and y; where it has none, that of a panel in its column or row that shares the axis."""
    cell: Any = axes.get_subplotspec()
    same_column = [other for other in panels if other.get_subplotspec().colspan == cell.colspan]
    same_row = [other for other in panels if other.get_subplotspec().rowspan == cell.rowspan]
    x = [other.get_xlabel() for other in same_column if axes.get_shared_x_axes().joined(axes, other)]
    y = [other.get_ylabel() for other in same_row if axes.get_shared_y_axes().joined(axes, other)]
    return axes.get_xlabel() or next(filter(None, x), ""), axes.get_ylabel() or next(filter(None, y), "")


def _label(axes: Axes, x: str, y: str, below: list[Axes], is_first: bool) -> None:
    if not below or not axes.get_shared_x_axes().joined(axes, below[0]):
        axes.set_xlabel(x)
        axes.tick_params(labelbottom=True)
    if is_first:
        axes.set_ylabel(y)
        axes.tick_params(labelleft=True)
