"""The mean of one number per seed: its 95 % interval, its p-value against a line, and how many seeds would decide.

All three use the same distribution, so that the interval excludes a line on the claimed side where p is below LEVEL.
Also the difference of two means, paired or not, and p-values of several tests adjusted together.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
import scipy

LEVEL = 0.025  # one-sided level that belongs to an interval of 95 %
POWER = 0.8
MOST_REPEATS = 10_000  # repeats beyond which a number counts as lying on the line
SAME = 1e-9  # relative difference of two numbers that are the same up to rounding
FAR = 30.0  # standard errors at which a test of any size has a power of .97 or more; SciPy loses digits farther out

# Of numbers that are bounded: to the scale of Student's t and back, and by what an error of the number is divided there
SCALES: dict[str, tuple[Any, Any, Any]] = {
    "share": (scipy.special.logit, scipy.special.expit, lambda mean: mean * (1 - mean)),
    "positive": (np.log, np.exp, lambda mean: mean),
}

Numbers: TypeAlias = float | np.ndarray | pd.Series
Values: TypeAlias = Sequence[float] | np.ndarray | pd.Series


class Interval(NamedTuple):
    """A mean, the ends of its 95 % interval (nan if there is none), and the interval's method."""

    mean: float
    low: float
    high: float
    method: str  # t | t of logits | t of logarithms | Clopper-Pearson | Welch | none


@dataclass(frozen=True)
class _Mean:
    """A mean, and its standard error on the scale of Student's t, on which distances are measured from the mean."""

    mean: float
    error: float
    count: int
    method: str

    def distance(self, number: float) -> float:
        """Distance of a number from the mean; infinite for a number outside of the scale."""
        if self.method == "t of logits":
            return float(scipy.special.logit(min(max(number, 0.0), 1.0)) - scipy.special.logit(self.mean))
        if self.method == "t of logarithms":
            return math.log(number / self.mean) if number > 0 else -math.inf
        return number - self.mean


def _mean(values: Values, scale: str) -> _Mean:
    values = np.asarray(values, dtype=float)
    mean, count = float(values.mean()), len(values)
    error = float(values.std(ddof=1) / np.sqrt(count))
    if scale == "share" and 0 < mean < 1:
        return _Mean(mean, error / (mean * (1 - mean)), count, "t of logits")
    if scale == "positive" and mean > 0:
        return _Mean(mean, error / mean, count, "t of logarithms")
    return _Mean(mean, error, count, "t")


def interval95(values: Values, scale: str = "real") -> Interval:
    """Mean of one number per seed, with a 95 % interval that stays within the numbers' scale.

    real: Student's t. share, for numbers in [0, 1]: Student's t for the logit of the mean; its standard error is the
    mean's, divided by mean (1 - mean) (delta method). positive, for numbers above 0 without an upper end: Student's t
    for the logarithm of the mean; its standard error is the mean's, divided by the mean. rate, for numbers that are 0
    or 1: Clopper and Pearson's exact interval.
    """
    if scale == "rate":
        ends = scipy.stats.binomtest(int(np.sum(values)), len(values)).proportion_ci(1 - 2 * LEVEL, method="exact")
        return Interval(float(np.mean(values)), float(ends.low), float(ends.high), "Clopper-Pearson")
    if len(values) < 2:
        return Interval(float(np.mean(values)), math.nan, math.nan, "none")
    mean = _mean(values, scale)
    low, high = ends95(mean.mean, half_width(float(np.std(values, ddof=1)), mean.count), scale)
    # for equal values, going to logits and back can round an end past the mean
    return Interval(mean.mean, min(float(low), mean.mean), max(float(high), mean.mean), mean.method)


def half_width(sd: Numbers, num_values: Numbers) -> Numbers:
    """Half-width of Student's 95 % interval for the mean of `num_values` values with standard deviation `sd`; nan for
    one value."""
    return scipy.special.stdtrit(num_values - 1, 1 - LEVEL) * sd / num_values**0.5


def ends95(means: Numbers, half_widths: Numbers, scale: str) -> tuple[Any, Any]:
    """Ends of the intervals of `interval95` for means with these half-widths of Student's interval. Means that have no
    logarithm or no logit have Student's."""
    if scale not in SCALES:
        return means - half_widths, means + half_widths
    to, back, slope = SCALES[scale]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        low, high = (back(to(means) + sign * half_widths / slope(means)) for sign in (-1, 1))
        has_scale = np.isfinite(to(means))
    return np.where(has_scale, low, means - half_widths), np.where(has_scale, high, means + half_widths)


