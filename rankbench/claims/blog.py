"""Conditions of the attention-paths blog (on weakly interdependent paths), as tests on the tables.

The blog says that paths are weakly interdependent where these hold, and prints no numbers; the lines are ours.
"""

from collections.abc import Callable

import pandas as pd

from rankbench.claims.claim import Claim

SMALL = 0.1  # of a measure that is 1 where two paths are the same
NATS = 0.1  # of mutual information: that of Gaussian numbers with a correlation of .43
LOST = 0.05  # of accuracy: what few paths may miss of the whole network

# Measures: one seed's rows -> a number


def _of_paths(rows: pd.DataFrame, column: str) -> float:
    return rows[rows.of == "paths"][column].abs().mean()


def _cosine(rows: pd.DataFrame) -> float:
    return _of_paths(rows, "cosine")


def _correlation(rows: pd.DataFrame) -> float:
    return _of_paths(rows, "correlation")


def _information(rows: pd.DataFrame) -> float:
    return _of_paths(rows, "information_ksg")


def _pair_interaction(rows: pd.DataFrame) -> float:
    return _of_paths(rows[rows.scheme == "recomputed"], "interaction")


def _whole_interaction(rows: pd.DataFrame) -> float:
    return rows[rows.of == "network"].interaction.mean()


def _other_heads(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows.of == "heads") & (rows["first"] != rows["second"])]


def _largest_cross_gradient(rows: pd.DataFrame) -> float:
    return _other_heads(rows).cross_gradient_rms.max()


def _relative_cross_gradient(rows: pd.DataFrame) -> float:
    return _other_heads(rows).cross_gradient_relative.mean()


def _share_needed(rows: pd.DataFrame) -> float:
    """Smallest share of the paths that comes within LOST of the whole network's accuracy; mean over repeats."""
    enough = rows[rows.accuracy >= rows.whole_accuracy - LOST]
    return enough.groupby("repeat", dropna=False).kept_share.min().mean()


SOURCE = "Attention-paths blog, weak interdependence"


def _path_pairs(statement: str, measure: Callable[[pd.DataFrame], float], line: float) -> Claim:
    """A condition judged under both schemes."""
    return Claim(statement, SOURCE, "independence", measure, -1, line, by=("scheme",))


BLOG: dict[str, Claim] = {
    "blog_paths_orthogonal": _path_pairs(
        "1: outputs of two paths are orthogonal (mean size of their cosine below .1).", _cosine, SMALL
    ),
    "blog_paths_uncorrelated": _path_pairs(
        "2: outputs of two paths hardly covary over inputs (mean size of their correlation below .1).",
        *(_correlation, SMALL),
    ),
    "blog_paths_additive": _path_pairs(
        "3: the output is nearly the sum of all paths (relative rest below .1; an identity for frozen paths).",
        *(_whole_interaction, SMALL),
    ),
    "blog_pairs_additive": Claim(
        "3: two recomputed paths hardly interact in one network (mean relative interaction below .1).",
        *(SOURCE, "independence", _pair_interaction, -1, SMALL),
    ),
    "blog_cross_gradients_small": Claim(
        "4: second derivatives of the loss by two heads' parameters are much smaller than 1 (largest rms below .01).",
        *(SOURCE, "independence", _largest_cross_gradient, -1, 0.01),
    ),
    "blog_cross_gradients_below_own": Claim(
        "4: they are small beside the heads' own second derivatives (mean ratio below .1).",
        *(SOURCE, "independence", _relative_cross_gradient, -1, SMALL),
    ),
    "blog_paths_independent": _path_pairs(
        "5: outputs of two paths share little information (mean KSG estimate below .1 nats).", _information, NATS
    ),
    "blog_few_paths_suffice": Claim(
        "A few paths carry the prediction: a tenth of them comes within 5 points of the whole network.",
        *("Attention-paths blog, why paths matter", "pruning", _share_needed, -1, 0.1),
        by=("order",),
    ),
}
