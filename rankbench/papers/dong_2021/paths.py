"""Claims of Dong et al. 2021 on paths, their lengths, and what networks do with them."""

import math
from functools import partial
from itertools import combinations

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, above, below, exact_check, of_any_weights, require, within
from rankbench.judging.sweeps import in_reverse, rows_by_value, with_exchanged

AT_CHANCE = 0.05  # "not much better than a random guess", taken as within five points of the commonest class
# "consistently": of six lengths at most one pair of neighbours may be in the wrong order (-.87; two such pairs: -.73)
CONSISTENTLY = -0.8
HARDLY_OBSERVABLE = 128  # width at which the paper calls the collapse hardly observable (sec. 4.2)
FIG3 = "Dong et al. 2021, sec. 4.2 and Fig. 3"
SUM = "Dong et al. 2021, Theorem 2.1"
FIG4 = "Dong et al. 2021, sec. 4.3"
FIG5 = "Dong et al. 2021, app. B.1 and Fig. 5"

# Measures: one seed's rows -> a number


def _sampled(rows: pd.DataFrame, length: int) -> float:
    of_length = rows[(rows.selection == "sampled") & (rows.path_length == length)]
    require(not of_length.empty, f"there are no sampled paths of length {length}")
    return of_length.accuracy.mean()


def _rank_correlation_with_length(rows: pd.DataFrame) -> float:
    """Kendall's rank correlation of length and accuracy, over the pairs of lengths that are not both at chance.

    Pairs whose difference is no larger than twice the standard error that their repeats give it count as no change. 0
    where all lengths are at chance.
    """
    sampled = rows[(rows.selection == "sampled") & (rows.path_length >= 1)]
    by_length = sampled.groupby("path_length").accuracy.agg(["mean", "sem"]).fillna({"sem": 0.0})
    require(len(by_length) >= 3, "this needs paths of at least three lengths from 1 on")
    at_chance = by_length["mean"] <= rows.majority_accuracy.mean() + AT_CHANCE
    signs = []
    for (length, shorter), (other, longer) in combinations(by_length.iterrows(), 2):
        if not (at_chance[length] and at_chance[other]):
            change, error = longer["mean"] - shorter["mean"], math.hypot(shorter["sem"], longer["sem"])
            signs.append(math.copysign(1.0, change) if abs(change) > 2 * error else 0.0)
    return float(np.mean(signs)) if signs else 0.0


def _spread(rows: pd.DataFrame, length: int) -> float:
    """Standard deviation of the accuracy over repeated samples of paths of a length, mean over the subsets' sizes."""
    of_length = rows[(rows.selection == "sampled") & (rows.path_length == length)]
    spread = of_length.groupby("subset_size").accuracy.std().mean()
    require(np.isfinite(spread), f"there are no repeated samples of paths of length {length}")
    return spread


def _longest_vary_more(rows: pd.DataFrame) -> float:
    longest, single = (_spread(rows, length) for length in (rows.path_length.max(), 1))
    require(longest * single > 0, "repeated samples are equally good")
    return math.log10(longest / single)


def whole_accuracy(rows: pd.DataFrame) -> float:
    """Accuracy of the whole network: the share of the scored tokens that are right."""
    return rows.whole_accuracy.mean()


def _trained_layer(rows: pd.DataFrame) -> pd.Series:
    return rows[rows.weights == "trained"].iloc[0]


def _collapses(rows: pd.DataFrame) -> float:
    return float(_trained_layer(rows).collapsed)


def _stays(rows: pd.DataFrame) -> float:
    layer = _trained_layer(rows)
    return float(not layer.collapsed and not layer.escaped)


def _fewer_when_wide(rows: pd.DataFrame) -> float:
    narrow, *_, wide = rows_by_value(rows, "model.width", fewest=2).values()
    return _collapses(narrow) - _collapses(wide)


def _by_architecture(rows: pd.DataFrame, *needed: str) -> pd.DataFrame:
    """Mean and standard deviation of the path length, in heads and over the number of layers."""
    require(set(needed) <= set(rows.architecture), f"this needs the paths of {' and '.join(needed)}")

    def moments(paths: pd.DataFrame) -> pd.Series:
        mean = (paths.share * paths.path_length).sum()
        sd = (paths.share * (paths.path_length - mean) ** 2).sum() ** 0.5
        layers = paths.layers.iloc[0]
        return pd.Series({"mean": mean, "sd": sd, "mean_over_layers": mean / layers, "sd_over_layers": sd / layers})

    return pd.DataFrame({name: moments(paths) for name, paths in rows.groupby("architecture", sort=False)}).T


def _gpt3_ahead(rows: pd.DataFrame, column: str) -> float:
    values = _by_architecture(rows, "GPT-3")[column]
    return values["GPT-3"] - values.drop("GPT-3").max()


