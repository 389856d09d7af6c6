"""The figure of the analysis `speed`."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.curves import against_layers
from rankbench.plots.figure import empty_figure, styled
from rankbench.plots.marks import with_legend
from rankbench.plots.style import panel_size


@styled
def draw_speed(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Time of a training step over that of the same network with dot products, against the number of layers.

    Published ratios are open marks.
    """
    totals = table.groupby(["variant", "layers", "seed"], sort=False)[["seconds", "seconds_dot"]].sum().reset_index()
    ratios = totals.assign(ratio=totals.seconds / totals.seconds_dot)
    figure = empty_figure(panel_size()[0], panel_size()[1] + 1.0)
    grid = figure.subplots(1, 1, squeeze=False)
    against_layers(grid[0, 0], ratios, "ratio", list(dict.fromkeys(ratios.variant)), published)
    grid[0, 0].set_ylabel("time of a step / with dot products")
    return with_legend(figure, grid)
