"""papers.kim_2021.char_lm: each claim on a table that supports it, on its control, on tables that refute it, and on
the tables that the paper prints."""

import math

import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided
from rows import verdict

from rankbench.judging import CLAIMS, published
from rankbench.judging.claim import NOTHING
from rankbench.papers.kim_2021.char_lm import CHAR_LM
from rankbench.runs.tables import fall_in_last_quarter

SPEED = {
    "kim_l2_as_fast": "causal_l2",
    "kim_tied_as_fast": "causal_l2_tied",
    "kim_contractive_as_fast": "causal_contractive_l2",
}


def curves(losses, width=512, jitter=0.001):
    """A table of curves with these test losses by (variant, layers), for every seed a thousandth of a nat more, reached
    before the last quarter of the steps."""
    rows = []
    for (variant, layers), loss in losses.items():
        for seed in range(3):
            final = loss + jitter * seed
            facts = {"variant": variant, "layers": layers, "width": width, "test_loss": final, "seed": seed}
            for step, more in ((0, 9.0), (10, 0.5), (20, 0.1), (30, 0.0), (40, 0.0)):
                rows += [facts | {"step": step, "split": split, "loss": final + more} for split in ("valid", "test")]
    return pd.DataFrame(rows)


def speed(ratios, dot=1.0):
    """A table of the analysis speed with these ratios by (variant, layers), of steps of many lengths; those of dot
    products against themselves are `dot`."""
    rows = []
    for (variant, layers), ratio in ({("causal", 1): dot} | ratios).items():
        for seed in range(3):
            for step, seconds in enumerate((1e-3, 2e-3, 5e-3), 1):
                times = {"seconds": ratio * seconds * (1 + 1e-4 * seed), "seconds_dot": seconds}
                rows.append({"variant": variant, "layers": layers, "seed": seed, "step": step, **times})
    return pd.DataFrame(rows)


def losses(layers=1, **by_variant):
    return {(variant, layers): loss for variant, loss in by_variant.items()}


def gaps(lower, higher, by_layers):
    """Losses of two variants, of 1 and by so much more, by the number of layers."""
    return {
        cell: loss
        for layers, gap in by_layers.items()
        for cell, loss in losses(layers, **{lower: 1.0, higher: 1.0 + gap}).items()
    }


SUPPORTING = {
    "kim_l2_loses_little": curves(losses(causal=1.0, causal_l2=0.99)),
    "kim_tying_loses": curves(losses(causal_l2=1.0, causal_l2_tied=1.05)),
    "kim_contraction_loses": curves(losses(causal_l2_tied=1.0, causal_contractive_l2=1.3)),
    "kim_contraction_gains_from_depth": curves({("causal_contractive_l2", n): 1.5 - 0.1 * n for n in (1, 2, 4)}),
    "kim_lstm": curves(losses(lstm=1.01)),
    "kim_transformer_beats_lstm": curves(losses(3, causal=0.95, lstm=1.0) | losses(1, causal=1.2, lstm=1.1)),
    **{name: speed({(variant, 2): 1.02}) for name, variant in SPEED.items()},
    "kim_dot_fails_deep": curves(losses(12, causal=3.0, causal_l2_tied=1.0)),
    "kim_tying_not_parameters": curves(losses(causal_l2=0.9, causal_l2_matched=1.0)),
    "kim_matched_as_tied": curves(losses(causal_l2_tied=1.0, causal_l2_matched=0.995)),
}
REFUTING = {
    "kim_l2_loses_little": [
        curves(losses(causal=1.0, causal_l2=1.05)),
        # a gain with one layer does not make good a loss with two
        curves(losses(1, causal=1.0, causal_l2=0.7) | losses(2, causal=1.0, causal_l2=1.3)),
    ],
    "kim_tying_loses": [
        curves(losses(causal_l2=1.0, causal_l2_tied=0.9)),
        # it gains with three numbers of layers of four
        curves(gaps("causal_l2", "causal_l2_tied", {1: 1.0, 2: -0.1, 3: -0.1, 4: -0.1})),
    ],
    "kim_contraction_loses": [
        curves(losses(causal_l2_tied=1.0, causal_contractive_l2=1.001)),
        curves(gaps("causal_l2_tied", "causal_contractive_l2", {1: 0.5, 4: -0.1})),
    ],
    "kim_contraction_gains_from_depth": [
        curves({("causal_contractive_l2", n): 1.0 - 0.001 * n for n in (1, 2, 4)}),
        # it loses with every second number of layers
        curves({("causal_contractive_l2", n): 1.5 + (0.4 if n in (2, 6) else -0.01 * n) for n in (1, 2, 4, 6, 8)}),
    ],
    "kim_lstm": [
        curves(losses(lstm=1.2)),
        curves(losses(lstm=0.3)),
        # what is reached with another width than the paper's does not count
        pd.concat([curves(losses(lstm=1.0), width=64), curves(losses(2, lstm=1.3))]),
    ],
    "kim_transformer_beats_lstm": [curves(losses(3, causal=1.1, lstm=1.0))],
    **{name: [speed({(variant, 2): ratio}) for ratio in (1.11, 0.89)] for name, variant in SPEED.items()},
    "kim_dot_fails_deep": [
        curves(losses(12, causal=1.0, causal_l2_tied=1.0) | losses(2, causal=9.0, causal_l2_tied=1.0)),
        curves(gaps("causal_l2_tied", "causal", {12: 2.0, 14: 0.0, 16: 0.0})),
    ],
    "kim_tying_not_parameters": [
        curves(losses(causal_l2=1.0, causal_l2_matched=0.9)),
        curves(gaps("causal_l2", "causal_l2_matched", {1: 0.5, 2: -0.05})),
    ],
    "kim_matched_as_tied": [curves(losses(causal_l2_tied=1.0, causal_l2_matched=loss)) for loss in (0.9, 1.5)],
}
BOTH = {"supporting": SUPPORTING, "refuting": {name: tables[0] for name, tables in REFUTING.items()}}


