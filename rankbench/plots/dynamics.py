"""The figure of the analysis `dynamics`."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rankbench.measures.attention_matrices import ATTENTION_FLOORS
from rankbench.measures.states import OF_RESIDUAL, STATE_FLOORS
from rankbench.plots.figure import below_rounding, grid_of, legend, spread, styled, title
from rankbench.runs.tables import WHO, last_of_layer, mean_and_spread

FLOORS = (*STATE_FLOORS, *ATTENTION_FLOORS)
AXES = (*WHO, "step", "layer", "sublayer", "head")
LINES = 6  # layers shown, where there are more
FLAT = 1.01  # largest over smallest bound, below which it has not moved
LABELS = {
    "qk_norm": r"$||W_{QK}||_2$ of a head",
    "vo_norm": r"$||W_{VO}||_2$ of a head",
    "lipschitz_inf": r"bound on Lip$_\infty$ of attention",
    "lipschitz_2": r"bound on Lip$_2$ of attention",
}


@styled
def draw_dynamics(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Each metric against training steps, a line for every layer (of many some, the first and the last among them).

    A column for each metric, a row for each facet. The state of a layer is the one that it leaves; metrics of heads are
    means over them. A residual that is below its rounding error is drawn there, and marked, as is any other metric of
    such a residual.
    """
    metrics = [
        name for name in table if name not in (*AXES, *FLOORS, facet) and pd.api.types.is_numeric_dtype(table[name])
    ]
    figure, grid, facets = grid_of(table, facet, len(metrics), share_y=False)
    colours = matplotlib.colormaps["viridis"]
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            mine = _with_floor(rows[np.isfinite(rows[metric])], metric)
            if (mine.sublayer == "weights").any():
                mine = mine[mine.sublayer == "weights"]
            elif (mine.sublayer == "mlp").any():  # else it is of attention alone
                mine = last_of_layer(mine)
            layers = np.sort(mine.layer.unique())
            for layer in layers[np.linspace(0, len(layers) - 1, min(len(layers), LINES)).round().astype(int)]:
                summary = mean_and_spread(mine[mine.layer == layer], ["step"], metric)
                colour = colours(0.9 * layer / max(table.layer.max(), 1))
                name = "embedding" if layer == 0 else f"layer {layer}"
                below = summary.step.isin(mine.step[(mine.layer == layer) & mine.below])
                axes.plot(summary.step, summary["mean"].mask(below), color=colour, label=name)
                spread(axes, summary.step, summary, colour)
                below_rounding(axes, summary.step, summary["mean"], below, colour)
            if mine.empty:
                axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
                axes.set_yticks([])
            elif metric.startswith("lipschitz_"):  # bounds grow by powers of the weights
                axes.set_yscale("log")
                if mine[metric].max() < FLAT * mine[metric].min():  # rounding would fill the panel
                    axes.set_ylim(mine[metric].min() / 2, 2 * mine[metric].max())
            axes.set_xlabel("training step")
            axes.set_ylabel(LABELS.get(metric, metric.replace("_", " ")))
            axes.set_title(title(label))
    legend(figure, grid)
    return figure


def _with_floor(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """The rows with a column `below`: whether the metric is of a residual that rounding explains; no residual is below
    its floor."""
    prefix = "attention_" if metric.startswith("attention_") else ""
    if metric not in OF_RESIDUAL or f"{prefix}below_floor" not in rows:
        return rows.assign(below=False)
    rows = rows.assign(below=rows[f"{prefix}below_floor"] > 0)
    floors = {"residual": "noise_floor", f"{prefix}relative_residual": f"{prefix}relative_noise_floor"}
    return rows.assign(**{metric: rows[metric].clip(lower=rows[floors[metric]])}) if metric in floors else rows
