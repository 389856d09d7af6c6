"""The figure of the analysis `path_mass`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rankbench.plots.figure import empty_figure, facets_of, styled, title
from rankbench.plots.marks import line
from rankbench.plots.style import GREY, panel_size, small

CELLS = 12  # largest side of a map whose numbers are written into the cells


@styled
def draw_path_mass(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Mass and gradient mass by path length, and a layer x head map of the mass through every head; a row per facet.

    Sums that are no more than rounding are marked: by path length as in other figures, in the maps by < before a mass
    and ~ before a loss.
    """
    facets = facets_of(table, facet)
    width, height = panel_size()
    figure = empty_figure(width * 2, 0.9 * height * 2 * len(facets))
    grid = figure.subplots(2 * len(facets), 2, squeeze=False)
    for (by_length, by_gradient), (by_head, by_loss), (label, rows) in zip(grid[::2], grid[1::2], facets, strict=True):
        lengths = rows[rows.part == "length"]
        columns = {by_length: ("mass", "below_floor"), by_gradient: ("gradient_mass", "gradient_below_floor")}
        for number, (axes, (column, floor)) in enumerate(columns.items()):
            line(axes, lengths, "path_length", column, "", number, floor=floor)
            axes.axhline(0, color=GREY, linewidth=1)
            axes.set_xlabel("path length k")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if axes.get_legend_handles_labels()[1]:  # only marks at the floor of rounding have labels
                axes.legend(fontsize="small")
        by_length.set_title(title("sum S of all paths of a length", label))
        by_length.set_ylabel(r"mass $\|S_k\|/\|X_L\|$")
        by_gradient.set_title("its part in the loss, to first order")
        by_gradient.set_ylabel(r"$\langle \partial\,\mathrm{loss}/\partial X_L,\, S_k\rangle$ (nats)")
        heads = rows[rows.part == "head"].assign(harm=lambda head: head.loss_without - head.whole_loss)
        mass = r"mass $\|M\|/\|X_L\|$"
        _map(figure, by_head, heads, "mass", "below_floor", "sum M of all paths through a head", mass)
        if heads.harm.isna().all():
            for axes in (by_gradient, by_loss):
                _say(axes, "no targets, so no loss")
        else:
            _map(figure, by_loss, heads, "harm", "loss_below_floor", "loss added by cutting these", "nats per token")
    return figure


def _say(axes: Axes, words: str) -> None:
    """Put words in the place of a plot."""
    axes.clear()
    axes.set_axis_off()
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes)


def _map(figure: Figure, axes: Axes, heads: pd.DataFrame, value: str, floor: str, name: str, unit: str) -> None:
    """Draw the mean over seeds of a value: layers upwards, heads to the right. The colours begin at 0, or below it.

    floor: the column that is above 0 where the value is no more than rounding.
    """
    if heads[value].isna().all():
        return _say(axes, f"{name}:\nundefined, as the output is zero")
    mean = heads.pivot_table(value, "layer", "head", "mean")
    at_floor = (heads[floor] > 0).groupby([heads["layer"], heads["head"]]).all() if floor in heads else pd.Series()
    signs = dict.fromkeys(at_floor.index[at_floor.astype(bool)], "<" if value == "mass" else "~")
    image = axes.imshow(mean, cmap="cividis", origin="lower", aspect="auto", vmin=min(0, mean.min(axis=None)))
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
    axes.set_title(name)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    figure.colorbar(image, ax=axes, label=unit)
