"""The figure of the analysis `independence`."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from rankbench.plots.figure import empty_figure, facets_of, styled
from rankbench.plots.marks import FEW_SEEDS, line, tick, whole_numbers
from rankbench.plots.names import in_a_paper
from rankbench.plots.style import GREY, colour_of, marker_of, small
from rankbench.runs.intervals import half_width

MAPS = {
    "cosine": "cosine",
    "correlation": "correlation",
    "alignment_linear": "linear CKA",
    "information": r"$\sqrt{1-e^{-2I}}$, I by KSG",
}
# measures of pairs of single paths; each is 0 for independent paths
SIZES = {**MAPS, "interaction": "interaction"}
COLOUR_MAP, SCALE = "RdBu_r", Normalize(-1, 1)
CELLS = 8  # largest side of a map whose numbers are written into the cells
WIDTH, HEIGHT, LAST_HEIGHT = 7.2, 1.8, 2.5  # inches: width of a page, height of a row of maps and of the row below them


@styled
def draw_independence(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Heat maps by pairs of path lengths, a row for each scheme; a block of rows for each facet.

    Below the maps: interference by length, mean measures of single paths, and cross-gradients by pairs of heads. Mutual
    information I is drawn as sqrt(1 - exp(-2 I)), the correlation of two Gaussian numbers with this information
    (Linfoot 1957), so that all maps share one scale: 0 independent, 1 determined.
    """
    table = table.assign(information=np.sqrt(-np.expm1(-2 * table.information_ksg.clip(lower=0))))
    facets = facets_of(table, facet)
    schemes = list(dict.fromkeys(table.scheme.dropna()))
    heights = [HEIGHT * len(schemes), LAST_HEIGHT] * len(facets)
    figure = empty_figure(WIDTH, sum(heights))
    blocks: Any = figure.subfigures(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    for (label, rows), upper, lower in zip(facets, blocks[::2], blocks[1::2], strict=True):
        upper.suptitle(in_a_paper(label), fontsize=small(8))
        grid = upper.subplots(len(schemes), len(MAPS), squeeze=False, sharex=True, sharey=True)
        for scheme, line_of_axes in zip(schemes, grid, strict=True):
            of_scheme = rows[(rows.of == "lengths") & (rows.scheme == scheme)]
            for axes, (measure, name) in zip(line_of_axes, MAPS.items(), strict=True):
                _map(axes, of_scheme, measure, ("first_length", "second_length"))
                if scheme == schemes[0]:
                    axes.set_title(name)
                if scheme == schemes[-1]:
                    axes.set_xlabel("path length")
            line_of_axes[0].set_ylabel(f"{scheme} paths\npath length")
        bar = upper.colorbar(ScalarMappable(SCALE, COLOUR_MAP), ax=grid, shrink=0.8, aspect=30)
        bar.set_label("mean over seeds (0: independent)")
        interference, single_paths, heads = lower.subplots(1, 3, width_ratios=[1.1, 1.1, 1])
        _interference(interference, rows, schemes)
        _single_paths(single_paths, rows, schemes)
        handles: dict[str, Any] = {}
        for axes in (single_paths, interference):
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        lower.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4)
        of_heads, floor = rows[rows.of == "heads"], "cross_gradient_below_floor"
        _map(heads, of_heads, "cross_gradient_relative", ("first", "second"), floor)
        heads.set_title("cross-gradients of heads\n(colours as above)")
    return figure


def _map(axes: Axes, rows: pd.DataFrame, measure: str, sides: tuple[str, str], floor: str = "") -> None:
    """Draw the mean over seeds of a measure by pairs, mirrored at the diagonal; grey where it is missing.

    floor: the column that is above 0 where the measure is no more than rounding; such a number has ~ before it.
    """
    names = list(dict.fromkeys([*rows[sides[0]], *rows[sides[1]]]))
    mean = rows.groupby(list(sides))[measure].mean()
    at_floor = rows[rows[floor] > 0] if floor in rows else rows[:0]
    rounded = set(zip(at_floor[sides[0]], at_floor[sides[1]], strict=True))
    half = mean.unstack().reindex(index=names, columns=names)
    values = half.fillna(half.T).to_numpy()
    axes.set_facecolor("#DDDDDD")
    axes.imshow(values, cmap=COLOUR_MAP, norm=SCALE, origin="lower")
    tick_labels = list(map(tick, names))
    axes.fmt_xdata = axes.fmt_ydata = lambda place: tick_labels[round(place)]
    step = max(1, len(names) // 12)
    rotation = 90 if max(map(len, tick_labels), default=0) > 2 else 0
    ticks = range(0, len(names), step), tick_labels[::step]
    axes.set_xticks(*ticks, rotation=rotation, fontsize=small(6) if rotation else None)
    axes.set_yticks(*ticks, fontsize=small(6) if rotation else None)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if len(names) <= CELLS:
        for j, k in np.argwhere(np.isfinite(values)):
            ink = "white" if abs(values[j, k]) > 0.7 else "black"
            sign = "~" if {(names[j], names[k]), (names[k], names[j])} & rounded else ""
            number = f"{values[j, k]:.2f}".replace("0.", ".").replace("-.00", ".00")
            axes.text(k, j, sign + number, ha="center", va="center", fontsize=small(5), color=ink)


def _interference(axes: Axes, rows: pd.DataFrame, schemes: list[str]) -> None:
    known = rows.dropna(subset="interference")
    for number, scheme in enumerate(schemes):
        of_scheme = known[known.scheme == scheme]
        if len(of_scheme):
            line(axes, of_scheme, "first_length", "interference", scheme, number)
    counts = known.groupby("first_length").num_paths.first()
    axes.plot(counts.index, counts, color=GREY, linestyle=":", linewidth=1, label="identical paths")
    axes.axhline(1, color=GREY, linestyle="--", linewidth=1, label="orthogonal paths")
    axes.set_yscale("log")
    axes.set_title("interference")
    axes.set_ylabel(r"$\|S_k\|^2/\sum_p\|Y_p\|^2$")
    whole_numbers(axes, "path length k")


def _single_paths(axes: Axes, rows: pd.DataFrame, schemes: list[str]) -> None:
    """Draw each measure's mean absolute value over pairs of paths: mean over seeds, and seeds as in marks.spread."""
    pairs = rows[rows.of == "paths"]
    for number, scheme in enumerate(schemes):
        of_scheme = pairs[pairs.scheme == scheme]
        per_seed = of_scheme.assign(**of_scheme[list(SIZES)].abs()).groupby("seed")[list(SIZES)].mean()
        x_values = np.arange(len(SIZES)) + 0.15 * (number - (len(schemes) - 1) / 2)
        style: dict = {"color": colour_of(number), "marker": marker_of(number), "linestyle": "none"}
        if len(per_seed) > FEW_SEEDS:
            bars = half_width(per_seed.std(), len(per_seed))
            axes.errorbar(x_values, per_seed.mean(), bars, label=scheme, capsize=2, **style)
            continue
        axes.plot(x_values, per_seed.mean(), label=scheme, **style)
        if len(per_seed) > 1:
            look: dict = {"s": 7, "color": colour_of(number), "alpha": 0.45, "linewidths": 0}
            axes.scatter(np.tile(x_values, len(per_seed)), per_seed.to_numpy().ravel(), **look)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(
        range(len(SIZES)), SIZES.values(), rotation=30, ha="right", rotation_mode="anchor", fontsize=small(6)
    )
    axes.set_ylim(bottom=-0.05)
    axes.set_title("pairs of single paths")
    axes.set_ylabel("mean size (0: independent)")