# what is measured on SUPPORTING, of claims on which Table 2 and Table 1 have no numbers
MEASURED = {"kim_dot_fails_deep": 2.0, "kim_tying_not_parameters": 0.1, "kim_matched_as_tied": 0.005}


@pytest.mark.parametrize("name", CHAR_LM)
def test_claims_hold_and_fail(name):
    assert_holds_and_fails(name, SUPPORTING[name], REFUTING[name], MEASURED.get(name))


# --- the paper's own tables -------------------------------------------------------------------------------------------


def printed(figure, layers):
    """The paper's numbers by (variant, layers); one that it gives for no number of layers stands at all of these."""
    cells = {}
    for row in published(figure).itertuples():
        numbers = layers if math.isnan(row.x) else {int(row.x)} & set(layers)
        cells |= {(row.series, number): row.value for number in numbers}
    return cells


TABLE_2 = {
    # what the paper's Table 2 (and its LSTM of about one nat) comes to at some numbers of layers
    "kim_l2_loses_little": {(1,): -0.030, (1, 2, 4): -0.001, (1, 2, 3, 4, 5): 0.006},
    "kim_tying_loses": {(1,): 0.103, (1, 2, 4): 0.052, (1, 2, 3, 4, 5): 0.043},
    "kim_contraction_loses": {(1,): 0.321, (1, 2, 4): 0.197, (1, 2, 3, 4, 5): 0.182},
    # of ten pairs of layers, only 4 and 5 differ by less than .02
    "kim_contraction_gains_from_depth": {(1, 2, 4): -1, (1, 2, 3, 4, 5): -0.9, (1, 5, 14): -1},
    "kim_lstm": {(1,): 0.0, (1, 2, 3, 4, 5): 0.0},
    "kim_transformer_beats_lstm": {(1, 2, 4): -0.057, (1, 2, 3, 4, 5): -0.06},
}


@pytest.mark.parametrize(("name", "layers"), [(name, layers) for name, cases in TABLE_2.items() for layers in cases])
def test_table_2_holds_its_claims_and_stands_beside_ours_at_the_same_layers(name, layers):
    number = TABLE_2[name][layers]
    row = verdict(name, curves(printed("kim_table2", layers), jitter=0.0))
    assert row["outcome"] == "held"
    assert (row["measured"], row["published"]) == (pytest.approx(number, abs=1e-9), pytest.approx(number, abs=1e-9))
    # beside other numbers, of those layers, the same
    ours = {cell: loss + 0.5 + 0.1 * len(cell[0]) for cell, loss in printed("kim_table2", layers).items()}
    assert verdict(name, curves(ours))["published"] == pytest.approx(number, abs=1e-9)


def test_with_one_layer_table_2_is_not_better_than_the_lstm_and_the_claim_says_nothing():
    cells = printed("kim_table2", (1,))
    assert cells["causal", 1] - cells["lstm", 1] == pytest.approx(0.164)
    row = verdict("kim_transformer_beats_lstm", curves(cells))
    assert (row["outcome"], row["reason"]) == ("undecided", NOTHING)


