"""The figure of the analysis `signal_map`."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import empty_figure, styled
from rankbench.plots.style import panel_size

PANELS = {"theory_cosine": "theory", "initial_cosine": "measured at the start", "test_accuracy": "after training"}
LABELS = {"initial_cosine": "cosine of two tokens", "test_accuracy": "test accuracy"}


@styled
def draw_signal_map(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Maps over depth and inverse temperature: the cosine of two tokens after the last layer in theory and as measured
    before training, and test accuracy after it; dashed, the critical inverse temperature of the first layer."""
    columns = [name for name in PANELS if name in table]
    width, height = panel_size()
    figure = empty_figure(2.1 * width, 0.95 * height)
    grid = figure.subplots(1, len(columns), squeeze=False, sharex=True, sharey=True)[0]
    for axes, name in zip(grid, columns, strict=True):
        means = table.pivot_table(name, "beta", "layers", "mean", dropna=False)
        edges = _edges(means.columns.to_numpy(float)), np.exp(_edges(np.log(means.index.to_numpy(float))))
        image = axes.pcolormesh(*edges, means.to_numpy(float), cmap="cividis", vmin=0, vmax=1, rasterized=True)
        axes.set_yscale("log")
        if table.critical_beta.notna().any():
            axes.axhline(critical := table.critical_beta.mean(), color="white", linestyle="--", linewidth=1)
            axes.annotate(
                r"$\beta_c$", (0, critical), (3, 2), axes.get_yaxis_transform(), "offset points", color="white"
            )
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("layers")
        axes.set_title(PANELS[name])
        if name in LABELS:
            which = [grid[columns.index(name)]] if name == "test_accuracy" else list(grid[: columns.index(name) + 1])
            figure.colorbar(image, ax=which, label=LABELS[name], fraction=0.06, pad=0.03)
    grid[0].set_ylabel(r"inverse temperature $\beta$")
    return figure


def _edges(values: np.ndarray) -> np.ndarray:
    """Edges of cells around increasing values: half-way between them."""
    if len(values) == 1:
        return values[0] + np.array([-0.5, 0.5])
    between = (values[1:] + values[:-1]) / 2
    return np.concatenate([[2 * values[0] - between[0]], between, [2 * values[-1] - between[-1]]])
