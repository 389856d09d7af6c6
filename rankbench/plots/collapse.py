"""The figure of the analysis `collapse`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from rankbench.plots.figure import grid_of, in_words, styled, title
from rankbench.plots.marks import FLOOR, line, marks_apart, whole_numbers, with_legend
from rankbench.plots.style import GREY, INK, colour_of
from rankbench.runs.tables import mean_and_spread

EDGE = 0.05  # of the panel's height, above and below the marks, which would be cut
MOST_TICKS = 9  # of values below 1
RING = {"marker": "o", "linestyle": "none", "markerfacecolor": "none", "markeredgewidth": 0.7, "markersize": 9}


@styled
def draw_collapse(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """The residual by layer, its logarithm on a logarithmic scale: a residual that each layer cubes is a straight line.

    A line for each variant; rings where a plain forward pass can measure the residual; its rounding error (the largest
    of the variants) dotted; the theorem's bound dashed.
    """
    table = table.replace(-np.inf, np.nan)  # equal tokens cannot be drawn on this axis
    weights = list(dict.fromkeys(table.weights))
    variants = list(dict.fromkeys(table.variant))
    figure, grid, facets = grid_of(table, facet, len(weights))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, kind in zip(row, weights, strict=True):
            panel = rows[rows.weights == kind]
            for number, variant in enumerate(variants):
                of_variant = panel[panel.variant == variant]
                line(axes, of_variant, "layer", "log10_residual", in_words(variant), number)
                measured = _in_every_seed(of_variant, "log10_measured")
                apart = marks_apart(of_variant.layer.unique())
                axes.plot(measured.layer, measured["mean"], color=colour_of(number), markevery=apart, **RING)
            axes.plot([], [], color=INK, label="measured by a forward pass", **RING)
            _bound(axes, panel)
            rounding = np.log10(panel.groupby("layer").noise_floor.max())
            if panel.log10_residual.min() < rounding.max() + 2:
                axes.plot(rounding, color=GREY, linestyle=":", linewidth=1, label=FLOOR, zorder=1)
            axes.set_title(title(f"{kind} weights", label))
            whole_numbers(axes, "layer (0: embedding)")
        row[0].set_ylabel(r"residual $\|R\|_{1,\infty}$")
    _doubly_logarithmic(grid[0][0], table.log10_residual)
    return with_legend(figure, grid)


def _bound(axes: Axes, rows: pd.DataFrame) -> None:
    if "log10_bound" not in rows:
        return
    bounded = rows[rows.log10_bound.notna()]
    if bounded.layer.nunique() > 1:
        bound = _in_every_seed(rows[rows.variant == bounded.variant.iloc[0]], "log10_bound")
        axes.plot(bound.layer, bound["mean"], color=INK, linestyle="--", linewidth=1, label="Theorem 2.3: slope log 3")


def _in_every_seed(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    summary = mean_and_spread(rows, ["layer"], column)
    return summary[summary.num_seeds == rows.seed.nunique()]


def _doubly_logarithmic(axes: Axes, logs: pd.Series) -> None:
    """Use a symmetric logarithmic axis for log10 values, labelled with the numbers themselves."""
    finite = logs[np.isfinite(logs)]
    lowest, highest = min([-1.0, *finite]), max([0.0, *finite])
    deepest = int(np.ceil(np.log10(-lowest)))
    step = -(-(deepest + 1) // MOST_TICKS)
    powers = range(step - 1, deepest + 1, step)
    tick_labels = {0.0: "$1$"}
    for power in powers:
        exponent = 10**power if power < 4 else f"10^{{{power}}}"
        tick_labels[-(10.0**power)] = f"$10^{{-{exponent}}}$"
    if highest >= 1 and step == 1:
        tick_labels[1.0] = "$10$"
    axes.set_yscale("symlog", linthresh=1)
    axes.fmt_ydata = lambda power: f"10^{power:.4g}"
    axes.set_yticks(list(tick_labels), list(tick_labels.values()))
    axes.yaxis.set_minor_locator(NullLocator())
    scale = axes.yaxis.get_transform()
    bottom, low, high = scale.transform([-(10.0**deepest), lowest, highest])
    edge = EDGE * (high - bottom)
    axes.set_ylim(*scale.inverted().transform([min(bottom, low - edge), high + edge]))
