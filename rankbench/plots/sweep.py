"""The figure of a sweep: final numbers against the keys that varied."""

import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rankbench.plots.figure import COLOURS, DASHES, MARKERS, PANEL, legend, spans_orders, styled, tick, ticks, title
from rankbench.runs.tables import booleans_as_words, over_seeds


@styled
def draw_sweep(
    table: pd.DataFrame,
    x: str,
    series: str | None = None,
    facet: str | None = None,
    value: str = "test_accuracy",
    statistic: str = "mean",
) -> Figure:
    """A final number against a varied key: the mean over seeds, with bars for its 95 % interval.

    With statistic="best", the number of the best seed (largest accuracy or smallest loss). A line for each value of
    `series`, a panel for each value of `facet`. Other keys are averaged over within each seed. Words, including true
    and false, are in the order of the rows; on the x axis they are spaced evenly, and no line joins them.
    """
    table = booleans_as_words(table)
    is_ordered = facet is not None and pd.api.types.is_numeric_dtype(table[facet])
    facets = list(table.groupby(facet, sort=is_ordered)) if facet else [("", table)]
    lines = _in_order(table[series]) if series else [""]
    columns = min(len(facets), 3)
    rows = -(-len(facets) // columns)
    figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    words = None if pd.api.types.is_numeric_dtype(table[x]) else _in_order(table[x])
    everywhere = pd.Series(range(len(words))) if words else table[x]
    for axes, (label, rows_of_panel) in zip(grid.flat, facets, strict=False):
        for number, line in enumerate(lines):
            summary = over_seeds(rows_of_panel[rows_of_panel[series] == line] if series else rows_of_panel, [x], value)
            if summary.empty:
                continue
            x_values = _aside(summary[x].map(words.index) if words else summary[x], everywhere, number, len(lines))
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            dashes = "none" if words else DASHES[number // len(COLOURS) % len(DASHES)]
            style |= {"linestyle": dashes, "capsize": 2, "elinewidth": 0.8}
            if statistic == "best":
                name = f"{series}={tick(line)}" if series else "best of the seeds"
                best = summary.largest if value == "test_accuracy" else summary.smallest
                axes.errorbar(x_values, best, label=name, **style)
            else:
                what = "mean over seeds, 95 % CI" if summary.num_seeds.max() > 1 else "one seed"
                name = f"{series}={tick(line)}" if series else what
                below, above = summary["mean"] - summary.low95, summary.high95 - summary["mean"]
                axes.errorbar(x_values, summary["mean"], [below, above], label=name, **style)
        if facet:
            axes.set_title(title(f"{facet}={tick(label)}"))
        axes.set_xlabel(x)
        if words:
            axes.set_xticks(range(len(words)), words, rotation=30 if max(map(len, words)) > 8 else 0)
        else:
            ticks(axes, table[x])
        axes.tick_params(labelbottom=True)
    for axes in list(grid.flat)[len(facets) :]:
        axes.set_visible(False)
    for row in grid:
        row[0].set_ylabel({"test_accuracy": "final test accuracy"}.get(value, value.replace("_", " ")))
    legend(figure, grid)
    return figure


def _in_order(values: pd.Series) -> list:
    """The different values: numbers from the smallest, words as they come."""
    different = list(values.unique())
    return sorted(different) if pd.api.types.is_numeric_dtype(values) else different


def _aside(x_values: pd.Series, everywhere: pd.Series, number: int, count: int) -> pd.Series:
    """Shift the x values of a series a little, so that equal values do not hide each other."""
    low, high = everywhere.min(), everywhere.max()
    shift = 0.012 * (number - (count - 1) / 2)
    if spans_orders(everywhere):
        return x_values * (high / low) ** shift
    return x_values + shift * ((high - low) or 1)