def _rank_of_small_berts(rows: pd.DataFrame, column: str) -> float:
    small = ["DistilBERT", "MobileBERT"]
    return _by_architecture(rows, *small)[column].rank(ascending=False)[small].max()


def _is_attention_alone(rows: pd.DataFrame) -> bool:
    return not rows["skip"].any() and not rows.mlp.any()


def _should_collapse(rows: pd.DataFrame) -> bool:
    """Whether the rows are of attention alone, below the width at which the paper hardly observes the collapse."""
    wide = "model.width" in rows and (rows["model.width"].astype(float) >= HARDLY_OBSERVABLE).any()
    return _is_attention_alone(rows) and not wide


def every_seed_goes_round(rows: pd.DataFrame) -> str:
    """Say which networks have not learned a step; empty if all have.

    The paper trains "until it could perfectly memorize the next step"; here better than standing still is enough.
    """
    trained = rows[rows.weights == "trained"].drop_duplicates(["run", "seed"])
    lost = int((~(trained.one_step_error < 1)).sum())  # nan, too
    return f"{lost} of {len(trained)} networks have not learned a step of the circle" if lost else ""


_rollout = partial(Claim, source=FIG3, table="rollout", why_untrained=every_seed_goes_round)
# A claim on path lengths, which are computed without chance or training
_counted = partial(Claim, source=FIG5, table="path_counts", why_untrained=None, exact=True)
# A claim of Fig. 4 on sampled paths, under both schemes (the paper: `recomputed`)
_protocol = partial(Claim, source=FIG4, table="paths", by=("scheme",), floor="sum_below_floor")
# The same by the number of paths that are read out together, whose differences are no spread of repeated samples
_of_subsets = partial(
    _protocol,
    by=("scheme", "subset_size"),
    applies=lambda rows: (rows.selection == "sampled").any(),
    since="2026-11-30",
)
TURNED_ROUND = Control.beyond(
    "every run that collapses does not, and the others do", collapsed="1 - collapsed", escaped=0
)
LENGTHS_REVERSED = Control.beyond(
    "the lengths from 1 on in reverse order", of="path_length >= 1", path_length="path_length.max() + 1 - path_length"
)
SIX_POINTS_ABOVE = Control.beyond(
    "every accuracy 6 points above the commonest class", accuracy="majority_accuracy + 0.06"
)


def _whole(statement: str, line: float, published: float) -> Claim:
    """Claim of Fig. 4 on the whole network's accuracy."""
    return of_any_weights(
        statement=statement,
        source=FIG4,
        table="paths",
        measure=whole_accuracy,
        claimed=above(line),
        scale="share",
        published=published,
        control=Control.beyond(f"an accuracy of {line - 0.01:g} in every seed", whole_accuracy=line - 0.01),
    )


def _length_one(task: str, line: float) -> Claim:
    """Claim of Fig. 4 on paths of length 1, by the number of them that are read out together, and on all of them."""
    return _protocol(
        statement=f"Length-1 paths attain an accuracy above {line:g} on {task} (subset_size of them read out together; "
        "selection=all: all of them).",
        by=("scheme", "selection", "subset_size"),
        applies=lambda rows: (rows.path_length == 1).any(),
        measure=lambda rows: rows[rows.path_length == 1].accuracy.mean(),
        claimed=above(line),
        scale="share",
        sourced=True,
        since="2026-11-26",
        control=Control.beyond(
            f"length-1 paths with an accuracy of {line - 0.01:g} in every seed", accuracy=line - 0.01
        ),
    )


