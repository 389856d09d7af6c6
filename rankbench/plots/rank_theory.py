"""The figure of the analysis `rank_theory`."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import ticks, with_legend
from rankbench.plots.style import GREY, INK, colour_of, marker_of

FORMULAS = {"equal_weights": "equal weights", "optimal_weights": "best weights", "majority_vote": "majority vote"}


@styled
def draw_rank_theory(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Left: error against the number of heads. Right: fewest heads against the rank. A row for each dimension.

    The left panel has lower bounds by rank (sharp: dashed; any value map: dotted), the best functions of random maps of
    that rank (crosses), random rank-1 hardmax heads by formula (lines) and by simulation (marks, with two standard
    errors), and the two-layer construction.
    """
    selected = table[table.quantity.isin(["error", "fewest_heads"])]
    figure, grid, facets = grid_of(selected, "dimension", 2, share_y=False, share_x="col")
    for (left, right), (label, rows) in zip(grid, facets, strict=True):
        errors = rows[rows.quantity == "error"]
        for number, (rank, rows_of_line) in enumerate(errors[errors.form.str.startswith("bound")].groupby("rank")):
            for form, dashes in (("sharp", "--"), ("any", ":")):
                mean = rows_of_line[rows_of_line.form == f"bound_{form}"].groupby("heads").value.mean()
                name = f"lower bound ({form}), r={rank}"
                left.plot(mean.index, mean, color=colour_of(number), linestyle=dashes, label=name)
            best = errors[(errors.form == "generalised") & (errors["rank"] == rank)]
            _tried_out(left, best, f"best functions of random maps, r={rank}", marker="+", color=colour_of(number))
        for number, (form, name) in enumerate(FORMULAS.items()):
            colour = (INK, GREY, colour_of(-1))[number]
            for kind, of_kind in errors[errors.form == form].groupby("kind"):
                if kind == "formula":
                    mean = of_kind.groupby("heads").value.mean()
                    left.plot(mean.index, mean, color=colour, label=f"hardmax r=1, {name}")
                else:
                    style = {"mfc": "none", "marker": marker_of(number), "color": colour}
                    _tried_out(left, of_kind, f"{name}, tried out", **style)
        _tried_out(left, errors[errors.form == "construction"], "two layers", marker="x", color=colour_of(1))
        left.set_xscale("log")
        left.set_ylim(bottom=0)
        left.set_xlabel("heads H")
        left.set_ylabel("squared error")
        fewest = rows[(rows.quantity == "fewest_heads") & (rows.form == "bound_sharp")]
        for number, (error, rows_of_line) in enumerate(fewest.groupby("value")):
            heads_by_rank = rows_of_line.groupby("rank").heads.mean()
            style = {"color": colour_of(number), "marker": marker_of(number)}
            right.plot(heads_by_rank.index, heads_by_rank, label=f"fewest heads for an error of {error:g}", **style)
        right.set_yscale("log")
        ticks(right, fewest["rank"], is_log=True)
        right.set_xlabel("rank r of each head")
        right.set_ylabel("heads H (sharp lower bound)")
        for axes in (left, right):
            axes.set_title(title(label.replace("dimension=", "d = ")))
            axes.xaxis.set_tick_params(labelbottom=True)
    return with_legend(figure, grid)


def _tried_out(axes: Axes, errors: pd.DataFrame, label: str, **style: Any) -> None:
    """Draw the mean over seeds by the number of heads, with two of its standard errors, which follow from those of the
    seeds; nothing without rows."""
    if len(errors):
        by_heads = errors.groupby("heads")
        bars = 2 * by_heads.standard_error.apply(lambda of_seeds: (of_seeds**2).sum() ** 0.5 / len(of_seeds))
        axes.errorbar(bars.index, by_heads.value.mean(), bars, ls="none", label=label, **style)
