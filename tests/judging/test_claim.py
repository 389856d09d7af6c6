"""rankbench.judging: outcomes against scipy's confidence intervals, measures against numbers written out by hand."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from refusals import refusal

from rankbench import judging
from rankbench.config import plugins
from rankbench.config.schema import conf_dir
from rankbench.judging import CLAIMS, Claim, figures_published, judge, published, verdict_line
from rankbench.judging.claim import AtMost, Control, NotMeasurable, above, below, within

every = settings(max_examples=10, deadline=None)


ON_THE_OTHER_SIDE = Control("each value on the other side of 1", lambda rows: rows.assign(value=2 - rows.value))


@pytest.fixture(scope="module", autouse=True)
def plain_claims():
    """Two claims on the column `value`: above 1, and below 1."""
    plain = {
        name: Claim(f"It is {name} one.", "a test", "paths", mean_value, claimed, ON_THE_OTHER_SIDE)
        for name, claimed in (("above", above(1.0)), ("below", below(1.0)))
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, claim in plain.items():
            patch.setitem(judging.CLAIMS, name, claim)
        yield


def mean_value(rows):
    return rows.value.mean()


def valued(values, whole_accuracy=1.0):
    """One row a seed."""
    return pd.DataFrame({"seed": range(len(values)), "value": values, "whole_accuracy": whole_accuracy})


@pytest.fixture
def changed(monkeypatch):
    """Replaces fields of both plain claims, or the number `line` that they compare with."""

    def change(line=1.0, **fields):
        for name in ("above", "below"):
            claimed = {"claimed": CLAIMS[name].claimed._replace(at=line)}
            monkeypatch.setitem(CLAIMS, name, dataclasses.replace(CLAIMS[name], **claimed | fields))

    return change


# --- claims of others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"claimed": 1.0}, "claimed is of type float; give above(x), below(x) or within(x)"),
        ({"control": "none"}, "control is of type str; give a Control"),
        ({"by": "scheme"}, "by is of type str; give a tuple of columns"),
        ({"why_untrained": "lazy"}, "why_untrained is of type str; give a function or None"),
        ({"published": "1.5"}, "published is of type str; give a number or a function"),
        (
            {"scale": "positiv"},
            "scale=positiv: unknown, did you mean positive?; allowed are real, share, positive, rate",
        ),
    ],
)
def test_what_is_no_claim_is_refused(fields, said):
    assert refusal(dataclasses.replace, CLAIMS["above"], **fields).startswith(said)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"measure": lambda rows: rows.value}, "TypeError: its measure gave a Series; return a number"),
        ({"measure": lambda rows: None}, "TypeError: its measure gave a NoneType; return a number"),
        ({"scale": "share"}, "ValueError: its measure gave 3, which is outside of its scale, share"),
        ({"scale": "positive", "measure": lambda rows: -1.0}, "ValueError: its measure gave -1, which is outside of"),
        ({"control": Control.beyond("none", value="2 * vale")}, "UndefinedVariableError: name 'vale' is not defined"),
        ({"control": Control("no rows", lambda rows: None)}, "AttributeError: 'NoneType' object has no attribute"),
        ({"by": ("scheme",)}, "KeyError: 'scheme'"),
    ],
)
def test_a_plugins_claim_that_cannot_be_judged_is_one_line(changed, monkeypatch, fields, said):
    monkeypatch.setattr(plugins, "brought", lambda kind: ["above"])
    monkeypatch.setattr(plugins, "frames_of_user", lambda error: [])  # this file is no plug-in
    changed(**fields)
    line = refusal(judge, "above", valued([3.0, 3.1, 3.2]))
    assert line.startswith(f"claims=above: cannot be judged on its table, paths ({said}")


# --- outcomes ---------------------------------------------------------------------------------------------------------


@every
@given(st.lists(st.floats(-10, 10), min_size=3, max_size=12), st.sampled_from(["above", "below"]))
@example([1.9, 2.0, 2.1], "above")
@example([1.9, 2.0, 2.1], "below")
@example([0.8, 1.1, 1.5], "below")
@example([1.0, 1.0, 1.0], "above")  # on the line
@example([2.0, 2.0, 2.0], "below")  # no spread at all
def test_the_outcome_is_where_scipys_interval_lies(values, name):
    (verdict,) = judge(name, valued(values))
    mean, error = np.mean(values), scipy.stats.sem(values)
    # without spread scipy's interval is nan; a point is what it should be
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, mean, error) if error > 0 else (mean, mean)
    assert verdict["measured"] == pytest.approx(mean, rel=1e-12, abs=1e-12)
    assert [verdict["low95"], verdict["high95"]] == pytest.approx([low, high], rel=1e-9, abs=1e-9)
    assert (verdict["num_seeds"], verdict["num_repeats"], verdict["interval"]) == (len(values), len(values), "t")
    assert verdict["claimed"] == {"above": "> 1", "below": "< 1"}[name]
    if error > 0 and min(abs(low - 1), abs(high - 1)) < 1e-9:  # rounding decides
        return
    wanted = "undecided" if low <= 1 <= high else ("held" if (low > 1) == (name == "above") else "failed")
    assert verdict["outcome"] == wanted
    assert bool(verdict["reason"]) == (wanted == "undecided")


@pytest.mark.parametrize(
    ("values", "accuracy", "reason"),
    [
        ([2.0, 2.1], 1.0, "fewer than 3 seeds"),
        ([2.0], 1.0, "fewer than 3 seeds"),
        ([2.0, 2.1, math.nan], 1.0, "not measurable"),
        ([2.0, 2.1, math.inf], 1.0, "not measurable"),
        ([2.0, 2.1, 2.2], 0.897, "not learned its task (accuracy 0.897)"),
        ([0.9, 1.0, 1.2], 1.0, "within the interval"),
    ],
)
def test_why_a_claim_is_undecided(values, accuracy, reason):
    (verdict,) = judge("above", valued(values, accuracy))
    assert verdict["outcome"] == "undecided" and reason in verdict["reason"]
    assert "\n" not in verdict_line(verdict)
    assert math.isnan(verdict["low95"]) == (len(values) == 1 or not np.isfinite(values).all())


def test_what_a_measure_says_it_cannot_measure_is_the_reason(changed):
    def nothing_to_measure(rows):
        raise NotMeasurable("there is no skip to take out")

    changed(measure=nothing_to_measure)
    (verdict,) = judge("above", valued([2.0, 2.1, 2.2]))
    assert (verdict["outcome"], verdict["reason"]) == ("undecided", "there is no skip to take out")


def test_an_untrained_network_can_be_judged_where_the_claim_is_no_matter_of_training(changed):
    table = valued([2.0, 2.1, 2.2], whole_accuracy=0.1)
    assert judge("above", table)[0]["outcome"] == "undecided"
    changed(why_untrained=None)
    assert judge("above", table)[0]["outcome"] == "held"


def test_whether_it_has_learned_is_the_mean_over_seeds_however_many_rows_each_has():
    table = pd.concat([valued([2.0, 2.1, 2.2]), *[valued([2.0]).assign(whole_accuracy=0.8)] * 20])
    table.loc[table.seed == 0, "whole_accuracy"] = 0.8  # seeds .8, 1, 1: the mean of seeds is .93, that of rows .83
    assert judge("above", table)[0]["outcome"] == "held"


@pytest.mark.parametrize(("ceiling", "outcome"), [(0.95, "held"), (math.nan, "undecided"), (1.0, "undecided")])
def test_an_accuracy_is_taken_as_a_share_of_what_can_be_reached(ceiling, outcome):
    table = valued([2.0, 2.1, 2.2], whole_accuracy=0.86)
    assert judge("above", table.assign(ceiling_accuracy=ceiling))[0]["outcome"] == outcome


def test_rows_at_the_floor_of_rounding_are_counted(changed):
    changed(floor="below")
    (verdict,) = judge("above", valued([2.0, 2.1, 2.2]).assign(below=[0.0, 0.5, 1.0]))
    assert (verdict["outcome"], verdict["reason"]) == ("held", "2 of 3 rows are at the floor of rounding (below)")


def test_claims_are_about_all_tokens():
    table = pd.concat([valued([2.0, 2.1, 2.2]).assign(view="all"), valued([0.0] * 3).assign(view="without_sinks")])
    assert judge("above", table)[0]["measured"] == pytest.approx(2.1)


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([-0.3, 0.1, 0.2, 0.2], "held"),  # within .5 to either side
        ([0.2, 0.4, 0.6, 0.3], "undecided"),
        ([0.8, 0.9, 0.7, 0.8], "failed"),
        ([-0.8, -0.9, -0.7, -0.8], "failed"),
        ([-3.0, 3.0, -2.0, 2.0], "undecided"),  # equal on average, but who knows
    ],
)
def test_equivalence_is_two_one_sided_tests(changed, values, outcome):
    changed(claimed=within(0.5), control=Control("all off by 9", lambda rows: rows.assign(value=rows.value + 9)))
    (verdict,) = judge("above", valued(values))
    ends = [
        scipy.stats.ttest_1samp(values, end, alternative=alternative).pvalue
        for end, alternative in ((-0.5, "greater"), (0.5, "less"))
    ]
    assert verdict["p_value"] == pytest.approx(max(ends), rel=1e-9)
    assert (verdict["outcome"], verdict["claimed"]) == (outcome, "within ±0.5")
    assert (max(ends) < 0.025) == (outcome == "held")
    assert verdict["refuted_by"] == "a 95 % interval beyond ±0.5"


def test_undecided_says_how_many_more_seeds_would_decide():
    (verdict,) = judge("above", valued([0.8, 1.1, 1.5]))
    more = verdict["more_repeats"]
    assert 3 < more < 100 and verdict["reason"].endswith(f"; about {more:.0f} more seeds would decide it")
    (verdict,) = judge("above", valued([2.0, 2.1]))
    assert verdict["reason"] == "fewer than 3 seeds; about 1 more seed would decide it"
    (verdict,) = judge("above", valued([0.9, 1.0, 1.1]))  # its mean lies on the line
    assert verdict["reason"].endswith("more seeds will not decide it") and verdict["more_repeats"] == math.inf
    (untrained,) = judge("above", valued([0.8, 1.1, 1.5], whole_accuracy=0.1))
    assert math.isnan(untrained["more_repeats"]) and math.isnan(untrained["p_value"])


def test_facets_and_schemes_are_judged_one_by_one(monkeypatch):
    monkeypatch.setitem(CLAIMS, "above", dataclasses.replace(CLAIMS["above"], by=("scheme",)))
    cells = {("b", "frozen"): 2.0, ("b", "recomputed"): 0.0, ("a", "frozen"): 0.0, ("a", "recomputed"): 2.0}
    parts = [
        valued([value, value + 0.1, value + 0.2]).assign(**{"task.label": label, "scheme": scheme})
        for (label, scheme), value in cells.items()
    ]
    verdicts = judge("above", pd.concat(parts), "task.label")
    assert [(verdict["where"], verdict["outcome"]) for verdict in verdicts] == [
        (f"task.label={label}, scheme={scheme}", "held" if value else "failed")
        for (label, scheme), value in cells.items()
    ]
    assert [verdict["where"] for verdict in judge("above", pd.concat(parts))] == ["scheme=frozen", "scheme=recomputed"]
    assert [verdict["where"] for verdict in judge("below", pd.concat(parts))] == [""]


def test_settings_that_the_paper_does_not_speak_of_get_no_verdict(changed):
    table = pd.concat([valued([2.0, 2.1, 2.2]).assign(skip=skip) for skip in (True, False)])
    changed(by=("skip",), applies=lambda rows: rows.skip.all())
    assert [verdict["where"] for verdict in judge("above", table)] == ["skip=True"]
    (verdict,) = judge("above", table[~table.skip])
    assert (verdict["outcome"], verdict["where"]) == ("undecided", "")
    assert verdict["reason"] == "the table has no rows for this claim"


def test_a_setting_without_a_value_is_judged_and_whole_numbers_have_no_point(changed):
    table = pd.concat([valued([2.0, 2.1, 2.2]).assign(size=size, c=0.5) for size in (5.0, 20.0, math.nan)])
    changed(by=("size", "c"))
    assert [verdict["where"] for verdict in judge("above", table)] == ["size=5, c=0.5", "size=20, c=0.5", "c=0.5"]


def test_a_threshold_is_the_sign_of_a_difference_or_the_sources_or_ours(changed):
    for line, sourced, wanted in (
        (0.0, False, "sign"),
        (0.0, True, "sign"),
        (0.6, True, "source"),
        (0.6, False, "ours"),
    ):
        changed(line=line, sourced=sourced)
        assert judge("above", valued([2.0, 2.1, 2.2]))[0]["threshold"] == wanted


def test_a_stored_verdict_speaks_for_the_test_that_it_comes_from(changed):
    (stored,) = judge("above", valued([1.9, 2.0, 2.1]))
    changed(statement="In other words.")
    (kept,) = judging.of_today([stored])
    assert kept == stored | {"statement": "In other words."} and not judging.is_outdated(stored)
    for fields in ({"since": "2026-11-26"}, {"line": 1.5}):
        changed(**fields)
        (unjudged,) = judging.of_today([stored])
        assert judging.is_outdated(stored) and (unjudged["outcome"], unjudged["measured"]) == ("undecided", None)
        assert unjudged["claimed"] == str(CLAIMS["above"].claimed)
        assert "(held before: measured 2 [1.75, 2.25] (95 %, 3 seeds), claimed > 1)" in unjudged["reason"]
        changed(since="")
    assert judging.of_today([stored | {"claim": "no longer there"}]) == []


# --- controls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "outcome"),
    [
        (lambda rows: rows.assign(value=2 - rows.value), "held"),
        (lambda rows: rows, "undecided"),  # a claim that holds in its own control
        (lambda rows: rows.assign(value=[0.0, 1.0, 2.0]), "undecided"),  # a control that decides nothing
        (lambda rows: rows.assign(value=np.nan), "undecided"),
    ],
)
def test_held_counts_only_where_the_control_fails(changed, control, outcome):
    changed(control=Control("otherwise", control))
    (verdict,) = judge("above", valued([1.9, 2.0, 2.1]))
    assert verdict["outcome"] == outcome and verdict["control"] == "otherwise"
    assert ("its control did not fail" in verdict["reason"]) == (outcome == "undecided")


def test_a_control_changes_no_number_of_the_table(changed):
    def spoil(rows):
        rows.loc[:, "value"] = 0.0
        return rows

    changed(control=Control("all zero", spoil))
    table = valued([1.9, 2.0, 2.1])
    assert judge("above", table)[0]["outcome"] == "held" and table.value.tolist() == [1.9, 2.0, 2.1]


# --- bounds, exact numbers, checks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "bounds", "above", "below"),
    [
        ([0.1, 0.2, 0.3], [True, True, True], "failed", "held"),  # whatever the numbers are, they are below 1
        ([0.1, 0.2, 0.3], [True, False, False], "failed", "held"),
        ([0.1, 0.2, 1.5], [False, False, True], "undecided", "undecided"),  # the third may be on either side
        ([1.5, 1.6, 1.7], [True, True, True], "undecided", "undecided"),
    ],
)
def test_a_number_that_rounding_hides_decides_only_from_below_the_line(changed, values, bounds, above, below):
    def hidden(rows):
        return AtMost(rows.value.iloc[0]) if rows.hidden.iloc[0] else rows.value.iloc[0]

    changed(measure=hidden)
    table = valued(values).assign(hidden=bounds)
    raised = Control("2 for all", lambda rows: rows.assign(value=[2.0, 2.1, 2.2], hidden=False))
    lowered = Control("0 for all", lambda rows: rows.assign(value=[0.0, 0.1, 0.2], hidden=False))
    for name, control, outcome in (("above", lowered, above), ("below", raised, below)):
        changed(control=control)
        (verdict,) = judge(name, table)
        assert (verdict["outcome"], verdict["is_bound"]) == (outcome, True)
        assert verdict["measured"] == max(values) and math.isnan(verdict["low95"])
        assert "measured at most" in verdict_line(verdict)


def test_a_bound_from_above_does_not_show_that_a_number_is_within_two_lines(changed):
    """It may be far below the lower one."""
    other = Control("all off by 9", lambda rows: rows.assign(value=9.0))
    changed(measure=lambda rows: AtMost(rows.value.iloc[0]), claimed=within(0.5), control=other)
    (verdict,) = judge("above", valued([0.1, 0.2, 0.3]))
    assert (verdict["outcome"], verdict["reason"]) == ("undecided", "rounding hides the number")


def test_the_worst_seed_decides_on_an_exact_number(changed):
    changed(exact=True)
    above, below = (judge(name, valued([2.0, 0.9, 1.8]))[0] for name in ("above", "below"))
    assert (above["outcome"], above["measured"]) == ("failed", 0.9)
    assert (below["outcome"], below["measured"]) == ("failed", 2.0)
    (single,) = judge("above", valued([1.1]))
    assert (single["outcome"], single["interval"]) == ("held", "worst")


def test_a_check_passes_or_is_broken(changed):
    changed(is_check=True)
    for values, outcome in (([1.9, 2.0, 2.1], "passed"), ([0.0, 0.1, 0.2], "broken"), ([0.0, 1.0, 2.0], "undecided")):
        (verdict,) = judge("above", valued(values))
        assert (verdict["outcome"], verdict["kind"]) == (outcome, "check")
    assert verdict_line(verdict).startswith("undecided check above: ")
    changed(is_check=False)
    assert judge("above", valued([1.9, 2.0, 2.1]))[0]["kind"] == "claim"


def test_a_rate_is_judged_by_clopper_and_pearsons_interval(changed):
    changed(scale="rate", line=0.5, control=Control("the opposite", lambda rows: rows.assign(value=1 - rows.value)))
    outcomes = {}
    for successes in range(11):
        (verdict,) = judge("above", valued([1.0] * successes + [0.0] * (10 - successes)))
        low, high = scipy.stats.beta.ppf([0.025, 0.975], [successes, successes + 1], [11 - successes, 10 - successes])
        low, high = (0.0 if successes == 0 else low), (1.0 if successes == 10 else high)
        assert [verdict["low95"], verdict["high95"]] == pytest.approx([low, high], abs=1e-9)
        outcomes[successes] = verdict["outcome"]
    assert {count for count, outcome in outcomes.items() if outcome == "failed"} == {0, 1}
    assert {count for count, outcome in outcomes.items() if outcome == "held"} == {9, 10}


def test_the_published_number_may_depend_on_the_rows(changed):
    changed(by=("layers",), published=lambda rows: rows.assign(value=rows.layers.map({1: 0.5, 2: 0.7})))
    table = pd.concat([valued([2.0, 2.1, 2.2]).assign(layers=layers) for layers in (1, 2)])
    assert [verdict["published"] for verdict in judge("above", table)] == pytest.approx([0.5, 0.7])


def test_a_verdict_is_one_line_with_all_that_it_rests_on():
    (verdict,) = judge("above", valued([1.9, 2.0, 2.1]))
    halfwidth = scipy.stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    interval = f"[{2 - halfwidth:.3g}, {2 + halfwidth:.3g}]"
    wanted = f"held      above: measured 2 {interval} (95 %, 3 seeds), claimed > 1 - a test"
    assert verdict_line(verdict) == wanted
    undecided = verdict_line(judge("above", valued([2.0]))[0] | {"where": "task.label=value"})
    wanted = "undecided above [task.label=value]: measured 2 (1 seed), claimed > 1"
    assert undecided == f"{wanted} (fewer than 3 seeds) - a test"
    assert "published" not in verdict_line(verdict | {"published": math.nan})  # the paper has none for these settings


# --- published numbers ------------------------------------------------------------------------------------------------


def test_published_numbers_are_those_of_their_figure():
    """Wrong columns and missing numbers are refused where the files are read: tests/config/test_plugins.py."""
    names = figures_published()
    assert "dong_fig4_sorting" in names and published("no such figure").empty
    for name in names:
        table = published(name)
        assert len(table) and (table.figure == name).all() and np.isfinite(table.value).all()
        assert table[table.unit == "accuracy"].value.between(0, 1).all()


EXPERIMENTS = sorted((conf_dir() / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_names_claims_and_figures_that_exist(path):
    shipped = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    for name in shipped.get("claims", []):
        assert name in CLAIMS  # that their tables are made: tests/test_presets.py
    if shipped.get("published") is not None:
        assert shipped["published"] in set(figures_published())
