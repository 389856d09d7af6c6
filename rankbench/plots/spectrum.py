"""The figure of the analysis `spectrum`."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, of_weights_in_words, styled, title, uncounted_in_words
from rankbench.plots.marks import is_wide, level, line, whole_numbers, with_legend
from rankbench.plots.style import GREY, colour_of

PANELS = {
    "mass": ("sum $S_k$ of all paths of k heads", r"mass $\|S_k\|_F/\|X\|_F$"),
    "error_upto": ("all longer paths left out", r"$\|X - \sum_{j\leq k} S_j\|_F/\|X\|_F$"),
    "loss_upto": ("read out: paths of up to k heads", "loss (nats per token)"),
    "kl_upto": ("their distance from the whole network", "divergence (nats per token)"),
}
ABOUT_X = ("mass", "error_upto")
FLOORS = {"error_upto": "error_below_floor", "kl_upto": "kl_below_floor"}

KINDS = {"states": "X: last states", "logits": "X: logits less their mean", "output": "X: output"}


@styled
def draw_spectrum(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Mass and error by path length of the first kind of X that each run has, and loss and divergence of the output; a
    line for each kind of weights. A dotted level is the part of X that depends on no input. Where the table has rows of
    layers, the lengths that the state after each layer needs: the line for 1 %, the shade from 5 to .1 %.

    Of one seed, the band is the 95 % bootstrap interval over sequences.
    """
    layers, table = (table[of] for of in (table.part == "layer", table.part != "layer"))
    order = table.of.map(list(KINDS).index)
    table = table[order == order.groupby(table.run).transform("min")]
    (about, *others) = [KINDS[kind] for kind in KINDS if kind in set(table.of)]
    about = "X: states, else output" if others else about
    drawn = [name for name in PANELS if not table[name].isna().all()]
    lengths = {name: table[table.part == "length"] for name in drawn}
    for name, floor in FLOORS.items():  # the others are rounding alone
        if name in drawn:
            lengths[name] = lengths[name][lengths[name][floor] == 0]
    wide = [name for name, rows in lengths.items() if is_wide(rows[name][rows[name] > 0])]
    # a layer's number and the longest length that it has are nearly the same, so x can be shared
    figure, grid, facets = grid_of(table, facet, len(drawn) + (not layers.empty), share_y=False)
    names = {weights: _named(weights, rows) for weights, rows in table.groupby("weights", sort=False)}
    for row, (label, of_facet) in zip(grid, facets, strict=True):
        if not layers.empty:
            of_layers = layers if facet is None else layers[layers[facet] == of_facet[facet].iloc[0]]
            _draw_layers(row[-1], of_layers, label, names)
        for axes, name in zip(row, drawn, strict=False):
            heading, ylabel = PANELS[name]
            rows = lengths[name].loc[lengths[name].index.intersection(of_facet.index)]
            for number, (weights, of_weights) in enumerate(rows.groupby("weights", sort=False)):
                kind, floor = of_weights_in_words(weights), "below_floor" if name == "mass" else ""
                line(axes, of_weights, "path_length", name, names[weights], number, floor=floor)
                if of_weights.seed.nunique() == 1:  # the interval over sequences
                    ordered, style = of_weights.sort_values("path_length"), {"alpha": 0.2, "linewidth": 0}
                    ends = ordered[f"{name}_low"], ordered[f"{name}_high"]
                    axes.fill_between(ordered.path_length, *ends, color=colour_of(number), **style)
                if name == "loss_upto":
                    level(axes, of_weights, "whole_loss", f"whole network, {kind}", colour_of(number), ":")
                constant = of_facet[(of_facet.part == "constant") & (of_facet.weights == weights)]
                if name == "mass" and (constant.mass > 0).any():
                    level(axes, constant, "mass", f"depends on no input, {kind}", colour_of(number), "-.")
            if rows[name].isna().all():
                _say_none(axes)
            elif name in wide:  # in every row
                axes.set_yscale("log")
            if name == "error_upto":
                axes.axhline(0.05, color=GREY, linewidth=1, linestyle="--", label="5 % of X")
            axes.set_title(title(heading, label))
            whole_numbers(axes, "path length k (heads)")
            axes.set_ylabel(f"{ylabel}\n{about}" if name in ABOUT_X else ylabel)
    if words := uncounted_in_words(table):
        grid.flat[0].plot([], [], " ", label=words)
    return with_legend(figure, grid)


def _named(weights: str, rows: pd.DataFrame) -> str:
    """Kind of weights, with the standard deviation of their entries: of fresh ones it decides how long paths are."""
    if "weights_sd" not in rows or rows.weights_sd.isna().any():
        return of_weights_in_words(weights)
    low, high = (f"{end:.2g}" for end in (rows.weights_sd.min(), rows.weights_sd.max()))
    return f"{of_weights_in_words(weights)}, sd {low}" + (f" to {high}" if high != low else "")


def _draw_layers(axes: Axes, layers: pd.DataFrame, label: str, names: dict[str, str]) -> None:
    """The lengths that the state after each layer needs, and the longest that there are."""
    for number, (weights, rows) in enumerate(layers.groupby("weights", sort=False)):
        line(axes, rows, "layer", "k99", names[weights], number)
        ends = rows.groupby("layer")[["k95", "k999"]].mean()
        axes.fill_between(ends.index, ends.k95, ends.k999, color=colour_of(number), alpha=0.15, linewidth=0)
    if layers.empty:
        _say_none(axes)
    last = layers.layer.max()
    axes.plot([1, last], [1, last], color=GREY, linewidth=1, linestyle=":", label="one head in each layer")
    axes.set_title(title("needed by the state after each layer", label))
    whole_numbers(axes, "layer")
    axes.set_ylabel("heads for an error below 1 %\n(shade: from 5 to .1 %)")


def _say_none(axes: Axes) -> None:
    axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes)
    axes.set_yticks([])
