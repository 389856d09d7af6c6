"""Tables that refute a claim in words although some of its numbers look right: none of them may be held.

The claims that a table in another test module refutes by its plain number are not repeated here.
"""

import math

import numpy as np
import pandas as pd
import pytest
from test_amsel import of_networks
from test_balls import table as balls
from test_dong import ACCURACY, by_length, collapse, mlp_gains, rollout, windows
from test_kim_attention import inverted, of_ascent, of_entries, of_head, of_training
from test_kim_char_lm import curves, losses
from test_knob_claims import GROUPS, HEAT, MIX, SKIP, VALUE, followed, measured, of_sigma, of_skips
from test_knob_claims import by_length as by_mean_length
from test_remarks import by_layer as by_logs
from test_remarks import circle

from rankbench.judging import judge
from rankbench.judging.claim import NOTHING

ALMOST_ALL = {"full": 0.0, "no_mlp": 0.0, "no_skip": 1.0, "attention_only": 1.0}


def flat(low=0.5, high=0.51):
    """Shares at four values of a knob that grow by less than a tenth in all, or fall if high is below low."""
    return dict(zip((0.1, 0.5, 1, 2), np.linspace(low, high, 4), strict=True))


MIDDLE = "step == 10 and model == 'transformer'"
TWO_DEPTHS = losses(1, causal=1.0, causal_l2=0.99) | losses(2, causal=1.0, causal_l2=0.99)

