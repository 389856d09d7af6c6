"""The figure of the analysis `bounds`."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import DODGE, GREY, INK, grid_of, legend, line, styled, title, whole_numbers
from rankbench.tables import mean_and_spread

NAMES = {
    "theorem": "bound: theorem",
    "recursion": "bound: layer by layer",
    "layer": "bound: one layer, from measured",
    "diameter": "bound: diameter (proved)",
}


@styled
def draw_bounds(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """log10 of the bounds and of what they bound by layer, on an axis that is linear to +-10 and logarithmic beyond.

    A column for each variant and a row for each kind of weights and each facet; of a single variant, a column for each
    kind of weights.
    """
    across, down = ("variant", "weights") if table.variant.nunique() > 1 else ("weights", "variant")
    columns = list(dict.fromkeys(table[across]))
    rows_of = table[down] + ("" if facet is None else f", {facet}=" + table[facet].astype(str))
    figure, grid, facets = grid_of(table.assign(row=rows_of), "row", len(columns))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, column in zip(row, columns, strict=True):
            mine = rows[rows[across] == column]
            for number, (bound, name) in enumerate(NAMES.items()):
                part = mine[mine.bound == bound]
                if len(part):
                    line(axes, mean_and_spread(part, ["layer"], "log10_bound"), "layer", name, number)
            for bound, colour, name in (("layer", INK, "measured residual"), ("diameter", GREY, "measured diameter")):
                seen = mean_and_spread(mine[mine.bound == bound], ["layer"], "log10_measured")
                if len(seen):
                    place = seen["layer"] + DODGE * len(NAMES)
                    axes.plot(place, seen["mean"], color=colour, label=name, marker="x", linestyle="--")
                    axes.fill_between(place, seen["low"], seen["high"], color=colour, alpha=0.2, linewidth=0)
            axes.set_yscale("symlog", linthresh=10)
            axes.set_title(title(column.replace("_", " "), label.removeprefix("row=")))
            whole_numbers(axes, "layer (0: embedding)")
        row[0].set_ylabel(r"$\log_{10}$ of residual $\|R\|_{1,\infty}$ or diameter")
    legend(figure, grid)
    return figure
