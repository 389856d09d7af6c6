"""What counts as one sample: seeds without one of the networks, subsets of different sizes, layers that stand twice."""

import math

import pandas as pd
import pytest
from test_dong import ACCURACY, by_length, collapse
from test_kim_char_lm import curves, losses
from test_knob_claims import GROUPS, SKIP, flat, followed

from rankbench.judging import judge

TWO_DEPTHS = losses(1, causal=1.0, causal_l2=0.99) | losses(2, causal=1.0, causal_l2=0.99)
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
