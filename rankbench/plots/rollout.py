"""The figure of the analysis `rollout`."""

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import FEW_SEEDS, with_legend
from rankbench.plots.style import DASHES, GREY, colour_of
from rankbench.runs.tables import mean_and_spread

LOWEST = 1e-6  # share of the first distance; smaller ones, which look like one point, are drawn here
HIGHEST = 1e3


@styled
def draw_rollout(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Left: trajectories of each seed's tokens, on top of the true arcs. Right: the tokens' distance by step, of each
    seed and as a geometric mean.

    A row for each facet. Trajectories are of the trained weights if there are any.
    """
    figure, grid, facets = grid_of(table, facet, 2, share_y="col", share_x="col")
    radius = table[table.step == 0].distance.iloc[0] / 2
    kinds = list(dict.fromkeys(table.weights))
    for (left, right), (label, rows) in zip(grid, facets, strict=True):
        _trajectories(left, rows[rows.weights == kinds[0]], radius)
        left.set_title(title(f"{kinds[0]} weights", label))
        left.set_ylabel("y")
        for number, kind in enumerate(kinds):
            _distance(right, rows[rows.weights == kind], radius, number, f"{kind} weights")
        networks = rows[rows.weights == kinds[0]].drop_duplicates(["run", "seed"])
        outcomes = f"{networks.collapsed.sum():.0f} of {len(networks)} collapse, {networks.escaped.sum():.0f} escape"
        right.set_title(title(outcomes, label))
        right.set_ylabel("distance / first distance\n(at least $10^{-6}$)")
        if left.get_subplotspec().is_last_row():
            left.set_xlabel("x")
            right.set_xlabel("steps of free running")
    return with_legend(figure, grid)


def _trajectories(axes: Axes, rows: pd.DataFrame, radius: float) -> None:
    angle = np.linspace(0, np.pi, 100)
    for side in (-1, 1):  # drawn under the trajectories
        x, y = side * radius * np.cos(angle), side * radius * np.sin(angle)
        axes.plot(x, y, color=GREY, alpha=0.5, linewidth=4, label="true arcs", zorder=0)
    for (token, _, _), steps in rows.groupby(["token", "run", "seed"], sort=True):
        colour = colour_of(token - 1)
        axes.plot(steps.x, steps.y, color=colour, alpha=0.6, linewidth=0.8, label=f"token {token}")
        axes.plot(steps.x.iloc[-1:], steps.y.iloc[-1:], color=colour, marker="os"[token - 1], markersize=3.5, mew=0)
    axes.set_xlim(-2 * radius, 2 * radius)
    axes.set_ylim(-1.6 * radius, 1.6 * radius)  # a run that leaves is cut off
    axes.set_aspect("equal", adjustable="box")


def _distance(axes: Axes, rows: pd.DataFrame, radius: float, number: int, label: str) -> None:
    colour = colour_of(2 + number)
    share = rows[rows.token == 1].assign(share=(rows.distance / (2 * radius)).clip(LOWEST, HIGHEST))
    for _, steps in share.groupby(["run", "seed"]):
        axes.plot(steps.step, steps.share, color=colour, alpha=0.35, linewidth=0.6)
    # a run that has ended keeps its last distance, so that the mean is always over the same seeds
    by_seed = share.pivot_table("share", "step", ["run", "seed"]).sort_index().ffill()
    whole = by_seed.melt(ignore_index=False, value_name="share").reset_index()
    summary = mean_and_spread(whole, ["step"], "share", geometric=True)
    style = {"color": colour, "linestyle": DASHES[number], "linewidth": 1.6 * matplotlib.rcParams["lines.linewidth"]}
    axes.plot(summary.step, summary["mean"], label=label, **style)
    if summary.num_seeds.max() > FEW_SEEDS:
        axes.fill_between(summary.step, summary.low, summary.high, color=colour, alpha=0.2, linewidth=0)
    axes.set_yscale("log")
    axes.set_ylim(LOWEST / 2, 2 * HIGHEST)