PATHS: dict[str, Claim] = {
    "paths_sum_to_output": exact_check(
        statement="The frozen paths and the biases add up to the output (log10 of the relative remainder, float64).",
        source=SUM,
        table="paths",
        measure=lambda rows: np.log10(max(rows.remainder.max(), np.finfo(float).tiny)),
        claimed=below(-10.0),
        control=Control.beyond("a remainder of 1.1e-10", remainder=1.1e-10),
        in_words="paths and output differ by {} of the output",
    ),
    "dong_fig3_collapse": _rollout(
        statement="Run freely, attention alone collapses to one point (share of seeds; threshold: ours, half of "
        "them; not at width 128, where the paper says that it is hardly observable).",
        measure=_collapses,
        claimed=above(0.5),
        scale="rate",
        either_way=(0.0, 1.0),
        applies=_should_collapse,
        control=TURNED_ROUND,
    ),
    "dong_fig3_prevented": _rollout(
        statement="Run freely, a layer with an MLP or a skip does not collapse to one point, and does not escape to "
        "infinity, which would not count as prevention (share of seeds; threshold: ours, half of them).",
        measure=_stays,
        claimed=above(0.5),
        scale="rate",
        either_way=(0.0, 1.0),
        applies=lambda rows: not _is_attention_alone(rows),
        control=TURNED_ROUND,
    ),
    "dong_fig3_slower_when_wide": _rollout(
        statement="At the largest width attention alone collapses more slowly than at the smallest: over equally many "
        "steps fewer seeds do (difference of the shares of seeds).",
        measure=_fewer_when_wide,
        claimed=above(0.0),
        either_way=(-1.0, 1.0),
        along="model.width",
        applies=_is_attention_alone,
        control=in_reverse("model.width"),
    ),
    "dong_fig4_whole_sorting": _whole(
        statement="The whole network sorts (threshold: ours, .95).", line=0.95, published=0.98
    ),
    "dong_fig4_length_1_sorting": _length_one("sorting", 0.6),
    "dong_fig4_whole_convex_hull": _whole(
        statement="The whole network finds the convex hull (in the paper's figure about .9; threshold: ours, .85).",
        line=0.85,
        published=0.9,
    ),
    "dong_fig4_length_1_convex_hull": _length_one("convex hulls", 0.65),
    "dong_fig4_whole_memorization": _whole(
        statement="The whole network memorises (threshold: ours, .8).", line=0.8, published=0.85
    ),
    "dong_fig4_length_1_memorization": _length_one("memorization", 0.8),
    "dong_fig4_falls_with_length": _of_subsets(
        statement="Accuracy consistently deteriorates with path length, from 1 on (subset_size of them read out "
        "together; Kendall's rank correlation over the pairs of lengths that are not both at chance, that is, within 5 "
        "points of the commonest class; differences within the spread of repeated samples count as none; threshold: "
        "ours, -.8, which allows one swapped pair of neighbours among six lengths).",
        measure=_rank_correlation_with_length,
        claimed=below(CONSISTENTLY),
        control=LENGTHS_REVERSED,
    ),
    "dong_fig4_longest_at_chance": _of_subsets(
        statement="The longest paths are as good as a random guess (subset_size of them read out together; their "
        "accuracy less that of the commonest class; threshold: ours, 5 points to either side).",
        measure=lambda rows: _sampled(rows, rows.path_length.max()) - rows.majority_accuracy.mean(),
        claimed=within(AT_CHANCE),
        control=SIX_POINTS_ABOVE,
    ),
    "dong_fig4_length_0_no_information": _protocol(
        statement="Length-0 paths hold no useful information (accuracy above that of the commonest class, which takes "
        "none; threshold: ours, 5 points).",
        measure=lambda rows: _sampled(rows, 0) - rows.majority_accuracy.mean(),
        claimed=below(AT_CHANCE),
        control=SIX_POINTS_ABOVE,
    ),
    "dong_fig4_long_paths_vary": _protocol(
        statement="On convex hulls long paths vary more: between repeated samples the accuracy of the longest has a "
        "larger standard deviation than that of length 1 (log10 of their ratio).",
        measure=_longest_vary_more,
        claimed=above(0.0),
        control=LENGTHS_REVERSED,
    ),
    "dong_fig4_length_0_is_one_path": _protocol(
        statement="Length-zero paths attain very small variance: there is one such path, so repeated samples are "
        "equally good (standard deviation of the accuracy).",
        measure=partial(_spread, length=0),
        claimed=below(1e-9),
        is_check=True,
        exact=True,
        why_untrained=None,
        control=Control.beyond(
            "repeated samples that differ by a thousandth",
            accuracy=lambda rows: rows.accuracy + 0.001 * rows.groupby("seed").cumcount(),
        ),
    ),
    "dong_fig5_gpt3_longest": _counted(
        statement="GPT-3 has the longest paths of the nine (its mean length less the longest of the others, in heads).",
        measure=partial(_gpt3_ahead, column="mean"),
        claimed=above(0.0),
        control=with_exchanged("architecture", "GPT-3", "DeiT-T"),
    ),
    "dong_fig5_gpt3_most_long_paths": _counted(
        statement="GPT-3 is the most long-paths-focused of the nine, by the share of the layers that a path enters "
        "(mean length over the number of layers, less the largest of the others; the reading is ours, and in heads "
        "GPT-3 is judged by dong_fig5_gpt3_longest).",
        measure=partial(_gpt3_ahead, column="mean_over_layers"),
        claimed=above(0.0),
        control=with_exchanged("architecture", "GPT-3", "DeiT-T"),
    ),
    "dong_fig5_small_berts_diverse": _counted(
        statement="DistilBERT's and MobileBERT's path lengths over layers are among the three most diverse (rank of "
        "the lower one by standard deviation).",
        measure=partial(_rank_of_small_berts, column="sd_over_layers"),
        claimed=below(3.5),
        control=with_exchanged("architecture", "DistilBERT", "T5-11B"),
    ),
    "dong_fig5_small_berts_diverse_in_heads": _counted(
        statement="DistilBERT's and MobileBERT's path lengths in heads are among the three most diverse (rank of the "
        "lower one by standard deviation).",
        measure=partial(_rank_of_small_berts, column="sd"),
        claimed=below(3.5),
        control=with_exchanged("architecture", "DistilBERT", "T5-11B"),
    ),
}
