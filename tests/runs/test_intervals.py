"""rankbench.runs.intervals: p-values and numbers of seeds against scipy's tests and against simulated experiments."""

import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbench.runs.intervals import (
    LEVEL,
    POWER,
    interval95,
    num_to_decide,
    p_value,
    paired_difference,
    unpaired_difference,
)

every = settings(max_examples=20, deadline=None)
SCALES = {"real": (-3.0, 3.0), "share": (0.05, 0.95), "positive": (0.1, 9.0)}


def varied(values):
    """Whether there is a spread that rounding does not hide."""
    return np.std(values) > 1e-3


@every
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9).filter(varied), st.floats(-2, 2))
def test_p_is_that_of_scipys_one_sided_t_test(values, line):
    for side, alternative in ((+1, "greater"), (-1, "less")):
        wanted = scipy.stats.ttest_1samp(values, line, alternative=alternative).pvalue
        assert p_value(values, line, side) == pytest.approx(wanted, rel=1e-6, abs=1e-12)
    # two one-sided tests, as scipy has them
    low, high = (
        scipy.stats.ttest_1samp(values, end, alternative=alternative).pvalue
        for end, alternative in ((-abs(line), "greater"), (abs(line), "less"))
    )
    assert p_value(values, abs(line), 0) == pytest.approx(max(low, high), rel=1e-6, abs=1e-12)


@every
@given(st.sampled_from(list(SCALES)), st.data())
def test_p_is_below_its_level_where_the_interval_excludes_the_line(scale, data):
    numbers = st.floats(*SCALES[scale])
    values = data.draw(st.lists(numbers, min_size=3, max_size=8).filter(varied))
    line, interval = data.draw(numbers), interval95(values, scale)
    if min(abs(interval.low - line), abs(interval.high - line)) < 1e-9:  # rounding decides
        return
    assert (p_value(values, line, +1, scale) < LEVEL) == (interval.low > line)
    assert (p_value(values, line, -1, scale) < LEVEL) == (interval.high < line)


@pytest.mark.parametrize("line", [0.3, 0.5])
def test_p_of_a_rate_goes_with_clopper_and_pearson(line):
    for successes in range(11):
        values = [1.0] * successes + [0.0] * (10 - successes)
        low, high = interval95(values, "rate")[1:3]
        assert (p_value(values, line, +1, "rate") <= LEVEL) == (low >= line)
        assert (p_value(values, line, -1, "rate") <= LEVEL) == (high <= line)


def test_without_spread_p_is_0_or_1_and_on_the_line_neither():
    assert [p_value([2.0] * 3, line, +1) for line in (1.0, 3.0, 2.0)] == [0.0, 1.0, 0.5]
    assert [p_value([0.0] * 3, 1.0, 0), p_value([2.0] * 3, 1.0, 0)] == [0.0, 1.0]
    # no line of a scale is beyond its ends
    assert p_value([0.5, 0.6, 0.7], -1.0, +1, "positive") == p_value([0.5, 0.6, 0.7], 1.0, -1, "share") == 0.0
    assert math.isnan(p_value([2.0], 1.0, +1))


def share_decided(generator, count, line, side, mean, spread, runs=4000):
    """Share of simulated experiments whose interval decides on the side on which the true mean lies."""
    values = generator.normal(mean, spread, (runs, count))
    halfwidth = scipy.stats.t.ppf(0.975, count - 1) * values.std(axis=1, ddof=1) / math.sqrt(count)
    low, high = values.mean(axis=1) - halfwidth, values.mean(axis=1) + halfwidth
    if side == 0:
        inside = (low > -line) & (high < line)
        return (inside if abs(mean) < line else (low > line) | (high < -line)).mean()
    return ((low > line) if mean > line else (high < line)).mean()


@pytest.mark.parametrize(
    ("values", "line", "side"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1.5, +1),  # the mean is one spread above the line
        ([1.0, 2.0, 3.0, 4.0, 5.0], 4.0, +1),  # below the line: as many seeds refute the claim
        ([0.1, 0.5, 0.3, 0.2], 0.33, -1),
        ([-1.0, 0.0, 1.3], 1.5, 0),  # both ends must be excluded
        ([0.9, 1.5, 2.4], 1.0, 0),  # outside of one of them
    ],
)
def test_so_many_seeds_decide_in_four_experiments_of_five(values, line, side):
    generator = np.random.default_rng(7)
    count, mean, spread = num_to_decide(values, line, side), np.mean(values), np.std(values, ddof=1)
    assert count > len(values)
    # .006 is the standard error of a share of .8 of 4000
    assert share_decided(generator, count, line, side, mean, spread) > POWER - 0.02
    assert share_decided(generator, count - 1, line, side, mean, spread) < POWER + 0.02