def p_value(values: Values, line: float, side: int, scale: str = "real") -> float:
    """One-sided p-value of the claim that the mean lies above (side=+1) or below (-1) the line. side=0: that it lies
    between -line and line, the larger p of two one-sided tests. nan for fewer than two values."""
    if side == 0:
        return max(p_value(values, -line, +1, scale), p_value(values, line, -1, scale))
    if scale == "rate":
        alternative = "greater" if side > 0 else "less"
        return float(scipy.stats.binomtest(int(np.sum(values)), len(values), line, alternative).pvalue)
    if len(values) < 2:
        return math.nan
    mean = _mean(values, scale)
    beyond = -side * mean.distance(line)
    if mean.error == 0:
        return 0.5 if beyond == 0 else float(beyond < 0)
    return float(scipy.stats.t.sf(beyond / mean.error, mean.count - 1))


def paired_difference(first: Values, second: Values) -> tuple[Interval, float]:
    """Mean of first - second, with its 95 % interval, and the two-sided p-value of Student's test that it is 0 (nan for
    one pair). Pairs that agree to SAME of their size have no difference: it would be rounding."""
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    differences = np.where(np.isclose(first, second, rtol=SAME, atol=0), 0.0, first - second)
    one_sided = min(p_value(differences, 0.0, +1), p_value(differences, 0.0, -1))
    return interval95(differences), min(1.0, 2 * one_sided) if len(differences) > 1 else math.nan


def unpaired_difference(first: Values, second: Values) -> tuple[Interval, float]:
    """Difference of the means, first - second, with its 95 % interval, and the two-sided p-value of Welch's test that
    it is 0; nan if either has one value only."""
    difference, counts = float(np.mean(first) - np.mean(second)), np.array([len(first), len(second)])
    if counts.min() < 2:
        return Interval(difference, math.nan, math.nan, "none"), math.nan
    squares = np.array([np.var(first, ddof=1), np.var(second, ddof=1)]) / counts
    if not squares.any():  # the interval is a point
        return Interval(difference, difference, difference, "Welch"), float(difference == 0)
    error, freedom = math.sqrt(squares.sum()), float(squares.sum() ** 2 / (squares**2 / (counts - 1)).sum())
    half = float(scipy.special.stdtrit(freedom, 1 - LEVEL)) * error
    p = 2 * float(scipy.stats.t.sf(abs(difference) / error, freedom))
    return Interval(difference, difference - half, difference + half, "Welch"), p


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted by Holm's method: where those below a level are rejected, the chance of a
    single wrong rejection is below that level. nan stands for no test."""
    adjusted, so_far = [math.nan] * len(p_values), 0.0
    family = sorted((p, index) for index, p in enumerate(p_values) if not math.isnan(p))
    for rank, (p, index) in enumerate(family):
        so_far = adjusted[index] = max(so_far, min(1.0, (len(family) - rank) * p))
    return adjusted


def num_to_decide(values: Values, line: float, side: int, scale: str = "real") -> float:
    """Smallest number of values whose interval would exclude the line with a probability of POWER, if their mean and
    spread are those of `values`.

    inf if no number up to MOST_REPEATS does, because the mean lies on the line or too close to it. nan for fewer than
    two values. With side=0, an interval decides if it lies wholly between the two lines or wholly outside of them.
    """
    if len(values) < 2:
        return math.nan
    if scale == "rate":
        return _num_to_decide_rate(float(np.mean(values)), line)
    mean = _mean(values, scale)
    ends = [mean.distance(end) for end in ((-line, line) if side == 0 else (line,))]
    if abs(mean.mean) >= line and side == 0:
        ends = [min(ends, key=abs)]
    if mean.error == 0:  # the interval is a point
        return 2 if all(ends) else math.inf
    in_spreads = [abs(end) / (mean.error * math.sqrt(mean.count)) for end in ends]

    def power(count: int) -> float:
        edge, root = scipy.special.stdtrit(count - 1, 1 - LEVEL), math.sqrt(count)
        # the probability that both tests reject is at least the sum of their powers minus 1
        return sum(scipy.stats.nct.sf(edge, count - 1, min(end * root, FAR)) for end in in_spreads) + 1 - len(ends)

    counts = range(2, MOST_REPEATS + 1)
    position = bisect.bisect_left(counts, POWER, key=power)
    return counts[position] if position < len(counts) else math.inf


def _num_to_decide_rate(mean: float, line: float) -> float:
    counts = np.arange(2, MOST_REPEATS + 1)
    if mean < line:  # the mirror image: failures above 1 - line
        mean, line = 1 - mean, 1 - line
    fewest = scipy.stats.binom.isf(LEVEL, counts, line) + 1  # successes that exclude the line
    decides = scipy.stats.binom.sf(fewest - 1, counts, mean) >= POWER
    return float(counts[decides.argmax()]) if decides.any() and mean > line else math.inf
