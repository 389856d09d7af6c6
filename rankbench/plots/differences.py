"""The figure of differences between a report's configurations and their baseline."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import empty_figure, styled, title
from rankbench.plots.marks import with_legend
from rankbench.plots.names import in_a_paper, settings_of
from rankbench.plots.style import GREY, colour_of, panel_size
from rankbench.plots.sweep import column_in_words
from rankbench.runs.intervals import LEVEL

ROW, AROUND = 0.21, 0.75  # inches: height of a configuration's row, and of the title and the axis of a panel
LEGEND_HEIGHT = 0.35  # inches


@styled
def draw_differences(table: pd.DataFrame) -> Figure:
    """Differences from the baseline with their 95 % intervals: a panel for each column of numbers, a row for each
    configuration. Marks are filled where p is below 0.05 after Holm's method."""
    keys = list(table.columns[: table.columns.get_loc("baseline")])
    table = table.assign(name=settings_of(table, keys).map(in_a_paper))
    names, columns = list(dict.fromkeys(table.name)), list(dict.fromkeys(table.column))
    wide = min(len(columns), 3)
    deep = -(-len(columns) // wide)
    height = (ROW * len(names) + AROUND) * deep + LEGEND_HEIGHT
    figure = empty_figure(panel_size()[0] * wide, height)
    grid = figure.subplots(deep, wide, squeeze=False, sharey=True)
    for axes in list(grid.flat)[len(columns) :]:
        axes.set_visible(False)
    for axes, column in zip(grid.flat, columns, strict=False):
        rows = table[table.column == column]
        is_shown = rows.p_holm < 2 * LEVEL
        for part, face, label in (
            (rows[is_shown], None, "p < 0.05 after Holm"),
            (rows[~is_shown], "white", "p of 0.05 or more, or no interval"),
        ):
            ends = np.stack([part.difference - part.low95, part.high95 - part.difference])
            style: dict[str, Any] = {"fmt": "o", "color": colour_of(0), "capsize": 2, "elinewidth": 0.8}
            style |= {} if face is None else {"markerfacecolor": face}
            if len(part):
                axes.errorbar(part.difference, part.name.map(names.index), xerr=ends, label=label, **style)
        axes.axvline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        axes.set_title(title(column_in_words(column)))
        axes.set_xlabel("difference from the baseline")
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_yticks(range(len(names)), names)
    return with_legend(figure, grid)
