"""The figures of a training that is not ours (rankbench.observe), against its steps."""

import re
from collections.abc import Callable

import matplotlib
import pandas as pd
from matplotlib.figure import Figure

from rankbench.measures.states import STATE_FLOORS
from rankbench.plots.dynamics import draw_dynamics
from rankbench.plots.figure import grid_of, legend, spans_orders, spread, styled, title
from rankbench.plots.pages import one_facet
from rankbench.runs.tables import WHO, mean_and_spread

STATES = ("relative_residual", "effective_rank", "mean_cosine")
ATTENTION = ("attention_entropy", "sink_weight", "largest_logit")
WEIGHT = "weight"  # the column of a parameter's name without the number of its layer


def draw_observed_states(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Residual, rank and cosine of the states against steps, a line for each layer.

    Drawn as `dynamics`, of all tokens; the table also has them without sink tokens, and with each token of length 1.
    """
    table = table[table.view == "all"]
    return draw_dynamics(_chosen(table, STATES, facet), None, facet)


def draw_observed_attention(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Entropy, sinks and largest logit against steps, a line for each layer, the mean of its heads."""
    return draw_dynamics(_chosen(table.assign(sublayer="weights"), ATTENTION, facet), None, facet)


def _chosen(table: pd.DataFrame, metrics: tuple[str, ...], facet: str | None) -> pd.DataFrame:
    axes = [*WHO, "step", "layer", "sublayer", "head", *([facet] if facet else [])]
    chosen = [name for name in (*metrics, *STATE_FLOORS) if name in table]
    return table[[*dict.fromkeys(name for name in axes if name in table), *chosen]]


@styled
def draw_observed_weights(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Spectral norm against steps: a panel for each parameter, with a line for each layer that has one of its name."""
    numbers = table.parameter.str.extract(r"\.(\d+)\.", expand=False)
    table = table.assign(**{WEIGHT: [re.sub(r"\.\d+\.", ".*.", name, count=1) for name in table.parameter]})
    table["number"] = numbers.astype(float).fillna(-1).astype(int)  # -1: of no layer
    by_panel, panels = WEIGHT, table
    if facet is not None:
        panels, by_panel = one_facet(table, [WEIGHT, facet]), WEIGHT
    figure, grid, facets = grid_of(panels, by_panel, 1, share_y=False)
    colours = matplotlib.colormaps["viridis"]
    for (axes,), (label, rows) in zip(grid, facets, strict=True):
        for number, rows_of_layer in rows.groupby("number"):
            summary = mean_and_spread(rows_of_layer, ["step"], "spectral_norm")
            name = "of no layer" if number < 0 else f"layer {number + 1}"
            colour = "#000000" if number < 0 else colours(0.9 * (number + 1) / (table.number.max() + 1))
            axes.plot(summary.step, summary["mean"], color=colour, label=name)
            spread(axes, summary.step, summary, colour)
        if spans_orders(rows.spectral_norm):
            axes.set_yscale("log")
        axes.set_title(title(label.removeprefix(f"{WEIGHT}=")))
        axes.set(xlabel="training step", ylabel="spectral norm")
    legend(figure, grid)
    return figure


FIGURES: dict[str, Callable[..., Figure]] = {
    "observed_states": draw_observed_states,
    "observed_attention": draw_observed_attention,
    "observed_weights": draw_observed_weights,
}
