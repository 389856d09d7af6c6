"""The figure of the analysis `histograms`."""

import numpy as np
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from rankbench.plots.figure import COLOURS, PANEL, legend, styled, title


@styled
def draw_histograms(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Density of the entries of inputs and outputs, all seeds and layers together: a column for each range of inputs, a
    row for each kind of attention and each facet; of the trained weights, where there are any. Kim et al. print no
    numbers to mark."""
    if (table.weights == "trained").any():
        table = table[table.weights == "trained"]
    kind = table.attention.str.replace("_", " ") + " attention, " + table.weights + " weights"
    rows_of = kind if facet is None else kind + f", {facet}=" + table[facet].astype(str)
    ranges = list(dict.fromkeys(table.inputs))
    facets = list(table.groupby(rows_of, sort=False))
    figure = Figure(figsize=(PANEL[0] * len(ranges), PANEL[1] * len(facets) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(facets), len(ranges), squeeze=False)  # every panel has axes of its own
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, inputs in zip(row, ranges, strict=True):
            mine = rows[rows.inputs == inputs]
            for number, (of, some) in enumerate(mine.groupby("of", sort=False)):
                edges, density = _together(some)
                axes.stairs(density, edges, color=COLOURS[number], fill=True, alpha=0.35)
                axes.stairs(density, edges, color=COLOURS[number], label=of)
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(title(label, "inputs in [{}, {}]".format(*inputs.split(".."))))
            axes.set_xlabel("entry")
        row[0].set_ylabel("density")
    legend(figure, grid)
    return figure


def _together(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Mean density of histograms with bins of their own, on common ones."""
    hists = [one for _, one in rows.groupby(["seed", "layer"])]
    edges = np.linspace(rows.low.min(), rows.high.max(), max(len(one) for one in hists) + 1)
    total = np.zeros(len(edges) - 1)
    for one in hists:
        below = np.concatenate([[0.0], np.cumsum(one.density * (one.high - one.low))])  # share up to each edge
        total += np.diff(np.interp(edges, [*one.low, one.high.iloc[-1]], below))
    return edges, total / len(hists) / np.diff(edges)