@pytest.mark.parametrize(
    ("name", "layers", "ratio", "outcome"),
    [
        ("kim_l2_as_fast", (1, 2, 3, 4, 5), 1.003, "held"),
        ("kim_tied_as_fast", (1, 2, 3, 4, 5), 1.0174, "held"),
        ("kim_contractive_as_fast", (1, 2, 3, 4, 5), 1.0774, "held"),
        ("kim_contractive_as_fast", (1, 3), 1.026, "held"),
        ("kim_contractive_as_fast", (4, 5), 1.132, "failed"),  # the paper's own ratios there are above our threshold
    ],
)
def test_table_1_stands_beside_ours_at_the_same_layers(name, layers, ratio, outcome):
    row = verdict(name, speed(printed("kim_table1_speed", layers)))
    assert row["outcome"] == outcome
    assert row["measured"] == pytest.approx(ratio - 1, abs=2e-4)  # seeds differ by a ten-thousandth
    assert row["published"] == pytest.approx(ratio - 1, abs=1e-9)


def test_table_3_has_no_dot_products_where_they_are_said_to_fail():
    row = verdict("kim_dot_fails_deep", curves(printed("kim_table3_fixed_lr", tuple(range(2, 20, 2)))))
    assert row["outcome"] == "undecided" and row["published"] is None
    assert "no number of layers (at least 11) at which there are both causal and causal_l2_tied" in row["reason"]
    row = verdict("kim_dot_fails_deep", curves(printed("kim_table3_fixed_lr", (2, 4, 6, 8, 10))))
    assert row["reason"] == "the table has no rows for this claim"


# --- when it is judged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in CHAR_LM if name not in SPEED])
def test_language_models_that_still_learn_are_not_judged(name):
    for tables in BOTH.values():
        still = tables[name].copy()
        began = still.split.eq("test") & still.step.eq(30)  # of the last quarter
        still.loc[began, "loss"] += 0.03
        row = verdict(name, still)
        assert row["outcome"] == "undecided" and math.isfinite(row["measured"])
        assert "still fell by 0.03 nats over the last quarter of training" in row["reason"]
        still.loc[began, "loss"] -= 0.02  # a hundredth of a nat is no more than what the line is about
        assert verdict(name, still)["outcome"] != "undecided"


COMPARED = {  # the network whose loss is above, and the other one
    "kim_l2_loses_little": ("causal_l2", "causal"),
    "kim_tying_loses": ("causal_l2_tied", "causal_l2"),
    "kim_contraction_loses": ("causal_contractive_l2", "causal_l2_tied"),
    "kim_transformer_beats_lstm": ("causal", "lstm"),
    "kim_dot_fails_deep": ("causal", "causal_l2_tied"),
    "kim_tying_not_parameters": ("causal_l2_matched", "causal_l2"),
    "kim_matched_as_tied": ("causal_l2_tied", "causal_l2_matched"),
}


@pytest.mark.parametrize("tables", [*BOTH.values()], ids=BOTH)
@pytest.mark.parametrize("name", COMPARED)
def test_only_the_network_whose_further_fall_could_turn_a_verdict_must_have_stopped(name, tables):
    """A gap above its line is not closed by the network below, and one below it not opened by the network above. Of a
    gap between two lines both could be the one."""
    table, decided = tables[name], verdict(name, tables[name])
    variant, base = COMPARED[name]
    turning, other = (variant, base) if decided["measured"] > decided["line"] else (base, variant)
    began = table.split.eq("test") & table.step.eq(30)
    between = decided["side"] == 0 and decided["outcome"] == "held"
    for network, outcome in ((turning, "undecided"), (other, "undecided" if between else decided["outcome"])):
        falls = table.assign(loss=table.loss + 0.5 * (began & table.variant.eq(network)))
        assert verdict(name, falls)["outcome"] == outcome, network


@pytest.mark.parametrize("name", [name for name in CHAR_LM if name not in SPEED])
def test_networks_that_know_little_more_than_frequencies_are_not_judged(name):
    """But for dot products that are said to fail: that they know so little is what the claim says."""
    for tables in BOTH.values():
        table, outcome = tables[name], verdict(name, tables[name])["outcome"]
        largest = table.test_loss.max()
        learned = table.assign(unigram_loss=largest + 5, bigram_loss=largest - 4)  # halfway is above
        assert verdict(name, learned)["outcome"] == outcome
        row = verdict(name, learned.assign(bigram_loss=largest - 6))
        if name == "kim_dot_fails_deep":
            assert row["outcome"] == outcome
        else:
            assert row["outcome"] == "undecided" and " has not learned: its test loss of " in row["reason"]


