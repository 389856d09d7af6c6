"""The figure of the analysis `attention`."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import grid_of, of_weights_in_words, styled, title
from rankbench.plots.marks import is_wide, log_y, whole_numbers, with_legend
from rankbench.plots.style import INK, colour_of, marker_of

PANELS = {
    "attention_entropy": ("entropy of the rows of P", "entropy / its largest value"),
    "sink_weight": ("weight on the key that gets most", "mean attention weight"),
    "attention_effective_rank": ("effective rank of P", "effective rank"),
    "largest_logit": ("largest logit of a key seen", "|logit|"),
}


@styled
def draw_attention(table: pd.DataFrame, published: pd.DataFrame | None = None, facet: str | None = None) -> Figure:
    """Four metrics of P by layer: a point for each head, their mean as a line, a colour for each kind of weights."""
    drawn = [name for name in PANELS if name in table and not table[name].isna().all()]
    figure, grid, facets = grid_of(table, facet, len(drawn), share_y="col")
    for row, (label, rows) in zip(grid, facets, strict=True):
        for axes, name in zip(row, drawn, strict=True):
            for number, (weights, of_weights) in enumerate(rows.groupby("weights", sort=False)):
                colour = colour_of(number)
                heads = of_weights.groupby(["layer", "head"])[name].mean().reset_index()
                mean = heads.groupby("layer")[name].mean()
                marker = marker_of(number)
                axes.plot(mean, color=colour, marker=marker, label=f"{of_weights_in_words(weights)}, mean of the heads")
                axes.scatter(heads.layer, heads[name], s=7, color=colour, alpha=0.4, linewidths=0)
            axes.scatter([], [], s=7, color=INK, alpha=0.4, linewidths=0, label="a head, mean over seeds")
            axes.set_title(title(PANELS[name][0], label))
            whole_numbers(axes, "layer")
            axes.set_ylabel(PANELS[name][1])
    for name, axes in zip(drawn, grid[0], strict=True):
        if name == "largest_logit" and is_wide(table[name][table[name] > 0]):
            log_y(axes)
    return with_legend(figure, grid)
