"""The figure of the analysis `pruning`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import level, log_y, mean_line, with_legend
from rankbench.plots.style import GREY, INK, colour_of, marker_of

NAMES = {"greedy": "greedy", "norm": "largest first", "random": "random order"}
PARTS = {"path": "paths", "last_head": "last heads", "length": "path lengths"}


@styled
def draw_pruning(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Accuracy and loss against the number of paths, or of groups of them, that are kept, a line for each order; a row
    for each facet."""
    figure, grid, facets = grid_of(table, facet, 2, share_y="col")
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, value in zip(row, ("accuracy", "loss"), strict=True):
            for number, order in enumerate(dict.fromkeys(rows.order)):
                of_order, colour = rows[rows.order == order], colour_of(number)
                style = {"marker": marker_of(number), "markevery": 6, "label": NAMES.get(order, order)}
                mean_line(axes, of_order, "kept", value, colour, geometric=value == "loss", **style)
            level(axes, rows, f"whole_{value}", "whole network", INK, "-")
            axes.set_xscale("symlog", linthresh=1)
            axes.set_xlim(left=0)
            axes.set_title(title(value, label))
            axes.set_xlabel(f"{what_is_kept(rows)} kept")
            tick_values = [0, *(10**power for power in range(int(np.log10(max(rows.kept.max(), 1))) + 1))]
            axes.set_xticks(tick_values, map(str, tick_values))
        level(row[0], rows, "majority_accuracy", "commonest class", GREY, "--")
        row[0].set_ylim(-0.02, 1.05)
        row[0].set_ylabel("accuracy (share of tokens)")
        row[1].set_ylabel("loss (nats per token)")
    log_y(grid[0, 1])
    return with_legend(figure, grid)


def what_is_kept(table: pd.DataFrame) -> str:
    """The parts of a table, in words."""
    return " or ".join(PARTS[parts] for parts in table.parts.unique())