NO_LOSS = {("causal_contractive_l2", n): 1.5 - 0.1 * n if n < 5 else math.nan for n in range(1, 6)}


@pytest.mark.parametrize(
    ("name", "table", "reason"),
    [
        (
            "kim_l2_loses_little",
            curves(gaps("causal", "causal_l2", {1: -0.01, 2: math.nan})),
            "not measurable in every seed",
        ),
        ("kim_contraction_gains_from_depth", curves(NO_LOSS), "not measurable in every seed"),
        (
            "kim_dot_fails_deep",
            curves(losses(12, causal=3.1, causal_l2_tied=2.9)).assign(unigram_loss=2.9, bigram_loss=2.4),
            "causal_l2_tied with 12 layers has not learned",
        ),
    ],
)
def test_a_network_without_a_loss_or_that_has_not_learned_is_not_passed_over(name, table, reason):
    assert_undecided(name, table, reason)


def test_two_numbers_of_layers_are_no_trend():
    row = verdict("kim_contraction_gains_from_depth", curves(printed("kim_table2", (1, 2))))
    assert row["outcome"] == "undecided" and row["published"] is None
    assert "causal_contractive_l2 has fewer than 3 numbers of layers" in row["reason"]


def test_the_network_that_falls_most_is_named():
    table = curves(losses(causal=1.0, causal_l2=0.99) | losses(3, causal=1.0, causal_l2=0.99))
    slow = (table.variant == "causal") & (table.layers == 3) & (table.step == 30)
    reason = verdict("kim_l2_loses_little", table.assign(loss=table.loss + 0.25 * slow))["reason"]
    assert reason == "the test loss of causal with 3 layers still fell by 0.25 nats over the last quarter of training"
    # networks that are not compared may still learn
    other = (table.variant == "causal") & (table.step == 30)
    deep = table.assign(layers=table.layers + 7)
    both = pd.concat([table, deep.assign(loss=deep.loss + other)])
    assert verdict("kim_l2_loses_little", both)["outcome"] == "held"


def test_the_last_quarter_of_a_curve():
    assert fall_in_last_quarter(pd.Series([3.0, 1.0, 0.8], index=[0, 40, 80])) == pytest.approx(0.1)  # .9 at step 60
    assert fall_in_last_quarter(pd.Series([3.0, 1.0, 1.5], index=[0, 90, 120])) == pytest.approx(-0.5)
    assert fall_in_last_quarter(pd.Series([3.0, 1.0, math.nan], index=[0, 100, 200])) == pytest.approx(0.5)


def test_the_loss_of_the_lstm_is_judged_at_the_papers_width():
    assert "the table has no rows" in verdict("kim_lstm", curves(losses(lstm=1.4), width=64))["reason"]
    assert "the table has no rows" in verdict("kim_lstm", curves(losses(lstm=1.4)).drop(columns="width"))["reason"]


def test_times_are_not_judged_by_a_clock_that_cannot_tell_dot_products_from_themselves():
    row = verdict("kim_l2_as_fast", speed({("causal_l2", 2): 1.0}, dot=0.34))
    assert row["outcome"] == "undecided" and row["measured"] == pytest.approx(0, abs=2e-4)
    assert "dot products against themselves differ by -0.66 of the time" in row["reason"]
    alone = speed({("causal_l2", 2): 1.0})
    assert "no job times dot products" in verdict("kim_l2_as_fast", alone[alone.variant != "causal"])["reason"]
    assert "no times of causal_l2" in verdict("kim_l2_as_fast", speed({}))["reason"]


def test_claims_of_pairs_need_both_and_judge_all_jobs_together():
    table = curves({("causal", 1): 1.0, ("causal_l2", 2): 1.0})
    assert "at which there are both causal_l2 and causal" in verdict("kim_l2_loses_little", table)["reason"]
    table = SUPPORTING["kim_l2_loses_little"].assign(model=lambda rows: rows.variant)
    assert verdict("kim_l2_loses_little", table, "model")["where"] == ""
    assert all(claim.across for claim in CHAR_LM.values())


def test_layers_that_the_paper_has_not_are_left_out():
    cells = losses(1, causal=1.0, causal_l2=0.99) | losses(8, causal=1.0, causal_l2=5.0)
    row = verdict("kim_l2_loses_little", curves(cells))
    assert (row["measured"], row["published"]) == (pytest.approx(-0.01), pytest.approx(-0.030))


def test_no_claim_is_without_a_line_that_its_statement_names():
    for name, claim in CHAR_LM.items():
        assert claim.claimed.at == 0 or "threshold: ours" in claim.statement, name
        assert claim is CLAIMS[name]
