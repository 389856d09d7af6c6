"""The figure of the analysis `histograms`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from rankbench.plots.figure import by_kind, empty_figure, inputs_in_words, styled, title
from rankbench.plots.marks import FEW_SEEDS, with_legend
from rankbench.plots.style import DASHES, colour_of, panel_size


@styled
def draw_histograms(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Density of the entries of inputs and outputs, over all seeds and layers, with that of each seed dashed or dotted;
    of trained weights if there are any.

    A column for each range of inputs, a row for each kind of attention and each facet. Kim et al. print no numbers.
    """
    if (table.weights == "trained").any():
        table = table[table.weights == "trained"]
    ranges = list(dict.fromkeys(table.inputs))
    facets = list(table.groupby(by_kind(table, facet), sort=False))
    figure = empty_figure(panel_size()[0] * len(ranges), panel_size()[1] * len(facets) + 0.5)
    grid = figure.subplots(len(facets), len(ranges), squeeze=False)  # panels do not share axes
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, inputs in zip(row, ranges, strict=True):
            of_range = rows[rows.inputs == inputs]
            for number, (of, entries) in enumerate(of_range.groupby("of", sort=False)):
                edges, density = _together(entries)
                axes.stairs(density, edges, color=colour_of(number), fill=True, alpha=0.35)
                axes.stairs(density, edges, color=colour_of(number), label=of)
                for seed_number, (_, of_seed) in enumerate(entries.groupby("seed")):
                    if 1 < entries.seed.nunique() <= FEW_SEEDS:
                        edges, density = _together(of_seed)
                        dashes = DASHES[1 + seed_number % 3]
                        axes.stairs(density, edges, color=colour_of(number), linestyle=dashes, linewidth=0.7)
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(title(label, inputs_in_words(inputs)))
            axes.set_xlabel("entry")
        row[0].set_ylabel("density")
    return with_legend(figure, grid)


def _together(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Mean density, on common bins, of histograms that each have their own bins."""
    parts = [histogram for _, histogram in rows.groupby(["seed", "layer"])]
    edges = np.linspace(rows.low.min(), rows.high.max(), max(len(histogram) for histogram in parts) + 1)
    total = np.zeros(len(edges) - 1)
    for histogram in parts:
        shares = histogram.density * (histogram.high - histogram.low)
        below = np.concatenate([[0.0], np.cumsum(shares)])  # share up to each edge
        total += np.diff(np.interp(edges, [*histogram.low, histogram.high.iloc[-1]], below))
    return edges, total / len(parts) / np.diff(edges)
