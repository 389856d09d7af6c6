"""The figure of the analysis `lipschitz`."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from rankbench.plots.figure import facets_of, grid_of, styled, title
from rankbench.plots.marks import log_y, mean_line, published_marks, spans_orders, whole_numbers, with_legend
from rankbench.plots.names import choice_in_words
from rankbench.plots.style import GREY, INK, colour_of, panel_size

# quantity: (label, colour or number of a series, marker, dashes)
DRAWN = {
    "theorem": ("bound: Theorem 3.2", INK, "", "-"),
    "theorem_printed": ("Theorem 3.2 as printed (no bound)", GREY, "", ":"),
    "one_dimension": ("exact (odd N)", 2, "", "--"),
    "ball": ("bound on a ball", 4, "v", "-."),
    "certificate": ("certificate on a ball", 5, "^", "-"),
    "capped": ("Theorem 3.2, matrices at the cap", GREY, "P", "-"),
    "ascent": ("lower bound: ascent, best start", 0, "o", "-"),
    "ascent_mirrored": ("lower bound: ascent, mirrored", INK, "x", "none"),
    "jacobian": ("lower bound: Jacobian at the data", 1, "s", "-"),
}
INITIALISED = {"-": "--", "--": ":", ":": "-.", "-.": ":"}  # dashes of initial weights, by those of trained ones
NEXT = "ascent, the next best starts"
PARTS = ("attention", "block", "network")
NARROW = 0.45  # width of the panels of a whole network, which has one number of each kind, over that of the others
# In the figure of balls: ratios with a line across, and the highest that is drawn: a bound beyond says nothing
LEVELS, HIGHEST = (2, 10, 100), 1e6
# Marker of an operation by the end of its name, in the figure of balls
BALL_MARKERS = {"norm": "^", "activation": "s", "softmax": "o", "scores": "D", "squared_keys": "P", "mixing": "v"}
BALL_MARKERS |= {"theorem": "x"}
NAMES = {float("inf"): r"$\|J\|_\infty$", 2.0: r"$\|J\|_2$"}


@styled
def draw_lipschitz(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Bounds and measured values by the number of tokens, by the step of an ascent, or by layer, whichever varies.

    A column for each norm and, by layer, each part; a row for each facet. Infinite bounds are not drawn. A table with
    balls has a figure of these.
    """
    if "radius" in table:
        return _draw_balls(table, facet)
    table = table[table.quantity.isin(DRAWN)]
    axis = _axis([rows for _, rows in facets_of(table, facet)])
    parts = [part for part in PARTS if (table.part == part).any()] if axis == "layer" else ["attention"]
    columns = [(p, part) for p in dict.fromkeys(table.p) for part in parts]
    figure, grid, facets = grid_of(table, facet, len(columns), share_y=False, share_x="col")
    if axis == "layer" and len(columns) > 1 and grid.shape[1] == grid[0, 0].get_gridspec().ncols:
        widths = [NARROW if part == "network" else 1 for _, part in columns]
        grid[0, 0].get_gridspec().set_width_ratios(widths)
        figure.set_figwidth(figure.get_figwidth() * sum(widths) / len(widths))
    wide = {(p, part) for p, part in columns if _spans_orders(table[(table.p == p) & (table.part == part)], facet)}
    for row, (label, rows) in zip(grid, facets, strict=True):
        # a network's name is already in the facet's label
        kind = f"{choice_in_words(rows.attention.iloc[0])} attention" if (rows.weights == "fresh").all() else ""
        for axes, (p, part) in zip(row, columns, strict=True):
            of_panel = rows[(rows.p == p) & (rows.part == part)]
            for quantity in DRAWN:
                of_quantity = of_panel[(of_panel.quantity == quantity) & np.isfinite(of_panel.value)]
                if axis != "step" and len(of_quantity):
                    of_quantity = of_quantity[of_quantity.step == of_quantity.step.max()]
                if len(of_quantity):
                    _draw(axes, of_quantity, axis)
            published_marks(axes, published, label)
            _finish(axes, of_panel, axis, title(part if axis == "layer" else "", label, kind))
            if (p, part) in wide:  # in every row
                log_y(axes)
            elif axes.get_yscale() == "linear":
                axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.set_ylabel(f"{NAMES[p]} or its bound")
    return with_legend(figure, grid)


def _spans_orders(rows: pd.DataFrame, facet: str | None) -> bool:
    """Whether the values of any panel of a column need a logarithmic axis, which all of its panels then have."""
    drawn = rows[np.isfinite(rows.value) & (rows.value > 0)]
    return any(len(of_facet) and spans_orders(of_facet.value) for _, of_facet in facets_of(drawn, facet))


def _axis(facets: list[pd.DataFrame]) -> str:
    """Column for the x axis. A facet never mixes fresh layers with those of a model."""
    if any(rows.tokens.nunique() > 1 for rows in facets):
        return "tokens"
    return "step" if any(rows.step.nunique() > 2 for rows in facets) else "layer"


