"""The figure of the analysis `laws`."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.measures.laws import CLAIMED, CONTROL, LAWS
from rankbench.plots.figure import COLOURS, GREY, INK, MARKERS, grid_of, legend, spread, styled, title
from rankbench.runs.tables import mean_and_spread


@styled
def draw_laws(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """The closed form as a line, what is measured as marks with its seeds, in grey the control; a colour a parameter.

    A panel for each facet.
    """
    figure, grid, facets = grid_of(table, facet, 1, share_y=False, share_x=False)
    for (axes,), (label, rows) in zip(grid, facets, strict=True):
        law = LAWS[rows.law.iloc[0]]
        for number, (parameter, of_parameter) in enumerate(rows.groupby("parameter", sort=False)):
            _draw(axes, of_parameter, parameter, number)
        if law.log_x:
            axes.set_xscale("log")
        if law.log_value:
            axes.set_yscale("log")
        axes.set_xlabel(law.x_label)
        axes.set_ylabel(law.value_label)
        axes.set_title(title(rows.law.iloc[0].replace("_", " "), label))
    legend(figure, grid)
    return figure


def _draw(axes: Axes, rows: pd.DataFrame, parameter: str, number: int) -> None:
    colour, marker = COLOURS[number % len(COLOURS)], {"marker": MARKERS[number % len(MARKERS)], "mfc": "none"}
    for (setup, curve), of_curve in rows.groupby(["setup", "curve"], sort=False):
        summary = mean_and_spread(of_curve, ["x"], "value")
        if setup == CLAIMED and curve == "closed form":
            axes.plot(summary.x, summary["mean"], color=colour)
            axes.plot([], [], color=colour, **marker, label=parameter)
            continue
        shade, legend_shade, name = (GREY, GREY, CONTROL) if setup == CONTROL else (colour, INK, curve)
        axes.plot(summary.x, summary["mean"], ls="none", color=shade, **marker)
        axes.plot([], [], ls="none", color=legend_shade, marker="o", mfc="none", label=name)
        spread(axes, summary.x, summary, shade)
