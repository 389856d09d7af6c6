"""The figure of the analysis `residual`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import floor, grid_of, in_words, legend, line, styled, title, whole_numbers
from rankbench.tables import last_of_layer, mean_and_spread


@styled
def draw_residual(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Relative residual by layer, a line for each variant; a column for each kind of weights, a row for each facet."""
    last = last_of_layer(table)
    # what is below rounding is drawn there: an exact 0 has no place on a logarithmic axis
    rounding = last["dtype"].map(lambda name: np.finfo(name).eps)
    last = last.assign(relative_residual=last.relative_residual.clip(lower=rounding))
    weights = list(dict.fromkeys(last.weights))
    last = last.assign(line=last.variant.map(in_words))
    figure, grid, facets = grid_of(last, facet, len(weights))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, kind in zip(row, weights, strict=True):
            for number, name in enumerate(last.line.unique()):
                mine = rows[(rows.weights == kind) & (rows.line == name)]
                summary = mean_and_spread(mine, ["layer"], "relative_residual", geometric=True)
                line(axes, summary, "layer", name, number)
            axes.set_yscale("log")
            axes.set_title(title(f"{kind} weights", label))
            whole_numbers(axes, "layer (0: embedding)")
            floor(axes, rows)
        row[0].set_ylabel(r"relative residual $\|R\|_{1,\infty}/\|X\|_{1,\infty}$")
    legend(figure, grid)
    return figure
