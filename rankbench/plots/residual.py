"""The figure of the analysis `residual`, and one of a network that is not ours, with residual, rank and paths."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import empty_figure, grid_of, in_words, of_weights_in_words, styled, title
from rankbench.plots.marks import floor, line, log_y, spans_orders, whole_numbers, with_legend
from rankbench.plots.style import INK, panel_size
from rankbench.runs.tables import last_of_layer

AFTER_ALL = "residual behind the last layer over that of the input"  # a published series
APART = "all tokens and another view differ by more than a factor of 2"
RESIDUAL = r"relative residual $\|R\|_{1,\infty}/\|X\|_{1,\infty}$"
# panels of the overview
METRICS = {"relative_residual": RESIDUAL, "effective_rank": "effective rank"}
SHARES = {"norm_share": "share of the size of all sums", "path_share": "share of the number of paths"}


@styled
def draw_residual(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Relative residual by layer, a line for each variant; a column for each kind of weights, a row for each facet.

    A residual below its rounding error is drawn at that error and marked.
    """
    last = last_of_layer(table)
    # a mean over sequences is rounding if it is no larger; that some of them are says little about the others
    last = last.assign(below_floor=last.relative_residual <= last.relative_noise_floor)
    last = last.assign(relative_residual=last.relative_residual.clip(lower=last.relative_noise_floor))
    weights = list(dict.fromkeys(last.weights))
    last = with_lines_of_views(last)
    figure, grid, facets = grid_of(last, facet, len(weights))
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, kind in zip(row, weights, strict=True):
            for number, name in enumerate(last.line.unique()):
                of_line = rows[(rows.weights == kind) & (rows.line == name)]
                line(axes, of_line, "layer", "relative_residual", name, number, geometric=True, floor="below_floor")
            _mark_apart(axes, rows[rows.weights == kind])
            _claimed(axes, rows[(rows.weights == kind) & (rows.layer == 0)], published)
            axes.set_yscale("log")
            axes.set_title(title(f"{kind} weights", label))
            whole_numbers(axes, "layer (0: embedding)")
            floor(axes, rows[rows.weights == kind].groupby("layer").relative_noise_floor.max())
        row[0].set_ylabel(RESIDUAL)
    log_y(grid[0][0])
    return with_legend(figure, grid)


def with_lines_of_views(last: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column `line`, the variant in words and the view of its tokens; without the views that are
    nowhere apart from that of all tokens, which has the variant's name alone."""
    if "view" not in last:
        return last.assign(line=last.variant.map(in_words))
    if (last.view == "all").any():
        lines, apart = (pd.MultiIndex.from_frame(rows[["variant", "view"]]) for rows in (last, views_apart(last)))
        last = last[(last.view == "all") | lines.isin(apart)]
    views = last.view.map(lambda name: "" if name == "all" else f", {in_words(name)}")
    return last.assign(line=last.variant.map(in_words) + views)


def views_apart(last: pd.DataFrame, metric: str = "relative_residual") -> pd.DataFrame:
    """weights, variant, view and layer where the metric of a view and that of all tokens, both above rounding, differ
    by more than a factor of 2; `all` and `value`: their means over seeds."""
    measured = last[last.below_floor == 0] if "below_floor" in last else last
    mean = measured.pivot_table(metric, ["weights", "variant", "layer"], "view", "mean", sort=False)
    if "all" not in mean:
        return pd.DataFrame(columns=["weights", "variant", "layer", "view", "value", "all"])
    long = mean.drop(columns="all").melt(ignore_index=False).dropna().join(mean["all"]).reset_index()
    return long[np.log2(long["value"] / long["all"]).abs() > 1]


def _claimed(axes: Axes, inputs: pd.DataFrame, published: pd.DataFrame | None) -> None:
    """The claimed residual, which is a multiple of the input's."""
    for row in () if published is None else published[published.series == AFTER_ALL].itertuples():
        level = row.value * np.exp(np.log(inputs.relative_residual).mean())
        axes.axhline(level, color=INK, linestyle="--", linewidth=0.8, zorder=3, label=f"claimed ({row.source})")


def _mark_apart(axes: Axes, rows: pd.DataFrame) -> None:
    """A cross where all tokens and another view differ by more than a factor of 2: a few tokens decide there."""
    if "view" in rows and len(apart := views_apart(rows)):
        axes.plot(apart.layer, apart["all"], "x", color=INK, markersize=8, zorder=3, label=APART)


def frozen_lengths(paths: pd.DataFrame) -> pd.DataFrame:
    """The sums of all frozen paths of each length, of the first kind of weights, from the table of `paths`."""
    lengths = paths[(paths.scheme == "frozen") & (paths.selection == "all")]
    return lengths if "weights" not in lengths else lengths[lengths.weights == lengths.weights.iloc[0]]


@styled
def draw_overview(residual: pd.DataFrame, paths: pd.DataFrame, heading: str) -> Figure:
    """Relative residual and effective rank by layer, a line for each kind of weights, and for each view of the tokens
    that differs by more than a factor of 2 in the residual; and the share of frozen paths by length."""
    states = last_of_layer(residual)
    states = with_lines_of_views(states[states.variant == "full"].assign(variant=""))
    states = states.assign(line=states.weights.map(of_weights_in_words) + states.line)
    width, height = panel_size()
    figure = empty_figure(2.4 * width, 0.9 * height + 0.9)
    grid = figure.subplots(1, 3, squeeze=False)
    of_layers, of_lengths = grid[0, :2], grid[0, 2]
    for axes, (metric, name) in zip(of_layers, METRICS.items(), strict=True):
        for number, label in enumerate(states.line.unique()):
            line(axes, states[states.line == label], "layer", metric, label, number)
        axes.set_ylim(0, 1.05 * states[metric].max())
        axes.set_title(name)
        whole_numbers(axes, "layer (0: embedding)")
    if spans_orders(states.relative_residual):
        of_layers[0].autoscale(axis="y")
        log_y(of_layers[0])
    for number, (column, name) in enumerate(SHARES.items(), states.line.nunique()):
        line(of_lengths, frozen_lengths(paths), "path_length", column, name, number)
    of_lengths.set_ylim(bottom=0)
    of_lengths.set_title("frozen paths")
    whole_numbers(of_lengths, "path length (heads used)")
    figure.suptitle(heading, fontsize="medium")
    return with_legend(figure, grid)
