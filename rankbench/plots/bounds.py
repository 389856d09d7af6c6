"""The figure of the analysis `bounds`."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import FLOOR, below_rounding, line, spread, whole_numbers, with_legend
from rankbench.plots.style import GREY, INK
from rankbench.runs.tables import mean_and_spread

NAMES = {
    "theorem": "bound: theorem",
    "recursion": "bound: layer by layer",
    "layer": "bound: one layer, from measured",
    "diameter": "bound: diameter (proved)",
}
LEAST = 10  # powers of ten that are shown above what was measured


@styled
def draw_bounds(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """log10 of bounds and of the bounded numbers by layer; a bound far above all that was measured leaves its panel.

    Where rounding explains the measured number, a triangle shows the rounding error, which is dotted.
    """
    across, down = ("variant", "weights") if table.variant.nunique() > 1 else ("weights", "variant")
    columns = list(dict.fromkeys(table[across]))
    rows_of = table[down] + ("" if facet is None else f", {facet}=" + table[facet].astype(str))
    figure, grid, facets = grid_of(table.assign(row=rows_of), "row", len(columns), share_y=False)
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, column in zip(row, columns, strict=True):
            rows_of_panel = rows[rows[across] == column]
            for number, (bound, name) in enumerate(NAMES.items()):
                rows_of_bound = rows_of_panel[rows_of_panel.bound == bound]
                if len(rows_of_bound):
                    line(axes, rows_of_bound, "layer", "log10_bound", name, number)
            for bound, colour, name in (("layer", INK, "measured residual"), ("diameter", GREY, "measured diameter")):
                if len(measured := rows_of_panel[rows_of_panel.bound == bound]):
                    _measured(axes, measured, colour, name)
            axes.set_title(title(column.replace("_", " "), label.removeprefix("row=")))
            whole_numbers(axes, "layer (0: embedding)")
        row[0].set_ylabel("$\\log_{10}$ of residual\nor diameter")
        _window(row, rows)
    return with_legend(figure, grid)


def _measured(axes: Axes, rows: pd.DataFrame, colour: str, name: str) -> None:
    """Draw measured numbers by layer, or their rounding error where it explains them."""
    summary = mean_and_spread(rows, ["layer"], "log10_measured")
    of_layer = rows.groupby("layer")
    below = (of_layer.below_floor.min() > 0).reset_index(drop=True)
    axes.plot(summary.layer, summary["mean"].mask(below), color=colour, label=name, marker="x", linestyle="--")
    spread(axes, summary.layer, summary, colour)
    if "noise_floor" in rows and below.any():  # residuals that are followed far below rounding have none
        floors = np.log10(of_layer.noise_floor.mean())
        axes.plot(floors, color=colour, linestyle=":", linewidth=1, label=FLOOR, zorder=1)
        floors = floors.reset_index(drop=True)
        below_rounding(axes, summary.layer, summary["mean"].mask(below, floors), below, colour)


def _window(row: Iterable[Axes], rows: pd.DataFrame) -> None:
    """Show what was measured and as much again above it, because bounds of 10^1000 would flatten everything else."""
    measured = rows.log10_measured
    if "noise_floor" in rows:
        measured = pd.concat([measured, np.log10(rows.noise_floor[rows.below_floor > 0])])
    measured = measured[np.isfinite(measured)]
    if measured.empty:  # a network of zeros
        return
    low, high = measured.min(), measured.max()
    height = max(LEAST, high - low)
    for axes in row:
        axes.set_ylim(low - 0.05 * height, high + height)
