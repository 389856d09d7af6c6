"""The figure of the analysis `path_counts`."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, styled, title
from rankbench.plots.marks import spans_orders, ticks, with_legend
from rankbench.plots.style import colour_of, colours, dashes_of, marker_of

RAREST = 1e-3  # lengths with a smaller share are not drawn


@styled
def draw_path_counts(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Share of paths by their length, a line for each architecture: left by the length, right by length over layers.

    A row for each facet. All seeds have the same paths, so there is no spread. The paper's figure prints no numbers.
    """
    figure, grid, facets = grid_of(table, facet, 2, share_x="col")
    for (absolute, relative), (label, rows) in zip(grid, facets, strict=True):
        counts = rows[(rows.seed == rows.seed.min()) & (rows.share >= RAREST)]
        for number, (name, paths) in enumerate(counts.groupby("architecture", sort=False)):
            layers, heads = paths.layers.iloc[0], paths.heads.iloc[0]
            style: dict = {"color": colour_of(number), "marker": marker_of(number)}
            style |= {"linestyle": dashes_of(number), "markersize": 3}
            style["mfc"] = colour_of(number) if number < len(colours()) else "white"  # the colours repeat
            absolute.plot(paths.path_length, paths.share, label=f"{name} (L={layers}, H={heads})", **style)
            relative.plot(paths.path_length / paths.layers, paths.share, **style)
        if spans_orders(counts.path_length):
            ticks(absolute, counts.layers, is_log=True)
        absolute.set_ylabel("share of all paths")
        absolute.set_title(title("by length", label))
        relative.set_title(title("by length over layers", label))
    grid[-1][0].set_xlabel("path length (heads passed)")
    grid[-1][1].set_xlabel("path length / layers")
    return with_legend(figure, grid)
