"""Figures over the steps of a training: its curves, the analysis `dynamics`, and trainings that are not ours
(rankbench.observe)."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from rankbench.measures.attention_matrices import ATTENTION_FLOORS
from rankbench.measures.states import OF_RESIDUAL, STATE_FLOORS
from rankbench.plots.figure import facets_of, grid_of, in_words, styled, title
from rankbench.plots.marks import is_wide, line, log_y, mean_line, spans_orders, whole_numbers, with_legend
from rankbench.plots.pages import one_facet
from rankbench.plots.readings import in_steps
from rankbench.plots.style import INK, colour_of, colour_of_depth, dashes_of
from rankbench.runs.tables import RUN_COLUMNS, last_of_layer

FLOORS = (*STATE_FLOORS, *ATTENTION_FLOORS)
AXES = (*RUN_COLUMNS, "step", "layer", "sublayer", "head")
LINES = 6  # the most layers shown besides the embedding
LABELS = {
    "qk_norm": r"$||W_{QK}||_2$ of a head",
    "vo_norm": r"$||W_{VO}||_2$ of a head",
    "lipschitz_inf": r"bound on Lip$_\infty$ of attention",
    "lipschitz_2": r"bound on Lip$_2$ of attention",
}
STATES = ("relative_residual", "effective_rank", "mean_cosine")
ATTENTION = ("attention_entropy", "sink_weight", "largest_logit")
WEIGHT = "weight"  # the column of a parameter's name without the number of its layer


@styled
def draw_metrics(table: pd.DataFrame, facet: str | None = None) -> Figure:
    """Loss and, where the task has one, accuracy over training steps, a line for each split; a row for each facet."""
    metrics = [name for name in ("loss", "accuracy") if name in table and table[name].notna().any()]
    of_classes = ["accuracy" in rows.dropna(axis=1, how="all") for _, rows in facets_of(table, facet)]
    is_mixed = len({*of_classes}) > 1  # tasks whose losses have other units
    figure, grid, facets = grid_of(table, facet, len(metrics), share_y=not is_mixed and "col")
    splits, lowest, wide = list(dict.fromkeys(table.split)), {}, []
    for row, has_classes, (label, rows) in zip(grid, of_classes, facets, strict=True):
        unit = "nats per token" if has_classes else "squared error"
        for axes, metric in zip(row, metrics, strict=True):
            if rows[metric].isna().all():
                axes.set_axis_off()
                continue
            logarithmic = metric == "loss" and is_wide((rows if is_mixed else table).loss)
            for number, split in enumerate(splits):
                of_split = rows[rows.split == split].dropna(subset=[metric])
                if len(of_split):
                    style = {"linestyle": dashes_of(number), "label": in_words(split)}
                    mean_line(axes, of_split, "step", metric, colour_of(number), geometric=logarithmic, **style)
            if logarithmic:
                wide.append(axes)
            whole_numbers(axes, "training step")
            axes.set_ylabel(f"loss ({unit})" if metric == "loss" else metric)
            axes.set_title(title(label))
            axes.tick_params(labelleft=True)
            lowest[metric] = axes
    for axes in wide:  # once all is drawn, as rows may share their axis
        log_y(axes)
    for axes in lowest.values():
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("training step")
    return with_legend(figure, grid)


@styled
def draw_dynamics(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Each metric against training steps, a line for every layer (of many layers a few, with the first and the last).

    The axis of a metric is logarithmic where residuals, norms or logits span orders. Of networks with one layer each
    facet is a line, not a row. A layer's state is its output; metrics of heads are means over the heads. A residual
    below its rounding error is drawn at that error and marked, and so are other metrics of it.
    """
    metrics = [
        name for name in table if name not in (*AXES, *FLOORS, facet) and pd.api.types.is_numeric_dtype(table[name])
    ]
    finite = {name: _with_floor(table[np.isfinite(table[name])], name)[name] for name in metrics}
    wide = [name for name in metrics if re.search("norm$|residual|logit", name) and is_wide(finite[name])]
    wide += [name for name in metrics if name.startswith("lipschitz_")]  # bounds grow by powers of the weights
    values = list(dict.fromkeys(table[facet])) if facet and table.layer.max() == 1 else []
    layers = [0, *in_steps(sorted(table.layer[table.layer > 0].unique()), LINES)]
    figure, grid, facets = grid_of(table, None if values else facet, len(metrics), share_y="col")
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, metric in zip(row, metrics, strict=True):
            rows_of_metric = _with_floor(rows[np.isfinite(rows[metric])], metric)
            is_geometric = metric in wide and finite[metric].min() > 0
            if (rows_of_metric.sublayer == "weights").any():
                rows_of_metric = rows_of_metric[rows_of_metric.sublayer == "weights"]
            elif (rows_of_metric.sublayer == "mlp").any():  # else the metric is of attention only
                rows_of_metric = last_of_layer(rows_of_metric)
            for number, value in enumerate(values):
                of_value = rows_of_metric[(rows_of_metric[facet] == value) & (rows_of_metric.layer == 1)]
                if len(of_value):
                    name = f"{facet}={value}"
                    line(axes, of_value, "step", metric, name, number, floor="below", geometric=is_geometric)
            for layer in [] if values else sorted({*layers} & {*rows_of_metric.layer}):
                style: Any = {"label": "embedding" if layer == 0 else f"layer {layer}", "geometric": is_geometric}
                colour, of_layer = colour_of_depth(layer, table.layer.max()), rows_of_metric.layer == layer
                mean_line(axes, rows_of_metric[of_layer], "step", metric, colour, floor="below", **style)
            whole_numbers(axes, "training step")
            if rows_of_metric.empty:
                axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
                axes.tick_params(left=False, labelleft=False)
            axes.set_ylabel(LABELS.get(metric, metric.replace("_", " ")))
            axes.set_title(title(label))
    for axes, metric in zip(grid[0], metrics, strict=True):
        if metric in wide and len(finite[metric]):
            log_y(axes)
    return with_legend(figure, grid)


def _with_floor(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Add a column `below`, whether rounding explains the residual, and raise residuals to their rounding error."""
    prefix = "attention_" if metric.startswith("attention_") else ""
    if metric not in OF_RESIDUAL or f"{prefix}below_floor" not in rows:
        return rows.assign(below=False)
    rows = rows.assign(below=rows[f"{prefix}below_floor"] > 0)
    floors = {"residual": "noise_floor", f"{prefix}relative_residual": f"{prefix}relative_noise_floor"}
    return rows.assign(**{metric: rows[metric].clip(lower=rows[floors[metric]])}) if metric in floors else rows


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


OBSERVED_FIGURES: dict[str, Callable[..., Figure]] = {
    "observed_states": draw_observed_states,
    "observed_attention": draw_observed_attention,
    "observed_weights": draw_observed_weights,
}
FIGURES = {"metrics": draw_metrics, **OBSERVED_FIGURES}
