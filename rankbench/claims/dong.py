"""Claims of Dong et al. 2021, Attention is not all you need."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from rankbench.claims.claim import Claim

AT_CHANCE = 0.05  # "not much better than a random guess", taken as within five points of the commonest class

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


def _whole(rows: pd.DataFrame) -> float:
    return rows.whole_accuracy.mean()


def _remainder_digits(rows: pd.DataFrame) -> float:
    return np.log10(max(rows.remainder.max(), np.finfo(float).tiny))


SUM = "Dong et al. 2021, Theorem 2.1"
FIG4 = "Dong et al. 2021, sec. 4.3"


def _protocol(statement: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim of Fig. 4 on sampled paths, judged under both schemes: the paper's own protocol is `recomputed`."""
    return Claim(statement, FIG4, "paths", measure, side, line, by=("scheme",))


DONG: dict[str, Claim] = {
    "paths_sum_to_output": Claim(
        "The frozen paths and the biases add up to the output (log10 of the relative remainder, float64).",
        *(SUM, "paths", _remainder_digits, -1, -10.0),
        needs_trained=False,
    ),
    "dong_fig4_whole_sorting": Claim(
        "The whole network sorts (published accuracy .98; the line is .95).",
        *(FIG4, "paths", _whole, +1, 0.95),
        needs_trained=False,
    ),
    "dong_fig4_length_1_sorting": _protocol(
        "Length-1 paths attain an accuracy above .6 on sorting.", _length_one, +1, 0.6
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
}
