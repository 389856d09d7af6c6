"""The figure of the analysis `paths`."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import facets_of, grid_of, styled, title
from rankbench.plots.marks import level, line, published_marks, whole_numbers, with_legend
from rankbench.plots.style import GREY, INK

SCHEMES = {
    "frozen": "with the attention weights of the whole network",
    "recomputed": "each path alone, with attention weights of its own",
}
SCORES = {  # what is drawn: the first that the table has, with its label
    "accuracy": "accuracy (share of tokens)",
    "loss": "loss (squared error)",
    "norm_share": "share of the norms of all lengths",
}


def score_of(table: pd.DataFrame) -> str:
    """The column that says how good a sum of paths is or, without targets, how large."""
    return next((name for name in SCORES if name in table and table[name].notna().any()), "accuracy")


@styled
def draw_paths(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Accuracy by path length: all paths and sampled subsets, the measured baselines, the published numbers. Of a
    regression it is the loss; without targets, the norm of the sum as a share of the norms of all lengths.

    A column for each scheme, a row for each facet. Where a whole sum is no more than rounding, its accuracy is marked.
    """
    schemes = list(dict.fromkeys(table.scheme))
    sizes = sorted(table.subset_size.dropna().unique())
    scores = [score_of(rows) for _, rows in facets_of(table, facet)]
    figure, grid, facets = grid_of(table, facet, len(schemes), share_y=len({*scores}) == 1)
    for row, score, (label, rows) in zip(grid, scores, facets, strict=True):
        for axes, scheme in zip(row, schemes, strict=True):
            of_scheme = rows[rows.scheme == scheme]
            all_paths = of_scheme[of_scheme.selection == "all"]
            if len(all_paths):
                line(axes, all_paths, "path_length", score, "all paths", 0, floor="sum_below_floor")
            for number, size in enumerate(sizes, 1):
                of_size, name = of_scheme[of_scheme.subset_size == size], f"{size:.0f} sampled paths"
                line(axes, of_size, "path_length", score, name, number, floor="sum_below_floor")
            level(axes, rows, f"whole_{score}", "whole network", INK, "-")
            level(axes, rows, "ceiling_accuracy", "ceiling (repeated tokens)", INK, ":")
            level(axes, rows, "majority_accuracy", "commonest class", GREY, "--")
            level(axes, rows, "position_majority_accuracy", "commonest class of the position", GREY, ":")
            if scheme == "recomputed":
                published_marks(axes, published, label)
            if score == "accuracy":
                axes.set_ylim(-0.02, 1.05)
            explained = f"\n{SCHEMES[scheme]}" if scheme in SCHEMES and row[0] is grid[0][0] else ""
            axes.set_title(title(f"{scheme} paths", label) + explained)
            whole_numbers(axes, "path length (heads used)")
        row[0].set_ylabel(SCORES[score])
    return with_legend(figure, grid)
