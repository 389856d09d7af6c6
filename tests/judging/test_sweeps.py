"""Claims that compare the values of one key of a sweep: rankbench.judging.sweeps, Claim.along and Claim.exists."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hand_written import write_run
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbench.judging import CLAIMS, Claim, judge
from rankbench.judging.claim import AtMost, Control, NotMeasurable, above
from rankbench.judging.sweeps import at_end, from_other_end, in_reverse, rows_at, rows_by_value, trend
from rankbench.report.report import gather_sweep

KEY = "model.knob"


def swept(numbers, seeds=3):
    """A table of a sweep over KEY, its values as texts, as in a report: numbers maps each to the log10 of a measure."""
    rows = [
        {"run": f"run {text}", "seed": seed, KEY: text, "value": number + 0.001 * seed, "hidden": False}
        for text, number in numbers.items()
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows)


def value(rows):
    (number,) = rows.value
    return AtMost(number) if rows.hidden.iloc[0] else number


def of_seed(table, seed=0):
    return table[table.seed == seed]


def test_values_are_ordered_as_numbers_or_as_words():
    assert list(rows_by_value(swept({"10": 0, "0.5": 0, "2": 0}), KEY)) == [0.5, 2.0, 10.0]
    assert list(rows_by_value(swept({"sigma": 0, "none": 0}), KEY)) == ["none", "sigma"]
    assert rows_at(swept({"sigma": 0, "none": 1}), KEY, "sigma").value.min() == 0
    for rows, reason in ((swept({"none": 0}), "no model.knob=sigma"), (pd.DataFrame({"seed": [0]}), "sweep over")):
        with pytest.raises(NotMeasurable, match=reason):
            rows_at(rows, KEY, "sigma")


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=3, max_size=6, unique=True))
def test_the_trend_is_scipys_rank_correlation(numbers):
    rows = of_seed(swept({f"{2.0**exponent}": number / 10 for exponent, number in enumerate(numbers)}))
    wanted = scipy.stats.kendalltau(range(len(numbers)), numbers).statistic
    assert trend(rows, KEY, value) == pytest.approx(wanted, abs=1e-12)
    assert trend(in_reverse(KEY).falsify(rows), KEY, value) == pytest.approx(-wanted, abs=1e-12)


def test_changes_of_less_than_a_tenth_are_no_trend():
    less, more = math.log10(1.09), math.log10(1.11)
    assert trend(of_seed(swept({"1": 0.0, "2": less, "3": less / 2})), KEY, value) == 0
    # of three pairs, one grows by more than a tenth
    assert trend(of_seed(swept({"1": 0.0, "2": less, "3": more})), KEY, value) == pytest.approx(1 / 3)
    assert trend(of_seed(swept({"1": -math.inf, "2": -math.inf, "3": 0.0})), KEY, value) == pytest.approx(2 / 3)


def test_of_what_rounding_hides_one_number_can_be_ranked():
    rows = of_seed(swept({"1": 0.1, "2": 0.5, "3": 0.7}))
    assert trend(rows.assign(hidden=rows[KEY] == "1"), KEY, value) == 1
    for hidden in (["1", "2"], ["2"], ["3"]):  # two of them, or one that is above another number
        with pytest.raises(NotMeasurable, match="rounding hides what is left"):
            trend(rows.assign(hidden=rows[KEY].isin(hidden)), KEY, value)


def test_a_trend_needs_three_values():
    """Of two, chance puts all of three seeds in the claimed order once in eight tables."""
    two = of_seed(swept({"1": 0.1, "2": 0.9}))
    for rows in (two, of_seed(swept({"1": 0.1})), of_seed(swept({"1": 0.1})).drop(columns=KEY)):
        with pytest.raises(NotMeasurable, match=r"this needs a sweep over model\.knob of 3 values or more"):
            trend(rows, KEY, value)


def test_a_value_without_a_number_leaves_no_trend():
    """With five values, the four others would be six pairs of ten in the claimed order."""
    rows = of_seed(swept({"1": 0.1, "2": 0.5, "4": 0.7, "8": 0.9, "16": math.nan}))
    assert math.isnan(trend(rows, KEY, value))


@pytest.mark.parametrize(("end", "at_this_end", "at_other_end"), [(0, 3.0, 1.0), (-1, 1.0, 3.0)])
def test_the_end_of_a_sweep_and_its_control(end, at_this_end, at_other_end):
    rows = of_seed(swept({"10": 1.0, "2": 2.0, "0.5": 3.0}))
    assert at_end(rows, KEY, value, end) == at_this_end
    control = from_other_end(KEY, end)
    assert at_end(control.falsify(rows), KEY, value, end) == at_other_end
    assert ("largest" if end == 0 else "smallest") in control.statement


# --- judged along a key -----------------------------------------------------------------------------------------------


@pytest.fixture
def along(monkeypatch):
    """A claim that what is measured grows with the knob; its fields can be changed."""

    def make(**fields):
        defaults = {"measure": lambda rows: trend(rows, KEY, value), "claimed": above(0.5), "along": KEY}
        defaults |= {"statement": "It grows.", "source": "a test", "table": "residual", "why_untrained": None}
        claim = Claim(**{**defaults, "control": in_reverse(KEY), **fields})
        monkeypatch.setitem(CLAIMS, "grows", claim)

    make()
    return make


def test_the_key_is_compared_and_all_others_are_judged_one_by_one(along):
    up, down = swept({"1": 0.1, "2": 0.2, "4": 0.3}), swept({"1": 0.3, "2": 0.2, "4": 0.1})
    table = pd.concat([up.assign(**{"model.heads": "1"}), down.assign(**{"model.heads": "4"})])
    for facet in ([KEY, "model.heads"], ["model.heads", KEY], "model.heads"):
        outcomes = [(verdict["where"], verdict["outcome"]) for verdict in judge("grows", table, facet)]
        assert outcomes == [("model.heads=1", "held"), ("model.heads=4", "failed")]
    (verdict,) = judge("grows", up, [KEY])
    assert (verdict["where"], verdict["measured"]) == ("", 1.0)


def test_a_report_hands_over_all_the_keys_of_a_sweep(along, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "rankbench.report.figures.draw", lambda pages, *_: dict.fromkeys(map(str, range(len(pages["residual"]))))
    )
    monkeypatch.setattr("rankbench.report.report.write_page", lambda *_, **__: None)
    for number, (heads, knob) in enumerate(itertools.product((1, 4), (0.5, 2, 10))):
        config = {"claims": ["grows"], "model": {"heads": heads, "knob": knob}}
        values = np.arange(3) * 0.01 + (knob if heads == 1 else -knob)
        rows = {"run": str(number), "task": "sorting", "model": "san", "seed": range(3), "variant": "full"}
        write_run(tmp_path / str(number), config, residual=rows | {"value": values, "hidden": False})
    gather_sweep(tmp_path, ["model.heads", KEY])
    verdicts = pd.read_csv(tmp_path / "verdicts.csv")
    assert verdicts[["where", "outcome"]].values.tolist() == [["model.heads=1", "held"], ["model.heads=4", "failed"]]


def test_an_example_holds_what_exists_and_the_lack_of_one_refutes_nothing(along):
    neutral = Control("nothing", lambda rows: rows.assign(value=0.0, hidden=False))
    along(exists=True, measure=lambda rows: rows.value.mean(), along="", control=neutral)
    assert judge("grows", swept({"1": 0.9}))[0]["outcome"] == "held"
    (verdict,) = judge("grows", swept({"1": 0.1}))
    assert verdict["outcome"] == "undecided" and "does not refute" in verdict["reason"]
    assert verdict["measured"] == pytest.approx(0.101)
    along(exists=True, measure=lambda rows: rows.value.mean(), along="", control=Control("same", lambda rows: rows))
    (verdict,) = judge("grows", swept({"1": 0.9}))
    assert verdict["outcome"] == "undecided" and "its control did not fail" in verdict["reason"]
    assert math.isfinite(verdict["measured"])
