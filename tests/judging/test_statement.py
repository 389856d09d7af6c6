"""rankbench.judging.statement: settings put together by hand-written verdicts, and Holm's method by its definition."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankbench.judging import CLAIMS, PAPERS, statement_line, statements_of, table_of, verdict_line, with_holm
from rankbench.judging.claim import NOTHING, paper_of

VERDICT = {"claim": "grows", "kind": "claim", "side": +1, "line": 0.6, "claimed": "> 0.6", "threshold": "ours"}
VERDICT |= {"exists": False, "interval": "t", "is_bound": False, "num_repeats": 5, "repeats": "seed"}
VERDICT |= {"published": None, "reason": ""}
VERDICT |= {"refuted_by": "less", "control": "not so", "statement": "It grows.", "source": "Dong et al. 2021, sec. 4"}


def verdict(where, measured, outcome="held", p_value=0.001, **more):
    ends = {"low95": measured - 0.1, "high95": measured + 0.1}
    return VERDICT | ends | {"where": where, "measured": measured, "outcome": outcome, "p_value": p_value} | more


def statement(*verdicts):
    (put_together,) = statements_of(verdicts)
    return put_together


def test_held_where_all_settings_are_and_the_closest_is_named():
    whole = statement(verdict("s=a", 0.9), verdict("s=b", 0.72, p_value=0.004), verdict("s=c", 0.8))
    assert (whole["outcome"], whole["num_settings"], whole["num_held"]) == ("held", 3, 3)
    assert whole["reading"] == "held in all 3 settings; the closest is s=b, 0.72 against a threshold of 0.6"
    assert (whole["where"], whole["measured"], whole["low95"]) == ("s=b", 0.72, 0.62)
    assert (whole["smallest"], whole["largest"], whole["p_value"]) == (0.72, 0.9, 0.004)
    assert whole["paper"] == "Dong et al. 2021"
    line = statement_line(whole)
    assert line == f"held      grows: {whole['reading']} - Dong et al. 2021, sec. 4"


def test_settings_that_do_not_hold_are_named_with_their_reasons():
    reason = "the threshold lies within the interval; about 4 more seeds would decide it"
    failed, undecided = verdict("s=b", 0.3, "failed", 0.99), verdict("s=c", 0.61, "undecided", 0.4, reason=reason)
    parts = statement(verdict("s=a", 0.9), failed, undecided)
    assert parts["outcome"] == "partly held" and parts["where"] == "s=b" and parts["p_value"] == 0.99
    wanted = f"failed: s=b (0.3); undecided: s=c (0.61; {reason})"
    assert parts["reading"] == f"held in 1 of 3 settings, threshold 0.6; {wanted}"
    many = statement(*(verdict(f"s={number}", number / 10, "failed") for number in range(5)), verdict("s=9", 0.9))
    assert many["reading"].endswith("failed: s=0 (0), s=1 (0.1) and 3 more")
    assert statement(failed, undecided)["outcome"] == "failed"
    assert statement(undecided, undecided)["outcome"] == "undecided"
    assert statement(failed, failed)["reading"].startswith("failed in both settings; the closest is s=b, 0.3")


@pytest.mark.parametrize(
    ("side", "line", "numbers", "closest"),
    [(+1, 0.5, (0.9, 0.6), 0.6), (-1, 0.5, (0.1, 0.4), 0.4), (0, 0.5, (-0.4, 0.1), -0.4), (0, 0.5, (-0.1, 0.3), 0.3)],
)
def test_the_closest_setting_on_each_side(side, line, numbers, closest):
    rows = [verdict(f"s={number}", number, side=side, line=line) for number in numbers]
    assert statement(*rows)["measured"] == closest
    assert f"against a threshold of {'±' if side == 0 else ''}0.5" in statement(*rows)["reading"]


def test_a_logarithm_reads_as_the_number_itself():
    of_check = {"claim": "paths_sum_to_output", "kind": "check", "side": -1, "line": -10.0, "interval": "worst"}
    row = verdict("", math.log10(2.2e-14), "passed", num_repeats=5, repeats="seed", **of_check)
    words = "paths and output differ by 2.2e-14 of the output (threshold 1e-10)"
    line = statement_line(statement(row))
    assert line == f"passed    check paths_sum_to_output: {words}, the worst of 5 seeds - {row['source']}"
    untrained = row | {"where": "s=a", "outcome": "undecided", "reason": "the network has not learned its task"}
    line = statement_line(statement(untrained))
    named = f"undecided check paths_sum_to_output [s=a]: {words}, the worst of 5 seeds"
    assert line == f"{named} (the network has not learned its task) - {row['source']}"
    both = statement(row | {"where": "s=a"}, row | {"where": "s=b", "measured": -15.0})
    assert both["reading"] == f"passed in both settings; the closest is s=a, {words}"
    assert "not measured" in statement_line(statement(row | {"measured": math.nan, "outcome": "undecided"}))


def test_one_setting_reads_as_its_verdict():
    row = verdict("", 0.7, "undecided", 0.1, reason="fewer than 3 seeds")
    assert statement_line(statement(row)) == verdict_line(row)
    assert statement(row)["reading"] == "undecided: 0.7 against a threshold of 0.6; fewer than 3 seeds"
    hidden = statement(
        verdict("s=a", 0.9, is_bound=True), verdict("s=b", math.nan, "undecided", math.nan, reason="why")
    )
    assert "undecided: s=b (not measured; why)" in hidden["reading"]


def test_an_example_is_enough_where_the_claim_is_that_there_is_one():
    rows = [verdict("s=a", 0.9, exists=True, p_value=0.01), verdict("s=b", 0.1, "undecided", 0.9, exists=True)]
    assert (statement(*rows)["outcome"], statement(*rows)["where"]) == ("held", "s=a")
    assert statement(*rows)["p_value"] == pytest.approx(0.02)  # of two settings one was sought: Bonferroni
    assert "an example in 1 of 2 settings; the best is s=a" in statement(*rows)["reading"]
    assert statement(rows[1], rows[1])["outcome"] == "undecided"


def test_checks_pass_or_are_broken():
    passed, broken = (verdict("", 0.9, word, kind="check") for word in ("passed", "broken"))
    assert [statement(*rows)["outcome"] for rows in ((passed, passed), (passed, broken))] == ["passed", "broken"]
    assert with_holm([statement(passed)])[0]["held_after_holm"] is None


def test_tables_that_the_claim_does_not_speak_of_are_left_out_beside_others():
    silent = verdict("", math.nan, "undecided", math.nan, reason=NOTHING)
    assert statement(silent, verdict("s=a", 0.9))["outcome"] == "held"
    assert statement(silent)["outcome"] == "undecided" and NOTHING in statement(silent)["reading"]


def test_a_statement_is_a_row_without_its_settings():
    table = table_of(statements_of([verdict("s=a", 0.9), verdict("s=a", 0.8, claim="falls")]))
    assert table.claim.tolist() == ["grows", "falls"] and "settings" not in table


# --- Holm -------------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holms_method_is_the_closure_of_bonferronis(p_values):
    """The adjusted p of a hypothesis: the largest Bonferroni p of all sets of hypotheses that include it."""
    rows = [verdict("", 0.9, claim=f"claim {number}", p_value=p) for number, p in enumerate(p_values)]
    adjusted = [row["p_holm"] for row in with_holm(statements_of(rows))]
    for index, p_holm in enumerate(adjusted):
        others = [p for number, p in enumerate(p_values) if number != index]
        subsets = itertools.chain.from_iterable(itertools.combinations(others, size) for size in range(len(p_values)))
        sets = ([p_values[index], *subset] for subset in subsets)
        assert p_holm == pytest.approx(max(min(1.0, len(chosen) * min(chosen)) for chosen in sets))


def test_claims_are_adjusted_among_those_of_their_paper_alone():
    rows = [verdict("", 0.9, claim=name, p_value=0.01) for name in ("a", "b", "c")]
    rows += [verdict("", 0.9, claim="d", p_value=0.01, source="Kim et al. 2021, sec. 1")]
    rows += [verdict("", 0.9, claim="exact", p_value=math.nan), verdict("", 0.9, "undecided", math.nan, claim="open")]
    rows += [verdict("", 0.9, "passed", 0.5, claim="check", kind="check")]
    adjusted = {row["claim"]: (row["p_holm"], row["held_after_holm"]) for row in with_holm(statements_of(rows))}
    assert {name: adjusted[name] for name in "abcd"} == {
        **{name: (pytest.approx(0.03), "no") for name in "abc"},
        "d": (pytest.approx(0.01), "yes"),
    }
    # what chance has no part in stays held; what was not tested is not held
    assert [adjusted[name][1] for name in ("exact", "open", "check")] == ["yes", "no", None]


def test_every_claim_names_its_paper():
    assert {paper_of(claim.source) for claim in CLAIMS.values()} == set(PAPERS)
