"""Captions of figures in words: what is drawn, over what, how many seeds, and what the spread shows."""

import inspect
import re
from collections.abc import Callable

from rankbench.plots.figure import Figure
from rankbench.plots.marks import FEW_SEEDS

# Figures that show seeds, or their number, in another way than `marks.spread`
OTHERWISE = {
    "attention": "Points are heads, as means over {seeds}.",
    "curves": "{rule} Times per token are geometric means over the intervals between evaluations.",
    "histograms": "{seeds} taken together.",
    "path_counts": "All seeds have the same paths.",
    "signal_map": "Each cell is the mean of its networks.",
    "rank_theory": "Bars are two standard errors of the simulation.",
}
GEOMETRIC = dict.fromkeys(("invertibility", "lipschitz", "residual", "rollout"), "geometric means")
GEOMETRIC |= {"head_rank": "means (of singular values geometric ones)", "pruning": "means (of losses geometric ones)"}
GEOMETRIC |= {"metrics": "means (of losses on a logarithmic axis geometric ones)"}
GEOMETRIC |= dict.fromkeys(
    ("dynamics", "observed_states", "observed_attention"), "means (on a logarithmic axis geometric ones)"
)
OF_ONE_SEED = {"spectrum": "One seed; its band is the 95 % bootstrap interval over sequences."}


def caption_of(name: str, draw: Callable[..., Figure], num_seeds: int) -> str:
    """Sentences about the figure of an analysis: the first paragraph of its function's docstring, without the layout of
    a sweep's facets, and its seeds."""
    paragraph = " ".join((inspect.getdoc(draw) or "").partition("\n\n")[0].split())
    drawn = re.sub(r"[,;] [^,;.]*\bfacet\b", "", paragraph)
    if num_seeds == 1 and name in OF_ONE_SEED:
        return f"{drawn} {OF_ONE_SEED[name]}"
    if num_seeds == 0:  # nothing is known about the seeds
        return drawn
    seeds = f"{num_seeds} seed{'' if num_seeds == 1 else 's'}"
    how = "the seeds are drawn behind" if num_seeds <= FEW_SEEDS else "bands are the 95 % interval of the mean"
    rule = f"Lines are {GEOMETRIC.get(name, 'means')} over {num_seeds} seeds; {how}."  # as `marks.spread` draws them
    rule = "One seed, so no spread." if num_seeds == 1 else rule
    return f"{drawn} {OTHERWISE.get(name, '{rule}').format(seeds=seeds, rule=rule)}"
