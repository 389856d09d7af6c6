"""Claims of Dong et al. 2021 on paths, their lengths, and what networks do with them."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from rankbench.claims.claim import Claim

AT_CHANCE = 0.05  # "not much better than a random guess", taken as within five points of the commonest class
SUM = "Dong et al. 2021, Theorem 2.1"
FIG4 = "Dong et al. 2021, sec. 4.3"
FIG5 = "Dong et al. 2021, app. B.1 and Fig. 5"

# Measures: one seed's rows -> a number


def _sampled(rows: pd.DataFrame, length: int) -> float:
    return rows[(rows.selection == "sampled") & (rows.path_length == length)].accuracy.mean()


def _length_one(rows: pd.DataFrame) -> float:
    return _sampled(rows, 1)


def _longest_above_majority(rows: pd.DataFrame) -> float:
    return _sampled(rows, rows.path_length.max()) - rows.majority_accuracy.mean()


def _shortest_above_majority(rows: pd.DataFrame) -> float:
    return _sampled(rows, 0) - rows.majority_accuracy.mean()


def _rank_correlation_with_length(rows: pd.DataFrame) -> float:
    sampled = rows[(rows.selection == "sampled") & (rows.path_length >= 1)]
    by_length = sampled.groupby("path_length").accuracy.mean()
    if by_length.nunique() < 2:
        return float("nan")
    return stats.spearmanr(by_length.index, by_length).statistic


def whole_accuracy(rows: pd.DataFrame) -> float:
    """Of the whole network: share of the scored tokens."""
    return rows.whole_accuracy.mean()


def _does_as_said(rows: pd.DataFrame) -> float:
    network = rows[rows.weights == "trained"].iloc[0]
    if network.one_step_error >= 1:  # no better than standing still: it has not learned to go round
        return float("nan")
    return float(network.collapsed == (not network["skip"] and not network["mlp"]))


def _remainder_digits(rows: pd.DataFrame) -> float:
    return np.log10(max(rows.remainder.max(), np.finfo(float).tiny))


def _by_architecture(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean and standard deviation of the path length, in heads and over the number of layers."""

    def moments(one: pd.DataFrame) -> pd.Series:
        mean = (one.share * one.path_length).sum()
        sd = (one.share * (one.path_length - mean) ** 2).sum() ** 0.5
        layers = one.layers.iloc[0]
        return pd.Series({"mean": mean, "sd": sd, "mean_over_layers": mean / layers, "sd_over_layers": sd / layers})

    return pd.DataFrame({name: moments(one) for name, one in rows.groupby("architecture", sort=False)}).T


def _gpt3_ahead(rows: pd.DataFrame, column: str) -> float:
    """GPT-3's number less the largest of the others."""
    values = _by_architecture(rows)[column]
    return values["GPT-3"] - values.drop("GPT-3").max()


def _gpt3_ahead_in_heads(rows: pd.DataFrame) -> float:
    return _gpt3_ahead(rows, "mean")


def _gpt3_ahead_in_share(rows: pd.DataFrame) -> float:
    return _gpt3_ahead(rows, "mean_over_layers")


def _rank_of_small_berts(rows: pd.DataFrame, column: str) -> float:
    """Place of the lower one of DistilBERT and MobileBERT, from the largest number down."""
    return _by_architecture(rows)[column].rank(ascending=False)[["DistilBERT", "MobileBERT"]].max()


def _rank_in_heads(rows: pd.DataFrame) -> float:
    return _rank_of_small_berts(rows, "sd")


def _rank_over_layers(rows: pd.DataFrame) -> float:
    return _rank_of_small_berts(rows, "sd_over_layers")


def _counted(statement: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim on path lengths, which are arithmetic: no chance, no training."""
    return Claim(statement, FIG5, "path_counts", measure, side, line, learned=None, exact=True)


def _whole(statement: str, line: float, published: float) -> Claim:
    """A claim of Fig. 4 on the accuracy of the whole network."""
    return Claim(statement, FIG4, "paths", whole_accuracy, +1, line, learned=None, published=published)


def _protocol(statement: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim of Fig. 4 on sampled paths, judged under both schemes: the paper's own protocol is `recomputed`."""
    return Claim(statement, FIG4, "paths", measure, side, line, by=("scheme",))


DONG_PATHS: dict[str, Claim] = {
    "paths_sum_to_output": Claim(
        "The frozen paths and the biases add up to the output (log10 of the relative remainder, float64).",
        *(SUM, "paths", _remainder_digits, -1, -10.0),
        learned=None,
    ),
    "dong_fig4_whole_sorting": _whole("The whole network sorts (published accuracy .98; the line is .95).", 0.95, 0.98),
    "dong_fig4_length_1_sorting": _protocol(
        "Length-1 paths attain an accuracy above .6 on sorting.", _length_one, +1, 0.6
    ),
    "dong_fig3_collapse": Claim(
        "Run freely, attention alone collapses to one point, and an MLP or a skip prevents it (share of seeds).",
        *("Dong et al. 2021, sec. 4.2", "rollout", _does_as_said, +1, 0.5),
        learned=None,
    ),
    "dong_fig4_whole_convex_hull": _whole(
        "The whole network finds the convex hull (published accuracy about .9; the line is .85).", 0.85, 0.9
    ),
    "dong_fig4_length_1_convex_hull": _protocol(
        "Length-1 paths attain an accuracy above .65 on convex hulls.", _length_one, +1, 0.65
    ),
    "dong_fig4_whole_memorization": _whole(
        "The whole network memorises (published accuracy .85; the line is .8).", 0.8, 0.85
    ),
    "dong_fig4_length_1_memorization": _protocol(
        "Length-1 paths attain an accuracy above .8 on memorization.", _length_one, +1, 0.8
    ),
    "dong_fig4_falls_with_length": _protocol(
        "Accuracy falls with path length, from 1 on (Spearman's rank correlation below 0).",
        *(_rank_correlation_with_length, -1, 0.0),
    ),
    "dong_fig4_longest_at_chance": _protocol(
        "The longest paths are not much better than chance (less than 5 points above the commonest class).",
        *(_longest_above_majority, -1, AT_CHANCE),
    ),
    "dong_fig4_length_0_at_chance": _protocol(
        "Length-0 paths hold no useful information (less than 5 points above the commonest class).",
        *(_shortest_above_majority, -1, AT_CHANCE),
    ),
    "dong_fig5_gpt3_longest": _counted(
        "GPT-3 has the longest paths of the nine (its mean length less the longest of the others, in heads).",
        *(_gpt3_ahead_in_heads, +1, 0.0),
    ),
    "dong_fig5_gpt3_most_long_paths": _counted(
        "GPT-3 is the most long-paths-focused of the nine (mean length over layers, less the largest of the others).",
        *(_gpt3_ahead_in_share, +1, 0.0),
    ),
    "dong_fig5_small_berts_diverse": _counted(
        "DistilBERT's and MobileBERT's path lengths over layers are among the three most diverse (place by sd).",
        *(_rank_over_layers, -1, 3.5),
    ),
    "dong_fig5_small_berts_diverse_in_heads": _counted(
        "DistilBERT's and MobileBERT's path lengths in heads are among the three most diverse (place by sd).",
        *(_rank_in_heads, -1, 3.5),
    ),
}
