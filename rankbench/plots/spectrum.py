"""The figure of the analysis `spectrum`."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import (
    MOST_ROWS,
    empty_figure,
    grid_of,
    of_weights_in_words,
    styled,
    title,
    uncounted_in_words,
)
from rankbench.plots.marks import is_wide, level, line, whole_numbers, with_legend
from rankbench.plots.style import GREY, colour_of, panel_size

PANELS = {
    "mass": ("sum $S_k$ of all paths of k heads", r"mass $\|S_k\|_F/\|X\|_F$"),
    "error_upto": ("all longer paths left out", r"$\|X - \sum_{j\leq k} S_j\|_F/\|X\|_F$"),
    "loss_upto": ("read out: paths of up to k heads", "loss (nats per token)"),
    "kl_upto": ("their distance from the whole network", "divergence (nats per token)"),
}
ABOUT_X = ("mass", "error_upto")
LEAST = 1e-4  # smallest error and divergence of networks side by side
FLOORS = {"error_upto": "error_below_floor", "kl_upto": "kl_below_floor"}

KINDS = {"states": "X: last states", "logits": "X: logits less their mean", "output": "X: output"}


@styled
def draw_spectrum(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Mass and error by path length of the first kind of X that each run has, and loss and divergence of the output; a
    line for each kind of weights. A dotted level is the part of X that depends on no input. Where the table has rows of
    layers, the lengths that the state after each layer needs: the line for 1 %, the shade from 5 to .1 %. Of more
    networks than fit below each other, a line for each, by share of its depth.

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
    if facet is not None and table[facet].nunique() > MOST_ROWS:
        parts = {name: lengths[name] for name in FLOORS if name in drawn}
        return _draw_side_by_side(table, parts | ({} if layers.empty else {"k99": layers}), facet, about)
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
                _interval(axes, of_weights, "path_length", name, number)
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


def _interval(axes: Axes, rows: pd.DataFrame, x: str, name: str, number: int) -> None:
    """Shade the interval over sequences, of a single seed."""
    if rows.seed.nunique() == 1:
        ordered, (_, low, high) = rows.sort_values(x), _ends(name)
        axes.fill_between(ordered[x], ordered[low], ordered[high], color=colour_of(number), alpha=0.2, linewidth=0)


def _draw_side_by_side(table: pd.DataFrame, parts: dict[str, pd.DataFrame], facet: str, about: str) -> Figure:
    """A line for each value of the facet, a column of panels for each kind of weights. x: the share of the heads of the
    network's longest paths, or of its layers. parts: rows by what is drawn of them."""
    weights, deepest = list(dict.fromkeys(table.weights)), table.groupby(facet, sort=False).path_length.max()
    names = {value: _of_network(value, deepest[value], rows) for value, rows in table.groupby(facet, sort=False)}
    figure = empty_figure(panel_size()[0] * len(weights), panel_size()[1] * len(parts))
    grid = figure.subplots(len(parts), len(weights), squeeze=False, sharex=True, sharey="row")
    for row, (name, rows_of) in zip(grid, parts.items(), strict=True):
        is_of_layers = name == "k99"
        x, scaled = ("layer", ["layer", *_ends(name)]) if is_of_layers else ("path_length", ["path_length"])
        rows_of = rows_of.assign(**{column: rows_of[column] / rows_of[facet].map(deepest) for column in scaled})
        for axes, kind in zip(row, weights, strict=True):
            for value, rows in rows_of[rows_of.weights == kind].groupby(facet, sort=False):
                number = list(names).index(value)
                line(axes, rows, x, name, names[value], number)
                _interval(axes, rows, x, name, number)
            axes.set_title(of_weights_in_words(kind))
            axes.set_xlabel("layer / layers" if is_of_layers else "path length k / layers")
            if is_of_layers:
                axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":", label="one head in each layer")
                continue
            axes.set_yscale("log")
            axes.set_ylim(bottom=LEAST)
            if name == "error_upto":
                axes.axhline(0.01, color=GREY, linewidth=1, linestyle="--", label="1 % of X")
        ylabel = "heads for an error below 1 % / layers" if is_of_layers else PANELS[name][1]
        row[0].set_ylabel(f"{ylabel}\n{about}" if name in ABOUT_X else ylabel)
    words = uncounted_in_words(table)
    if not words and "special_tokens" in table:
        are_out = table.groupby(facet).special_tokens.first().str.startswith("out")
        words = f"left out: special tokens of {are_out.sum()} of {len(names)}"
    if words:
        grid.flat[0].plot([], [], " ", label=words)
    return with_legend(figure, grid)


def _ends(name: str) -> tuple[str, str, str]:
    return name, f"{name}_low", f"{name}_high"


def _of_network(value: object, layers: float, rows: pd.DataFrame) -> str:
    """A network with its depth and the standard deviations of its weights' entries, in the order of their kinds."""
    name = f"{value}{'' if 'layers=' in str(value) else f', {layers:g} layers'}"
    if "weights_sd" not in rows or rows.weights_sd.isna().any():
        return name
    return f"{name}, sd {' and '.join(f'{sd:.2g}' for sd in rows.groupby('weights', sort=False).weights_sd.first())}"


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
