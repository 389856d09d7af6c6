"""Figures for print: the panels rearranged for one column of a page, or for two, with letters of the same size."""

from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec

from rankbench.plots.figure import LOWEST, PAGE, height_of_panels
from rankbench.plots.marks import place_legend
from rankbench.plots.style import STYLE, panel_size

WIDTHS = {"single": 3.25, "double": 6.75}  # inches: a column, and both with the gap between them


def fit(figure: Figure, column: str | None) -> Figure:
    """Make the figure as wide as the column (single | double), if it is wider; None leaves it. Panels that would be
    narrower than a third of two columns go below each other, in reading order, with labels on their new outer sides."""
    with matplotlib.rc_context(STYLE):
        _fit(figure, column)
    return figure


def _fit(figure: Figure, column: str | None) -> None:
    panels: list = [axes for axes in figure.axes if axes.get_subplotspec() is not None and axes.get_visible()]
    if column is None or not panels:
        return
    before = figure.get_size_inches()
    width = min(WIDTHS[column], before[0])
    if figure.subfigs:  # rows of maps, which have no room in a single column
        figure.set_size_inches(WIDTHS["double"], before[1])
        return
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
