"""How long the paths of a network are, and claims on it; table `path_mass`."""

import math

import pandas as pd

from rankbench.judging.claim import Claim
from rankbench.judging.sweeps import in_order, rows_at


def mean_path_length(rows: pd.DataFrame) -> float:
    """Mean length of the paths, each length weighted with the size of its sum; table `path_mass`."""
    lengths = rows[rows.part == "length"]
    return (lengths.path_length * lengths.mass).sum() / lengths.mass.sum()


def length_over(rows: pd.DataFrame, key: str, value: str, other: str) -> float:
    """Mean path length with one value of a swept key over that with another."""
    return mean_path_length(rows_at(rows, key, value)) / mean_path_length(rows_at(rows, key, other))


def shorter_along(key: str, statement: str, source: str) -> Claim:
    """Claim that paths become shorter as a swept key grows."""
    return Claim(
        statement=f"{statement} (Kendall's rank correlation of {key} and their mean length, each length weighted with "
        "the size of its sum; below -.5, three pairs in four in this order, threshold: ours; changes of less than a "
        "tenth count as none).",
        source=source,
        table="path_mass",
        floor="below_floor",
        why_untrained=None,
        **in_order(key, -1, lambda rows: math.log10(mean_path_length(rows))),
    )
