"""The figure of the analysis `invertibility`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import by_kind, grid_of, inputs_in_words, styled, title
from rankbench.plots.marks import below_in, below_rounding, published_marks, spread, whole_numbers, with_legend
from rankbench.plots.style import DASHES, colour_of, marker_of
from rankbench.runs.tables import mean_and_spread

SMALLEST = np.finfo(float).eps  # smaller errors, which are rounding, are drawn here


@styled
def draw_invertibility(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Largest reconstruction error by iteration, a colour for each c, dashes for tokens and widths where they vary.

    Where there are more pairs of tokens and width than dashes, these have rows and columns of panels. For a model with
    several layers the worst layer is drawn. A line ends with a mark where rounding is all that is left, and continues
    after such a mark if the error grows again.
    """
    table = table[table.part == "attention"]
    coefficients = sorted(table.coefficient.unique())
    sizes = list(dict.fromkeys(zip(table.tokens, table.width, strict=True)))
    kinds, of_column = by_kind(table, facet), table.inputs.map(inputs_in_words)
    if are_many := len(sizes) > len(DASHES):
        kinds, of_column = kinds + ", N=" + table.tokens.astype(str), of_column + ", D=" + table.width.astype(str)
    table = table.assign(row=kinds, column=of_column)
    columns = list(dict.fromkeys(of_column))
    figure, grid, facets = grid_of(table, "row", len(columns))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, column in zip(row, columns, strict=True):
            of_range = rows[rows.column == column]
            for (coefficient, *size), rows_of_line in of_range.groupby(["coefficient", "tokens", "width"]):
                ordered = rows_of_line.sort_values("error", kind="stable", na_position="first")
                worst = ordered.groupby(["seed", "iteration"]).tail(1)
                worst = worst.assign(error=worst.error.clip(lower=SMALLEST))
                summary = mean_and_spread(worst, ["iteration"], "error", geometric=True)
                below = below_in(summary.iteration, worst, "below_floor")
                is_over = below[::-1].cummin()[::-1]  # from here on, rounding is all that is left
                is_drawn = ~is_over.shift(fill_value=False)
                summary, below = summary[is_drawn], below[is_drawn]
                name, number = f"c={coefficient:g}", coefficients.index(coefficient)
                name += ", N={}, D={}".format(*size) if len(sizes) > 1 and not are_many else ""
                colour, dashes = colour_of(number), "-" if are_many else DASHES[sizes.index(tuple(size))]
                look: dict = {"linestyle": dashes, "marker": marker_of(number)}
                look |= {"markevery": max(1, len(summary) // 8), "color": colour, "markersize": 3}
                axes.plot(summary.iteration, summary["mean"], label=name, **look)
                spread(axes, summary.iteration, summary, colour)
                below_rounding(axes, summary.iteration, summary["mean"], below, colour)
            published_marks(axes, published, label)
            axes.set_yscale("log")
            axes.set_title(title(label.removeprefix("row="), column))
            whole_numbers(axes, "iteration")
        row[0].set_ylabel("largest error, units of the input")
    return with_legend(figure, grid)
