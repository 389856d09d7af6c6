"""The figure of the analysis `rollout`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import COLOURS, DASHES, FEW_SEEDS, GREY, PANEL, grid_of, legend, styled, title
from rankbench.runs.tables import mean_and_spread

LOWEST = 1e-6  # share of the first distance; smaller ones, which look like one point, are drawn here
HIGHEST = 1e3
MANY, SIDE_BY_SIDE = 4, 3  # the most facets with trajectories; columns of a figure without them


@styled
def draw_rollout(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Left: trajectories of each seed's tokens, on top of the true arcs. Right: the tokens' distance by step, of each
    seed and as a geometric mean.

    A row for each facet; many facets show only distances, side by side. Trajectories are of the trained weights if
    there are any.
    """
    figure, _, facets = grid_of(table, facet, 2)
    figure.clear()  # the two columns need different axes
    radius = table[table.step == 0].distance.iloc[0] / 2
    kinds = list(dict.fromkeys(table.weights))
    if len(facets) > MANY:
        rows_of_grid = -(-len(facets) // SIDE_BY_SIDE)
        figure.set_size_inches(PANEL[0] * SIDE_BY_SIDE, PANEL[1] * rows_of_grid + 0.7)
        grid = figure.subplots(rows_of_grid, SIDE_BY_SIDE, squeeze=False, sharex=True, sharey=True)
        of_distances = grid.flat
        for unused in grid.flat[len(facets) :]:
            unused.set_visible(False)
        for axes in grid[-1]:
            axes.set_xlabel("steps of free running")
    else:
        grid = figure.subplots(len(facets), 2, squeeze=False, sharex="col", sharey="col")
        of_distances = grid[:, 1]
        for axes, (label, rows) in zip(grid[:, 0], facets, strict=True):
            _trajectories(axes, rows[rows.weights == kinds[0]], radius)
            axes.set_title(title(f"{kinds[0]} weights", label))
            axes.set_ylabel("y")
        grid[-1, 0].set_xlabel("x")
        grid[-1, 1].set_xlabel("steps of free running")
    for axes, (label, rows) in zip(of_distances, facets, strict=False):
        for number, kind in enumerate(kinds):
            _distance(axes, rows[rows.weights == kind], radius, number, f"{kind} weights")
        axes.set_title(title(_rates(rows[rows.weights == kinds[0]]), label))
        if axes.get_subplotspec().is_first_col() or len(facets) <= MANY:
            axes.set_ylabel("distance / first distance\n(at least $10^{-6}$)")
    legend(figure, grid)
    return figure


def _trajectories(axes: Axes, rows: pd.DataFrame, radius: float) -> None:
    angle = np.linspace(0, np.pi, 100)
    for side in (-1, 1):  # drawn under the trajectories
        x, y = side * radius * np.cos(angle), side * radius * np.sin(angle)
        axes.plot(x, y, color=GREY, alpha=0.5, linewidth=4, label="true arcs", zorder=0)
    for (token, _, _), steps in rows.groupby(["token", "run", "seed"], sort=True):
        colour = COLOURS[token - 1]
        axes.plot(steps.x, steps.y, color=colour, alpha=0.6, linewidth=0.8, label=f"token {token}")
        axes.plot(steps.x.iloc[-1:], steps.y.iloc[-1:], color=colour, marker="os"[token - 1], markersize=3.5, mew=0)
    axes.set_xlim(-2 * radius, 2 * radius)
    axes.set_ylim(-1.6 * radius, 1.6 * radius)  # a run that leaves is cut off
    axes.set_aspect("equal", adjustable="box")


def _distance(axes: Axes, rows: pd.DataFrame, radius: float, number: int, label: str) -> None:
    colour, dashes = COLOURS[2 + number], DASHES[number]
    share = rows.assign(share=(rows.distance / (2 * radius)).clip(LOWEST, HIGHEST))
    for _, steps in share[share.token == 1].groupby(["run", "seed"]):
        axes.plot(steps.step, steps.share, color=colour, alpha=0.35, linewidth=0.6)
    # a run that has ended keeps its last distance, so that the mean is always over the same seeds
    by_seed = share[share.token == 1].pivot_table("share", "step", ["run", "seed"]).sort_index().ffill()
    whole = by_seed.melt(ignore_index=False, value_name="share").reset_index()
    summary = mean_and_spread(whole, ["step"], "share", geometric=True)
    axes.plot(summary.step, summary["mean"], color=colour, linestyle=dashes, linewidth=2, label=label)
    if summary.num_seeds.max() > FEW_SEEDS:
        axes.fill_between(summary.step, summary.low, summary.high, color=colour, alpha=0.2, linewidth=0)
    axes.set_yscale("log")
    axes.set_ylim(LOWEST / 2, 2 * HIGHEST)


def _rates(rows: pd.DataFrame) -> str:
    networks = rows.drop_duplicates(["run", "seed"])
    return f"{networks.collapsed.sum():.0f} of {len(networks)} collapse, {networks.escaped.sum():.0f} escape"
