"""The figure of the analysis `dynamics`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rankbench.measures.attention_matrices import ATTENTION_FLOORS
from rankbench.measures.states import OF_RESIDUAL, STATE_FLOORS
from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import is_wide, line, mean_line, with_legend
from rankbench.plots.readings import in_steps
from rankbench.plots.style import colour_of_depth
from rankbench.runs.tables import RUN_COLUMNS, last_of_layer

FLOORS = (*STATE_FLOORS, *ATTENTION_FLOORS)
AXES = (*RUN_COLUMNS, "step", "layer", "sublayer", "head")
LINES = 6  # the most layers shown
FLAT = 1.01  # ratio of largest to smallest bound below which the bound is constant
LABELS = {
    "qk_norm": r"$||W_{QK}||_2$ of a head",
    "vo_norm": r"$||W_{VO}||_2$ of a head",
    "lipschitz_inf": r"bound on Lip$_\infty$ of attention",
    "lipschitz_2": r"bound on Lip$_2$ of attention",
}


@styled
def draw_dynamics(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Each metric against training steps, a line for every layer (of many layers a few, with the first and the last).

    A column for each metric, with one axis; a row for each facet, or a line if the networks have one layer. A layer's
    state is its output; metrics of heads are means over the heads. A residual below its rounding error is drawn at that
    error and marked, and so are other metrics of it.
    """
    metrics = [
        name for name in table if name not in (*AXES, *FLOORS, facet) and pd.api.types.is_numeric_dtype(table[name])
    ]
    finite = {name: table[name][np.isfinite(table[name])] for name in metrics}
    wide = [name for name in metrics if name.endswith("_norm") and is_wide(finite[name])]
    values = list(dict.fromkeys(table[facet])) if facet and table.layer.max() == 1 else []
    figure, grid, facets = grid_of(table, None if values else facet, len(metrics), share_y="col")
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            rows_of_metric = _with_floor(rows[np.isfinite(rows[metric])], metric)
            if (rows_of_metric.sublayer == "weights").any():
                rows_of_metric = rows_of_metric[rows_of_metric.sublayer == "weights"]
            elif (rows_of_metric.sublayer == "mlp").any():  # else the metric is of attention only
                rows_of_metric = last_of_layer(rows_of_metric)
            for number, value in enumerate(values):
                of_value = rows_of_metric[(rows_of_metric[facet] == value) & (rows_of_metric.layer == 1)]
                if len(of_value):
                    line(axes, of_value, "step", metric, f"{facet}={value}", number, floor="below")
            for layer in [] if values else in_steps(sorted(rows_of_metric.layer.unique()), LINES):
                of_layer = rows_of_metric[rows_of_metric.layer == layer]
                colour = colour_of_depth(layer, table.layer.max())
                name = "embedding" if layer == 0 else f"layer {layer}"
                mean_line(axes, of_layer, "step", metric, colour, floor="below", label=name)
            if rows_of_metric.empty:
                axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
                axes.tick_params(left=False, labelleft=False)
            elif metric.startswith("lipschitz_") or metric in wide:  # bounds grow by powers of the weights
                axes.set_yscale("log")
                bounds = finite[metric]  # of all rows, which share their axis
                if bounds.max() < FLAT * bounds.min():  # rounding would fill the panel
                    axes.set_ylim(bounds.min() / 2, 2 * bounds.max())
            axes.set_xlabel("training step")
            axes.set_ylabel(LABELS.get(metric, metric.replace("_", " ")))
            axes.set_title(title(label))
    return with_legend(figure, grid)


def _with_floor(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Add a column `below`, whether rounding explains the residual, and raise residuals to their rounding error."""
    prefix = "attention_" if metric.startswith("attention_") else ""
    if metric not in OF_RESIDUAL or f"{prefix}below_floor" not in rows:
        return rows.assign(below=False)
    rows = rows.assign(below=rows[f"{prefix}below_floor"] > 0)
    floors = {"residual": "noise_floor", f"{prefix}relative_residual": f"{prefix}relative_noise_floor"}
    return rows.assign(**{metric: rows[metric].clip(lower=rows[floors[metric]])}) if metric in floors else rows
