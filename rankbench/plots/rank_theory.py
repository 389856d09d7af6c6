"""The figure of the analysis `rank_theory`."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import COLOURS, GREY, INK, MARKERS, grid_of, legend, styled, title

FORMULAS = {"equal_weights": "equal weights", "optimal_weights": "best weights", "majority_vote": "majority vote"}


@styled
def draw_rank_theory(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Left the error against the number of heads, right the fewest heads against the rank; a row for each dimension.

    Left: lower bounds by rank (sharp: dashed; any value map: dotted), random rank-1 heads by formula (lines) and tried
    out (marks, with two standard errors), and the two-layer construction.
    """
    shown = table[table.quantity.isin(["error", "fewest_heads"])]
    figure, grid, facets = grid_of(shown, "dimension", 2, share_y=False, share_x="col")
    for (left, right), (label, rows) in zip(grid, facets, strict=True):
        errors = rows[rows.quantity == "error"]
        for number, (rank, mine) in enumerate(errors[errors.form.str.startswith("bound")].groupby("rank")):
            for form, dashes in (("sharp", "--"), ("any", ":")):
                mean = mine[mine.form == f"bound_{form}"].groupby("heads").value.mean()
                name = f"lower bound ({form}), r={rank}"
                left.plot(mean.index, mean, color=COLOURS[number % len(COLOURS)], linestyle=dashes, lw=1, label=name)
        for number, (form, name) in enumerate(FORMULAS.items()):
            style = {"color": (INK, GREY, COLOURS[-1])[number], "marker": MARKERS[number]}
            for kind, mine in errors[errors.form == form].groupby("kind"):
                mean, spread = mine.groupby("heads").value.mean(), _spread(mine)
                if kind == "formula":
                    left.plot(mean.index, mean, color=style["color"], lw=1, label=f"random r=1, {name}")
                else:
                    left.errorbar(mean.index, mean, spread, ls="none", mfc="none", label=f"{name}, tried out", **style)
        built = errors[errors.form == "construction"]
        if len(built):
            mean = built.groupby("heads").value.mean()
            left.errorbar(mean.index, mean, _spread(built), ls="none", marker="x", color=COLOURS[1], label="two layers")
        left.set_xscale("log")
        left.set_ylim(bottom=0)
        left.set_xlabel("heads H")
        left.set_ylabel("squared error")
        fewest = rows[(rows.quantity == "fewest_heads") & (rows.form == "bound_sharp")]
        for number, (error, mine) in enumerate(fewest.groupby("value")):
            found = mine.groupby("rank").heads.mean()
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            right.plot(found.index, found, label=f"fewest heads for an error of {error:g}", **style)
        right.set_xscale("log")
        right.set_yscale("log")
        ranks = sorted(fewest["rank"].unique())
        right.set_xticks(ranks, list(map(str, ranks)))
        right.set_xticks([], minor=True)
        right.set_xlabel("rank r of each head")
        right.set_ylabel("heads H (sharp lower bound)")
        for axes in (left, right):
            axes.set_title(title(label.replace("dimension=", "d = ")))
            axes.xaxis.set_tick_params(labelbottom=True)
    legend(figure, grid)
    return figure


def _spread(rows: pd.DataFrame) -> pd.Series:
    """Two standard errors of the mean over seeds, from those of the seeds."""
    by_heads = rows.groupby("heads").standard_error
    return 2 * by_heads.apply(lambda errors: (errors**2).sum() ** 0.5 / len(errors))