# name: (what the table shows, in the claim's words; the table)
HOSTILE = [
    ("kim_fig10_l2_keeps_range", "a third of the range is not about the range", of_entries("l2", 1 / 3)),
    ("kim_lstm", ".3 nats are not about one nat", curves(losses(lstm=0.3))),
    (
        "kim_l2_loses_little",
        "a loss of .3 nats with two layers is not made good by a gain with one",
        curves(losses(1, causal=1.0, causal_l2=0.7) | losses(2, causal=1.0, causal_l2=1.3)),
    ),
    (
        "kim_l2_loses_little",
        "with two layers it has no loss to compare",
        curves(TWO_DEPTHS | losses(2, causal_l2=math.nan)),
    ),
    (
        "kim_lstm",
        "about one nat is reached with another width than the paper's",
        pd.concat([curves(losses(lstm=1.0), width=64), curves(losses(2, lstm=1.3))]),
    ),
    (
        "kim_contraction_gains_from_depth",
        "with the most layers there is no loss any more",
        curves({("causal_contractive_l2", n): 1.5 - 0.1 * n if n < 5 else math.nan for n in range(1, 6)}),
    ),
    (
        "kim_tying_loses",
        "with three numbers of layers of four it gains",
        curves(
            losses(1, causal_l2=1.0, causal_l2_tied=2.0)
            | {cell: loss for n in (2, 3, 4) for cell, loss in losses(n, causal_l2=1.0, causal_l2_tied=0.9).items()}
        ),
    ),
    (
        "kim_contraction_loses",
        "with four layers it gains",
        curves(
            losses(1, causal_l2_tied=1.0, causal_contractive_l2=1.5)
            | losses(4, causal_l2_tied=1.0, causal_contractive_l2=0.9)
        ),
    ),
    (
        "kim_tying_not_parameters",
        "with two layers they do",
        curves(losses(1, causal_l2=1.0, causal_l2_matched=1.5) | losses(2, causal_l2=1.0, causal_l2_matched=0.95)),
    ),
    (
        "kim_matched_as_tied",
        "half a nat better is not alike",
        curves(losses(causal_l2_tied=1.0, causal_l2_matched=1.5)),
    ),
    (
        "kim_contraction_gains_from_depth",
        "it loses with every second number of layers",
        curves({("causal_contractive_l2", n): 1.5 + (0.4 if n in (2, 6) else -0.01 * n) for n in (1, 2, 4, 6, 8)}),
    ),
    (
        "kim_dot_fails_deep",
        "with 14 and 16 layers dot products train as well",
        curves(
            losses(12, causal=3.0, causal_l2_tied=1.0)
            | losses(14, causal=1.0, causal_l2_tied=1.0)
            | losses(16, causal=1.0, causal_l2_tied=1.0)
        ),
    ),
    (
        "kim_dot_fails_deep",
        "tied L2 does not train either",
        curves(losses(12, causal=3.1, causal_l2_tied=2.9)).assign(unigram_loss=2.9, bigram_loss=2.4),
    ),
    (
        "kim_fig8_diverges",
        "an ascent that stands still in the middle",
        of_ascent(lambda step: step**2 if step <= 80 else max(80**2, (step - 70) ** 2)),
    ),
    ("kim_fig8_diverges", "L2 attention, which has a bound, grows as well", of_ascent(l2=lambda step: 2 * step**2)),
    ("kim_bound_grows", "a hundredth more after all steps is no growth", of_training(1.01)),
    (
        "kim_fig3_contractive_inverted",
        "the iteration overflows from the third step on",
        inverted("contractive_l2").assign(
            error=lambda rows: rows.error.mask(rows.iteration > 2),
            relative_error=lambda rows: rows.relative_error.mask(rows.iteration > 2),
        ),
    ),
    (
        "kim_bound_holds",
        "half of the Jacobian norms are not numbers",
        of_head().assign(value=lambda rows: rows.value.mask((rows.kind == "lower_bound") & (rows.tokens < 50))),
    ),
    (
        "ball_without_norms",
        "on the largest ball there is no bound",
        balls(none=(1.0, 1.5, math.nan), pre=(1.0, 1.5, 21.0)),
    ),
    (
        "dong_fig3_prevented",
        "the networks diverged: their error of one step is not a number",
        rollout((0,) * 10, skip=1, error=math.nan),
    ),
    (
        "dong_thm_rate_few_layers",
        "the residual of the embedding is not a number",
        collapse({"attention_only_no_norm": -9.0}).assign(
            log10_residual=lambda rows: rows.log10_residual.mask(rows.layer == 0)
        ),
    ),
    (
        "knob_dynamics",
        "in the middle of training the tokens are no numbers any more",
        of_skips().assign(relative_residual=lambda rows: rows.relative_residual.mask(rows.eval(MIDDLE))),
    ),
    (
        "knob_sigma_reparam",
        "the layer that loses most has an entropy that is not a number",
        of_sigma(with_sigma=math.nan),
    ),
    (
        "amsel_full_rank_soft",
        "with 64 points the head errs .045, with 16 it errs .01",
        of_networks({(1, 8, 16): 0.01, (1, 8, 64): 0.045}),
    ),
    ("dong_thm_rate_cubic", "one cube, behind layers that hardly collapse", collapse(exponents=((1.05, 1.05, 3), 3))),
    ("dong_thm_rate_mlp_cubic", "the same with MLPs", collapse(exponents=(3, (1.05, 1.05, 3)))),
    (
        "dong_fig2_collapses",
        "10 of 32 sequences do not collapse, though the mean of the logarithms is below 10^-400",
        collapse(shares=ALMOST_ALL | {"attention_only": 22 / 32}),
    ),
    (
        "dong_fig2_skips",
        "a third of the sequences collapses in spite of the skips",
        collapse(shares=ALMOST_ALL | {"full": 1 / 3}),
    ),
    (
        "wu_masked_attention_collapses",
        "it collapses in one layer of three, and then grows again",
        collapse({"attention_only_no_norm": -3.0}).assign(
            log10_relative_residual=lambda rows: rows.layer.map({0: -0.05, 1: -9.0, 2: -5.0, 3: -3.0})
        ),
    ),
    (
        "dong_fig4_falls_with_length",
        "six lengths within .0005 of chance",
        by_length({length: 0.125 + 0.0005 - 0.0001 * length for length in range(7)}),
    ),
    (
        "dong_fig4_falls_with_length",
        "five lengths that are equally good, within the spread of repeated samples",
        by_length({0: 0.2, 1: 0.9} | {length: 0.6 - 0.001 * length for length in range(2, 7)}),
    ),
    (
        "dong_fig4_falls_with_length",
        "two thirds of the lengths rise",
        by_length({1: 0.9, 2: 0.3, 3: 0.4, 4: 0.5, 5: 0.6}),
    ),
    (
        "dong_thm_rate_mlp_slows",
        "the residual is the same for all",
        mlp_gains(((0.5, -500.02), (1.0, -500.01), (2.0, -500.0))),
    ),
    (
        "wu_windows_slow_the_collapse",
        "the same is left with all windows",
        windows(((1, -2.0), (4, -2.01), (15, -2.02))),
    ),
    ("knob_lambda_skip", "what is left changes by a fiftieth", followed(SKIP, flat())),
    ("knob_identity_mix", "the same", measured(MIX, flat(0.51, 0.5))),
    ("paths_value_residual", "all paths are equally long, up to a fiftieth", by_mean_length(VALUE, flat(5.1, 5.0))),
    (
        "blog_layers_feed_back",
        "the layers remove twice as much on average, and one of them no more than the one before",
        by_logs(-0.1, -1.0, -1.9, -5.5),
    ),
    ("blog_layers_feed_back", "every layer removes as much", by_logs(-0.1, -1.1, -2.1, -3.1)),
    ("blog_scale_matters", "five times as much at the lowest temperature", followed(HEAT, flat(0.5, 0.1))),
    ("dong_fig3_skips_slow_points", "they slow the points down in half the seeds", circle(escaped=range(5))),
]


