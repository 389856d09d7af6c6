"""The figure of the analysis `path_mass`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import empty_figure, facets_of, styled, title
from rankbench.plots.marks import line, with_legend
from rankbench.plots.style import GREY, panel_size, small

CELLS = 12  # largest side of a map whose numbers are written into the cells
HEADINGS = "sum M of all paths through a head", "loss added by cutting these"
UNITS = {"mass": r"mass $\|M\|/\|X_L\|$", "harm": "nats per token"}
LOW = 1.5  # inches, height of a map where there are several
LINES = {"mass": "below_floor", "gradient_mass": "gradient_below_floor"}


@styled
def draw_path_mass(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Mass and gradient mass by path length, and a layer x head map of the mass through every head, with the same
    colours in all maps; a line and a row of maps per facet.

    Sums that are no more than rounding are marked: by path length as in other figures, in the maps by < before a mass
    and ~ before a loss.
    """
    facets = facets_of(table, facet)
    width, height = panel_size()
    map_height = 0.9 * height if len(facets) == 1 else LOW
    figure = empty_figure(width * 2, 0.9 * height + map_height * len(facets))
    heights = [0.9 * height, *[map_height] * len(facets)]
    grid = figure.subplots(1 + len(facets), 2, squeeze=False, height_ratios=heights)
    for number, (label, rows) in enumerate(facets):
        lengths = rows[rows.part == "length"]
        for axes, (column, floor) in zip(grid[0], LINES.items(), strict=True):
            line(axes, lengths, "path_length", column, label, number, floor=floor)
    for axes in grid[0]:
        axes.axhline(0, color=GREY, linewidth=1)
        axes.set_xlabel("path length k")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[0, 0].set_title("sum S of all paths of a length")
    grid[0, 0].set_ylabel(r"mass $\|S_k\|/\|X_L\|$")
    grid[0, 1].set_title("its part in the loss, to first order")
    grid[0, 1].set_ylabel(r"$\langle \partial\,\mathrm{loss}/\partial X_L,\, S_k\rangle$ (nats)")
    heads = table[table.part == "head"].assign(harm=lambda head: head.loss_without - head.whole_loss)
    for axes, column, heading in zip(grid[1:].T, ("mass", "harm"), HEADINGS, strict=True):
        if heads[column].isna().all():
            is_mass = column == "mass"
            why = f"{heading}:\nundefined, as the output is zero" if is_mass else "no targets, so no loss"
            for other in axes if is_mass else (grid[0, 1], *axes):
                _say(other, why)
            continue
        _maps(figure, axes, facets_of(heads, facet), column, heading)
    return with_legend(figure, grid[:1])


def _say(axes: Axes, words: str) -> None:
    """Put words in the place of a plot."""
    axes.clear()
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)


def _maps(figure: Figure, column: np.ndarray, facets: list[tuple[str, pd.DataFrame]], value: str, heading: str) -> None:
    """Draw the mean over seeds of a value, a map for each facet: layers upwards, heads to the right. The colours begin
    at 0, or below it."""
    means = [heads.pivot_table(value, "layer", "head", "mean") for _, heads in facets]
    low, high = min(0, *(mean.min(axis=None) for mean in means)), max(mean.max(axis=None) for mean in means)
    for axes, (label, heads), mean in zip(column, facets, means, strict=True):
        image = axes.imshow(mean, cmap="cividis", origin="lower", aspect="auto", vmin=low, vmax=high)
        _finish(axes, heads, mean, image, value)
        axes.set_title(title(heading if axes is column[0] else "", label))
    column[-1].set_xlabel("head")
    figure.colorbar(image, ax=list(column), label=UNITS[value])


def _finish(axes: Axes, heads: pd.DataFrame, mean: pd.DataFrame, image: AxesImage, value: str) -> None:
    """Ticks of a map, and its numbers if it is small, with a sign before those that are no more than rounding."""
    floor = "below_floor" if value == "mass" else "loss_below_floor"
    at_floor = (heads[floor] > 0).groupby([heads["layer"], heads["head"]]).all() if floor in heads else pd.Series()
    signs = dict.fromkeys(at_floor.index[at_floor.astype(bool)], "<" if value == "mass" else "~")
    num_layers, num_heads = mean.shape
    axes.fmt_xdata = lambda place: f"{place + mean.columns[0]:g}"  # heads and layers count from 1
    axes.fmt_ydata = lambda place: f"{place + mean.index[0]:g}"
    for set_ticks, names in ((axes.set_xticks, mean.columns), (axes.set_yticks, mean.index)):
        tick_values = names[:: max(1, len(names) // CELLS)]
        set_ticks(tick_values - names[0], [f"{number:g}" for number in tick_values])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if max(num_layers, num_heads) <= CELLS:
        middle = np.asarray(image.norm(mean.to_numpy()))
        for j, k in np.argwhere(np.isfinite(mean.to_numpy())):
            ink = "black" if middle[j, k] > 0.5 else "white"
            sign = signs.get((mean.index[j], mean.columns[k]), "")
            axes.text(k, j, f"{sign}{mean.iloc[j, k]:.2g}", ha="center", va="center", fontsize=small(6), color=ink)
    axes.set_ylabel("layer")
