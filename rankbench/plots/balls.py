"""The figure of the analysis `lipschitz` with `radii`: how far the bound on balls is from what ascent finds."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import facets_of, styled
from rankbench.plots.marks import legend, mean_line
from rankbench.plots.style import GREY, INK, colour_of, panel_size

LEVELS = (2, 10, 100)  # ratios with a line across
HIGHEST = 1e6  # of the ratios that are drawn: a bound beyond says nothing
# Marker of an operation by the end of its name
MARKERS = {"norm": "^", "activation": "s", "softmax": "o", "scores": "D", "squared_keys": "P", "mixing": "v"}
MARKERS |= {"theorem": "x"}


@styled
def draw_balls(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Above, the bound over the largest Jacobian norm found, by radius, a line for each network (with 95 % intervals or
    seeds); below, the share of the bound that its largest operation has, with the operation as the marker."""
    balls = table[table.quantity == "certified_ball"]
    width, height = panel_size()
    figure = Figure(figsize=(1.6 * width, 2.2 * height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, (label, rows) in enumerate(facets_of(balls, facet)):
        for weights, of_weights in rows.groupby("weights", sort=False):
            is_pale = weights == "initialised" and rows.weights.nunique() > 1
            look = {"linestyle": "--", "alpha": 0.5} if is_pale else {"linestyle": "-"}
            name = ", ".join(filter(None, [label, "before training" if is_pale else ""]))
            mean_line(
                above, _ratios(of_weights), "radius", "ratio", colour_of(number), geometric=True, label=name, **look
            )
            if not is_pale:
                _shares(below, of_weights, colour_of(number))
    for ratio in LEVELS:
        above.axhline(ratio, color=GREY, linewidth=0.6, linestyle=":")
    above.set_xscale("log")
    above.set_yscale("log")
    above.set_ylim(0.9, None)
    above.set_ylabel(r"bound on $\|J\|_2$ / largest found")
    below.set_ylim(0, 1.05)
    below.set_ylabel("share of the largest operation")
    below.set_xlabel("radius of the ball (Frobenius norm over all tokens)")
    legend(figure, np.array([[above], [below]]))
    return figure


def _ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """Of each seed and radius, where the bound is of use."""
    by = rows.groupby(["seed", "radius", "kind"]).value.max().unstack().reset_index()
    by["ratio"] = by.bound / by.lower_bound
    return by[by.ratio <= HIGHEST]


def _shares(axes: Axes, rows: pd.DataFrame, colour: str) -> None:
    bounds = rows[(rows.kind == "bound") & np.isfinite(rows.value)]
    mean = bounds.groupby("radius").share.mean()
    axes.plot(mean.index, mean, color=colour, linewidth=0.8)
    for end, marker in MARKERS.items():
        of_kind = bounds[bounds.operation.str.endswith(end)]
        axes.plot(of_kind.radius, of_kind.share, marker, color=colour, markersize=4)
        if len(of_kind):
            axes.plot([], [], marker, color=INK, markersize=4, label=end.replace("_", " "))
