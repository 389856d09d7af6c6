"""One figure of a network that is not ours: residual and effective rank by layer, and its paths by length."""

import pandas as pd
from matplotlib.figure import Figure

from rankbench.plots.figure import empty_figure, of_weights_in_words, styled
from rankbench.plots.marks import line, log_y, spans_orders, whole_numbers, with_legend
from rankbench.plots.residual import with_lines_of_views
from rankbench.plots.style import panel_size
from rankbench.runs.tables import last_of_layer

METRICS = {
    "relative_residual": r"relative residual $\|R\|_{1,\infty}/\|X\|_{1,\infty}$",
    "effective_rank": "effective rank",
}
SHARES = {"norm_share": "share of the size of all sums", "path_share": "share of the number of paths"}


def frozen_lengths(paths: pd.DataFrame) -> pd.DataFrame:
    """The sums of all frozen paths of each length, of the first kind of weights, from the table of `paths`."""
    lengths = paths[(paths.scheme == "frozen") & (paths.selection == "all")]
    return lengths if "weights" not in lengths else lengths[lengths.weights == lengths.weights.iloc[0]]


@styled
def draw_overview(residual: pd.DataFrame, paths: pd.DataFrame, heading: str) -> Figure:
    """Relative residual and effective rank by layer, a line for each kind of weights, and for each view of the tokens
    that differs by more than a factor of 2 in the residual; and the share of frozen paths by length."""
    states = last_of_layer(residual)
    states = with_lines_of_views(states[states.variant == "full"].assign(variant=""))
    states = states.assign(line=states.weights.map(of_weights_in_words) + states.line)
    width, height = panel_size()
    figure = empty_figure(2.4 * width, 0.9 * height + 0.9)
    grid = figure.subplots(1, 3, squeeze=False)
    of_layers, of_lengths = grid[0, :2], grid[0, 2]
    for axes, (metric, name) in zip(of_layers, METRICS.items(), strict=True):
        for number, label in enumerate(states.line.unique()):
            line(axes, states[states.line == label], "layer", metric, label, number)
        axes.set_ylim(0, 1.05 * states[metric].max())
        axes.set_title(name)
        whole_numbers(axes, "layer (0: embedding)")
    if spans_orders(states.relative_residual):
        of_layers[0].autoscale(axis="y")
        log_y(of_layers[0])
    for number, (column, name) in enumerate(SHARES.items(), states.line.nunique()):
        line(of_lengths, frozen_lengths(paths), "path_length", column, name, number)
    of_lengths.set_ylim(bottom=0)
    of_lengths.set_title("frozen paths")
    whole_numbers(of_lengths, "path length (heads used)")
    figure.suptitle(heading, fontsize="medium")
    return with_legend(figure, grid)