@pytest.mark.parametrize(("name", "words", "table"), HOSTILE, ids=[f"{name}-{words}" for name, words, _ in HOSTILE])
def test_a_table_that_refutes_a_claim_in_words_is_not_held(name, words, table):
    for verdict in judge(name, table):
        assert verdict["outcome"] not in ("held", "passed") and verdict["reason"] != NOTHING


DEEP = {(name, n): loss for name, loss in (("causal", 3.0), ("causal_l2_tied", 1.0)) for n in (12, 14)}


@pytest.mark.parametrize(
    ("name", "table", "keys", "diverged"),
    [
        ("kim_l2_loses_little", curves(TWO_DEPTHS), ["variant", "layers"], ("causal_l2", 2)),
        ("kim_dot_fails_deep", curves(DEEP), ["variant", "layers"], ("causal_l2_tied", 14)),
        ("knob_lambda_skip_enough", followed(SKIP, {0: 1e-9, 1: 0.2, 2: 0.3}), [SKIP], ("2",)),
        ("knob_lambda_skip", followed(SKIP, flat(0.2, 0.5) | {4: 0.1}), [SKIP], ("4",)),
    ],
)
def test_a_network_that_diverged_with_one_seed_is_not_judged_by_the_other_seeds(name, table, keys, diverged):
    """Its claim is held if that seed is passed over."""
    is_lost = (table[keys] == list(diverged)).all(axis=1) & (table.seed == 1)
    (verdict,) = judge(name, table[~is_lost], keys)
    assert verdict["outcome"] == "undecided"
    assert f"1 of {table.seed.nunique()} seeds lack a network of the sweep" in verdict["reason"]


def test_the_number_of_paths_that_are_read_out_together_decides_by_itself():
    """5 paths at .48, 20 at .599 and all of them at .671, of a threshold of .6."""
    table = by_length(ACCURACY | {1: 0.598}, whole_sums=0.671)
    table.loc[(table.path_length == 1) & (table.subset_size == 5), "accuracy"] -= 0.12
    outcomes = {verdict["where"]: verdict["outcome"] for verdict in judge("dong_fig4_length_1_sorting", table)}
    assert outcomes == {
        f"scheme={scheme}, {paths}": outcome
        for scheme in ("frozen", "recomputed")
        for paths, outcome in (
            ("selection=all", "held"),
            ("selection=sampled, subset_size=5", "failed"),
            ("selection=sampled, subset_size=20", "undecided"),
        )
    }


def test_one_value_has_no_two_ends():
    (verdict,) = judge("knob_kv_groups", followed(GROUPS, {8: 1e-100}), GROUPS)
    assert verdict["outcome"] == "undecided"
    assert verdict["reason"] == f"this needs a sweep over {GROUPS} of 2 values or more"


def test_layers_that_a_table_has_twice_count_once():
    table = collapse({"attention_only_no_norm": -9.0})
    (once,), (twice,) = (judge("dong_thm_rate_few_layers", rows) for rows in (table, pd.concat([table, table])))
    assert once["outcome"] == twice["outcome"] == "held" and once["measured"] == twice["measured"]


def by_number_of_paths(accuracies):
    """A table of the analysis paths: accuracies by number of paths and length, forty samples of each."""
    rows = [
        {"seed": seed, "scheme": "recomputed", "selection": "sampled", "subset_size": size, "path_length": length}
        | {"accuracy": accuracy + 0.01 * (repeat % 5 - 2), "whole_accuracy": 0.99, "majority_accuracy": 0.125}
        for size, by_length in accuracies.items()
        for length, accuracy in by_length.items()
        for seed in range(5)
        for repeat in range(40)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("name", "five", "twenty", "wanted"),
    [
        # both fall; between them they differ by more than from one length to the next
        ("dong_fig4_falls_with_length", (0.6, 0.5, 0.4, 0.32), (0.95, 0.85, 0.75, 0.65), ["held", "held"]),
        # the mean of the two falls
        ("dong_fig4_falls_with_length", (0.8, 0.6, 0.4, 0.2), (0.6, 0.65, 0.7, 0.75), ["held", "failed"]),
        # the mean of the two is at chance
        ("dong_fig4_longest_at_chance", (0.8, 0.6, 0.4, 0.025), (0.6, 0.5, 0.4, 0.225), ["failed", "failed"]),
    ],
)
def test_subsets_of_different_sizes_are_not_samples_of_one(name, five, twenty, wanted):
    table = by_number_of_paths({size: dict(enumerate(of, 1)) for size, of in ((5.0, five), (20.0, twenty))})
    assert [verdict["outcome"] for verdict in judge(name, table)] == wanted


def test_a_table_without_the_share_of_sequences_is_not_judged():
    (verdict,) = judge("dong_fig2_collapses", collapse().drop(columns="share_collapsed"))
    assert verdict["outcome"] == "undecided" and "analyse the run again" in verdict["reason"]
    assert math.isnan(verdict["measured"])
