"""The figures of a training that is not ours (rankbench.observe), against its steps."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from rankbench.measures.states import STATE_FLOORS
from rankbench.plots.dynamics import AXES, draw_dynamics
from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import mean_line, spans_orders, with_legend
from rankbench.plots.pages import one_facet
from rankbench.plots.style import INK, colour_of_depth

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
    names = dict.fromkeys((*AXES, facet, *metrics, *STATE_FLOORS))
    return table[[name for name in names if name in table]]


@styled
def draw_observed_weights(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Spectral norm against steps: a panel for each parameter, with a line for each layer that has one of its name."""
    numbers = table.parameter.str.extract(r"\.(\d+)\.", expand=False)
    table = table.assign(**{WEIGHT: table.parameter.str.replace(r"\.\d+\.", ".*.", n=1, regex=True)})
    table["number"] = numbers.astype(float).fillna(-1).astype(int)  # -1: of no layer
    panels = one_facet(table, [WEIGHT, facet] if facet else [WEIGHT])
    figure, grid, facets = grid_of(panels, WEIGHT, 1, share_y=False)
    wide = any(spans_orders(rows.spectral_norm) for _, rows in facets)
    for (axes,), (label, rows) in zip(grid, facets, strict=True):
        for number, rows_of_layer in rows.groupby("number"):
            name = "of no layer" if number < 0 else f"layer {number + 1}"
            colour = INK if number < 0 else colour_of_depth(number + 1, table.number.max() + 1)
            mean_line(axes, rows_of_layer, "step", "spectral_norm", colour, label=name)
        if wide:
            axes.set_yscale("log")
        axes.set_title(title(label.removeprefix(f"{WEIGHT}=")))
        axes.set(xlabel="training step", ylabel="spectral norm")
    return with_legend(figure, grid)


FIGURES: dict[str, Callable[..., Figure]] = {
    "observed_states": draw_observed_states,
    "observed_attention": draw_observed_attention,
    "observed_weights": draw_observed_weights,
}
