"""Measures and controls of claims that compare the values of one key of a sweep (Claim.along)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pandas as pd

from rankbench.judging.claim import AtMost, Control, Threshold, require

# Kendall's correlation from which a sweep counts as a trend: at least three pairs in four are in the claimed order.
MOSTLY = 0.5
# Two values have one pair, and by chance it is in the claimed order in all of three seeds once in eight tables.
FEWEST_VALUES = 3
# The measures of trends are logarithms to base 10. A change of less than a tenth of the number counts as none.
TENTH_MORE = math.log10(1.1)


def rows_by_value(rows: pd.DataFrame, key: str, fewest: int = 1) -> dict[Any, pd.DataFrame]:
    """Rows of each value of a swept key, in increasing order; words in alphabetical order. fewest: values that the
    sweep must have."""
    of_values = f" of {fewest} values or more" if fewest > 1 else ""
    require(key in rows and rows[key].nunique() >= fewest, f"this needs a sweep over {key}{of_values}")
    try:
        values = rows[key].astype(float)
    except ValueError:
        values = rows[key]
    return {value: rows[values == value] for value in sorted(values.unique())}


def rows_at(rows: pd.DataFrame, key: str, value: str) -> pd.DataFrame:
    """Rows of one value of a swept key."""
    by_value = rows_by_value(rows, key)
    require(value in by_value, f"the sweep has no {key}={value}")
    return by_value[value]


def log10_of(number: float) -> float:
    """log10 of a positive number, or a bound of it."""
    log = math.log10(number)
    return AtMost(log) if isinstance(number, AtMost) else log


def rank_correlation(numbers: Sequence[float], smallest_change: float = 0.0) -> float:
    """Kendall's rank correlation of the numbers with their order: 1 if they always grow, -1 if they always fall. Pairs
    that differ by no more than the smallest change count as neither. nan if one of the numbers is nan."""
    if any(map(math.isnan, numbers)):
        return math.nan
    changes = [later - earlier for earlier, later in combinations(numbers, 2)]
    return sum(math.copysign(1.0, change) for change in changes if abs(change) > smallest_change) / len(changes)


def trend(rows: pd.DataFrame, key: str, measure: Callable[[pd.DataFrame], float]) -> float:
    """Rank correlation of a swept key and the measured logarithms, in which changes below TENTH_MORE count as none.

    One number may be hidden by rounding: it can be ranked if its bound is below all others.
    """
    by_value = rows_by_value(rows, key, fewest=FEWEST_VALUES)
    numbers = {value: measure(of_value) for value, of_value in by_value.items()}
    hidden = [number for number in numbers.values() if isinstance(number, AtMost)]
    seen = [number for number in numbers.values() if not isinstance(number, AtMost)]
    is_ranked = not hidden or (len(hidden) == 1 and hidden[0] < min(seen))
    require(is_ranked, f"rounding hides what is left at {len(hidden)} of {len(numbers)} values of {key}")
    return rank_correlation(list(numbers.values()), TENTH_MORE)


def at_end(rows: pd.DataFrame, key: str, measure: Callable[[pd.DataFrame], float], end: int) -> float:
    """Measure at the smallest (end = 0) or the largest (-1) value of a swept key."""
    by_value = rows_by_value(rows, key)
    return measure(by_value[list(by_value)[end]])


def in_reverse(key: str) -> Control:
    """Control of a trend: the measured networks with the values of the key in reverse order."""

    def reverse(rows: pd.DataFrame) -> pd.DataFrame:
        parts = rows_by_value(rows, key)
        mirrored = zip(reversed(parts), parts.values(), strict=True)
        return pd.concat([of_value.assign(**{key: value}) for value, of_value in mirrored])

    return Control(f"the same networks with the values of {key} in reverse order", reverse)


def from_other_end(key: str, end: int) -> Control:
    """Control for `at_end`: the network at the other end of the sweep, where the knob has no effect."""

    def falsify(rows: pd.DataFrame) -> pd.DataFrame:
        by_value = rows_by_value(rows, key)
        values = list(by_value)
        return by_value[values[-1 - end]].assign(**{key: values[end]})

    which = "largest" if end == 0 else "smallest"
    return Control(f"the network with the {which} {key} of the sweep in its place", falsify)


def in_order(key: str, side: int, measure: Callable[[pd.DataFrame], float]) -> dict[str, Any]:
    """Fields of a claim that a number grows (side=+1) or falls (-1) with a swept key. measure: its log10."""
    of_trend = partial(trend, key=key, measure=measure)
    line = Threshold(side, side * MOSTLY)
    return {"measure": of_trend, "claimed": line, "along": key, "control": in_reverse(key), "since": "2026-11-26"}


def at_one_end(key: str, end: int, measure: Callable[[pd.DataFrame], float]) -> dict[str, Any]:
    """Fields of a claim on the number at the smallest (end = 0) or the largest (-1) value of a swept key."""
    of_end = partial(at_end, key=key, measure=measure, end=end)
    return {"measure": of_end, "along": key, "control": from_other_end(key, end)}


def at_value(key: str, value: str, other: str, measure: Callable[[pd.DataFrame], float]) -> dict[str, Any]:
    """Fields of a claim on the number at one value of a swept key. other: the value that the control puts there."""
    of_value = {"measure": lambda rows: measure(rows_at(rows, key, value)), "along": key}
    return of_value | {"control": with_exchanged(key, value, other)}


def between(
    key: str, first: str, second: str, measure: Callable[[pd.DataFrame, pd.DataFrame], float]
) -> dict[str, Any]:
    """Fields of a claim that compares two values of a swept key. measure: of the rows of the first and the second."""
    of_both = {"measure": lambda rows: measure(rows_at(rows, key, first), rows_at(rows, key, second)), "along": key}
    return of_both | {"control": with_exchanged(key, first, second)}


def with_exchanged(key: str, first: str, second: str) -> Control:
    """Control of a comparison of two values of a swept key: each in place of the other."""
    return Control(
        f"{key}={second} in place of {first}",
        lambda rows: rows.assign(**{key: rows[key].replace({first: second, second: first})}),
    )
