"""The figure of the analysis `laws`."""

import re

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.measures.law import CLAIMED, CONTROL, LAWS
from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import log_y, mean_line, ticks, with_legend
from rankbench.plots.style import GREY, INK, colour_of, marker_of
from rankbench.runs.tables import mean_and_spread


@styled
def draw_laws(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """The closed form as a line, measurements as marks with their seeds, the control in grey; a colour per parameter.

    A panel for each facet.
    """
    figure, grid, facets = grid_of(table, facet, 1, share_y=False, share_x=False)
    for (axes,), (label, rows) in zip(grid, facets, strict=True):
        law = LAWS[rows.law.iloc[0]]
        for number, (parameter, of_parameter) in enumerate(rows.groupby("parameter", sort=False)):
            _draw(axes, of_parameter, parameter, number)
        measured = rows[(rows.setup == CLAIMED) & (rows.curve != "closed form")]
        for colour, name in [*((INK, curve) for curve in measured.curve.unique()), (GREY, CONTROL)]:
            axes.plot([], [], ls="none", color=colour, marker="o", mfc="none", label=name)
        if (rows.x % 1 == 0).all():
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        ticks(axes, rows.x, law.log_x)
        if law.log_value:
            log_y(axes)
        axes.set_xlabel(_formulas(law.x_label))
        axes.set_ylabel(_formulas(law.value_label))
        axes.set_title(title(rows.law.iloc[0].replace("_", " "), label))
    return with_legend(figure, grid)


def _formulas(text: str) -> str:
    """Set Greek letters, with their numbers, and the sign of a transpose as formulas."""
    return re.sub(r"\^T\b", r"$^T$", re.sub(r"\b(beta|gamma|lambda|sigma)(_\d)?\b", r"$\\\1\2$", text))


def _draw(axes: Axes, rows: pd.DataFrame, parameter: str, number: int) -> None:
    colour = colour_of(number)
    marker: dict = {"marker": marker_of(number), "mfc": "none"}
    for (setup, curve), of_curve in rows.groupby(["setup", "curve"], sort=False):
        if setup == CLAIMED and curve == "closed form":
            summary = mean_and_spread(of_curve, ["x"], "value")
            axes.plot(summary.x, summary["mean"], color=colour)
            axes.plot([], [], color=colour, **marker, label=_formulas(parameter))
        else:
            mean_line(axes, of_curve, "x", "value", GREY if setup == CONTROL else colour, ls="none", **marker)