@pytest.mark.further
def test_so_many_runs_decide_on_a_rate():
    count = int(num_to_decide([1.0] * 8 + [0.0] * 2, 0.5, +1, "rate"))

    def power(number):
        lows = [interval95([1.0] * k + [0.0] * (number - k), "rate").low for k in range(number + 1)]
        return sum(scipy.stats.binom.pmf(k, number, 0.8) for k, low in enumerate(lows) if low > 0.5)

    assert power(count) >= POWER > max(power(number) for number in range(2, count))
    mirrored = num_to_decide([0.0] * 8 + [1.0] * 2, 0.5, +1, "rate")  # the rate of failures
    assert mirrored == count


def test_where_more_seeds_do_not_help():
    assert num_to_decide([1.0, 2.0, 3.0], 2.0, +1) == math.inf  # on the line
    assert num_to_decide([1.0, 2.0, 3.0], 2.0001, +1) == math.inf  # too close to it
    assert num_to_decide([1.0, 1.0, 1.0], 1.0, +1) == math.inf  # without any spread
    assert num_to_decide([1.0, 1.0], 2.0, +1) == 2  # not on the line: a point, whatever the number
    assert num_to_decide([1.0] * 5 + [0.0] * 5, 0.5, +1, "rate") == math.inf
    assert math.isnan(num_to_decide([1.0], 2.0, +1))


def test_the_scale_counts():
    """Of numbers far below 1 the logarithms of the mean decide, so a line a factor above them is far away."""
    values, line = np.array([1.0, 2.0, 4.0]) * 1e-6, 2e-5
    on_log = np.log(line / values.mean()) / (values.std(ddof=1) / values.mean())
    count = num_to_decide(values, line, -1, "positive")
    powers = [
        scipy.stats.nct.sf(scipy.stats.t.ppf(0.975, n - 1), n - 1, on_log * math.sqrt(n)) for n in (count - 1, count)
    ]
    assert powers[0] < POWER <= powers[1]


@pytest.mark.parametrize("scale", ["real", "share", "positive"])
def test_the_interval_of_equal_values_holds_their_mean(scale):
    """The logit of 1/6 and back is 1/6 + 3e-17, which made the end of an error bar negative."""
    for value in (1 / 6, *(number / 50 for number in range(1, 50))):
        interval = interval95([value] * 3, scale)
        assert interval.low <= interval.mean <= interval.high


@every
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=9))
def test_a_paired_difference_is_that_of_scipys_test_of_pairs(pairs):
    first, second = np.array(pairs).T
    if not varied(first - second):
        return
    wanted = scipy.stats.ttest_rel(first, second)
    ends = wanted.confidence_interval(0.95)
    interval, p = paired_difference(first, second)
    assert (interval.low, interval.high) == pytest.approx((ends.low, ends.high), rel=1e-6, abs=1e-9)
    assert p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)
    assert (p < 2 * LEVEL) == (interval.low > 0 or interval.high < 0) or abs(p - 2 * LEVEL) < 1e-9


def test_pairs_that_differ_by_rounding_have_no_difference_and_one_pair_has_no_interval():
    # without the guard every pair differs by 2e-16 of its size, with hardly any spread
    first = np.array([3.0, 5.0, 7.0])
    interval, p = paired_difference(first, np.nextafter(first, np.inf))
    assert (interval.mean, interval.low, interval.high, p) == (0, 0, 0, 1)
    interval, p = paired_difference([0.5], [0.25])
    assert interval.mean == 0.25 and np.isnan([interval.low, interval.high, p]).all()


@every
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_an_unpaired_difference_is_that_of_scipys_welch_test(first, second):
    if not (varied(first) and varied(second)):
        return
    wanted = scipy.stats.ttest_ind(first, second, equal_var=False)
    ends = wanted.confidence_interval(0.95)
    interval, p = unpaired_difference(first, second)
    assert (interval.low, interval.high) == pytest.approx((ends.low, ends.high), rel=1e-6, abs=1e-9)
    assert p == pytest.approx(wanted.pvalue, rel=1e-6, abs=1e-12)


def test_an_unpaired_difference_without_spread_is_a_point_and_of_one_value_has_no_interval():
    interval, p = unpaired_difference([2.0, 2.0], [1.0, 1.0])
    assert (interval.low, interval.high, p) == (1, 1, 0)
    interval, p = unpaired_difference([2.0], [1.0, 1.5])
    assert interval.mean == 0.75 and np.isnan([interval.low, interval.high, p]).all()