def _draw(axes: Axes, rows: pd.DataFrame, axis: str) -> None:
    name, look, marker, dashes = DRAWN[rows.quantity.iloc[0]]
    colour = colour_of(look) if isinstance(look, int) else look
    if rows.quantity.iloc[0] == "one_dimension" and rows.p.iloc[0] == 2:
        name = "bound for head width 1"
    for weights, of_weights in rows.groupby("weights", sort=False):
        label = name
        style: dict = {"linestyle": dashes, "alpha": 1.0}
        if weights == "initialised" and rows.weights.nunique() > 1:
            # the initial weights of a trained network are drawn pale, with dashes of their own
            label = f"{name}, before training"
            style |= {"linestyle": INITIALISED.get(dashes, dashes), "alpha": 0.5}
        if axis == "step":
            for _, of_layer in of_weights.groupby("layer"):
                _along_steps(axes, of_layer, style | {"color": colour}, label)
            continue
        best = of_weights[of_weights.start <= 1]
        style["marker"] = marker or ("_" if best[axis].nunique() == 1 else "")  # a line of one point would not show
        # the exact constant is drawn on top, or lower bounds that reach it would hide it
        style["zorder"] = 3 if name.startswith("exact") else 2
        mean_line(axes, best, axis, "value", colour, geometric=True, label=label, **style)
        others = of_weights[of_weights.start > 1].groupby([axis, "start"]).value.mean().reset_index()
        if len(others) and dashes != "none":
            axes.plot(
                others[axis], others.value, "_", color=INK, markersize=9, markeredgewidth=0.5, zorder=4, label=NEXT
            )


def _along_steps(axes: Axes, rows: pd.DataFrame, style: dict, label: str) -> None:
    if rows.start.max() == 0:  # a constant of the layer: a line across
        axes.axhline(rows.value.mean(), label=label, **style)
        return
    for (_, start), steps in rows.groupby(["seed", "start"]):
        look = {"linewidth": 1.4} if start == 1 else {"linewidth": 0.8, "linestyle": ":"}
        axes.plot(steps.step, steps.value, label=label if start == 1 else NEXT, **(style | look))


def _finish(axes: Axes, rows: pd.DataFrame, axis: str, text: str) -> None:
    axes.set_title(text)
    if axis == "layer":
        is_network = (rows.part == "network").all()
        whole_numbers(axes, "" if is_network else "layer")
        if is_network:
            axes.set_xticks([])
    elif axis == "step":
        axes.set_xlabel("step of the ascent")
    else:
        axes.set_xscale("log")
        axes.set_xlabel("tokens N")
        tokens = sorted(rows.tokens.unique())
        tokens = tokens if len(tokens) <= 5 else [tokens[0], tokens[len(tokens) // 2], tokens[-1]]
        axes.set_xticks(tokens, list(map(str, tokens)))
        axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_balls(table: pd.DataFrame, facet: str | None) -> Figure:
    """How far the bound on balls is from what ascent finds. Above, the bound over the largest Jacobian norm found, by
    radius, a line for each network (with 95 % intervals or seeds); below, the share of the bound that its largest
    operation has, with the operation as the marker."""
    balls = table[table.quantity == "certified_ball"]
    width, height = panel_size()
    figure = Figure(figsize=(1.6 * width, 2.2 * height), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for number, (label, rows) in enumerate(facets_of(balls, facet)):
        for weights, of_weights in rows.groupby("weights", sort=False):
            is_pale = weights == "initialised" and rows.weights.nunique() > 1
            look: dict = {"linestyle": "--", "alpha": 0.5} if is_pale else {"linestyle": "-"}
            look["label"] = ", ".join(filter(None, [label, "before training" if is_pale else ""]))
            by = of_weights.groupby(["seed", "radius", "kind"]).value.max().unstack().reset_index()
            ratios = by.assign(ratio=by.bound / by.lower_bound)
            ratios = ratios[ratios.ratio <= HIGHEST]
            mean_line(above, ratios, "radius", "ratio", colour_of(number), geometric=True, **look)
            if not is_pale:
                _shares_of_operations(below, of_weights, colour_of(number))
    for ratio in LEVELS:
        above.axhline(ratio, color=GREY, linewidth=0.6, linestyle=":")
    above.set_xscale("log")
    above.set_yscale("log")
    above.set_ylim(0.9, None)
    above.set_ylabel(r"bound on $\|J\|_2$ / largest found")
    below.set_ylim(0, 1.05)
    below.set_ylabel("share of the largest operation")
    below.set_xlabel("radius of the ball (Frobenius norm over all tokens)")
    return with_legend(figure, np.array([[above], [below]]))


def _shares_of_operations(axes: Axes, rows: pd.DataFrame, colour: str) -> None:
    bounds = rows[(rows.kind == "bound") & np.isfinite(rows.value)]
    mean = bounds.groupby("radius").share.mean()
    axes.plot(mean.index, mean, color=colour, linewidth=0.8)
    for end, marker in BALL_MARKERS.items():
        of_kind = bounds[bounds.operation.str.endswith(end)]
        axes.plot(of_kind.radius, of_kind.share, marker, color=colour, markersize=4)
        if len(of_kind):
            axes.plot([], [], marker, color=INK, markersize=4, label=end.replace("_", " "))
