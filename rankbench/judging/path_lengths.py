"""How long the paths of a network are, and claims on it; table `path_mass`."""

import math

import pandas as pd

from rankbench.judging.claim import Claim, of_any_weights
from rankbench.judging.sweeps import in_order


def mean_path_length(rows: pd.DataFrame) -> float:
    """Mean length of the paths, each length weighted with the size of its sum; table `path_mass`."""
    lengths = rows[rows.part == "length"]
    return (lengths.path_length * lengths.mass).sum() / lengths.mass.sum()


def length_over(rows: pd.DataFrame, others: pd.DataFrame) -> float:
    """Mean path length over that of other rows."""
    return mean_path_length(rows) / mean_path_length(others)


def shorter_along(key: str, statement: str, source: str) -> Claim:
    """Claim that paths become shorter as a swept key grows."""
    return of_any_weights(
        statement=f"{statement} (Kendall's rank correlation of {key} and their mean length, each length weighted with "
        "the size of its sum; below -.5, three pairs in four in this order, threshold: ours; changes of less than a "
        "tenth count as none).",
        source=source,
        table="path_mass",
        floor="below_floor",
        **in_order(key, -1, lambda rows: math.log10(mean_path_length(rows))),
    )
