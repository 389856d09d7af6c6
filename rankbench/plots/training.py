"""The figure of a training: loss and accuracy of each split over its steps."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, in_words, styled, title
from rankbench.plots.marks import is_wide, mean_line, whole_numbers, with_legend
from rankbench.plots.style import colour_of, dashes_of


@styled
def draw_metrics(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Loss and, where the task has one, accuracy over training steps, a line for each split; a row for each facet."""
    metrics = [name for name in ("loss", "accuracy") if name in table and table[name].notna().any()]
    figure, grid, facets = grid_of(table, facet, len(metrics), share_y=False)
    for axes, first in zip(grid[1:].flat, [*grid[0]] * len(grid), strict=False):
        axes.sharey(first)  # before anything is drawn, because it fixes the limits
    splits = list(dict.fromkeys(table.split))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            logarithmic = metric == "loss" and is_wide(table.loss)
            for number, split in enumerate(splits):
                of_split = rows[rows.split == split].dropna(subset=[metric])
                if len(of_split):
                    style = {"linestyle": dashes_of(number), "label": in_words(split)}
                    mean_line(axes, of_split, "step", metric, colour_of(number), geometric=logarithmic, **style)
            if logarithmic:
                axes.set_yscale("log")
            whole_numbers(axes, "training step")
            axes.set_ylabel(metric)
            axes.tick_params(labelleft=True)
        row[0].set_title(title(label), loc="left")  # one title for the whole row
    return with_legend(figure, grid)
