"""Claims on path spectra, on tables with known tails."""

import itertools
import math
from functools import partial

import numpy as np
import pandas as pd
import pytest
import scipy
from judged import assert_holds_and_fails, assert_undecided
from rows import verdict

from rankbench.judging import judge
from rankbench.judging.claim import NOTHING
from rankbench.papers.own.atlas import CLAIMS

LENGTHS = 21
LAYERS, SHARED = "model.layers", "model.shared_layers"


def geometric(k, heads=4, ratio=1.0):
    """Every factor of ten costs so many heads, and from .01 on that many times the ratio."""
    return np.where(k < 2 * heads, 10.0 ** -(k / heads), 10.0 ** -(2 + (k / heads - 2) / ratio))


def gaussian(k):
    return np.exp(-8 * (k / (LENGTHS - 1)) ** 2)


def binomial(k):
    """Shares of a coin thrown for each head: a variance of half the mean."""
    return scipy.stats.binom(len(k) - 1, 0.5).pmf(k)


def table(error=geometric, k99=(8.0, 4.0), lag=2, checkpoint="one", num_lengths=LENGTHS, share=binomial, later=0.1):
    """A spectrum of trained and of fresh weights. k99: of each; lag: lengths by which nine tokens in ten come later
    than the mean; later: heads that hard tokens need beyond easy ones."""
    k = np.arange(num_lengths)
    of_lengths = {
        "path_length": k,
        "part": "length",
        "error_upto": np.where(k == num_lengths - 1, 1e-15, error(k)),
        "error_below_floor": (k == num_lengths - 1).astype(float),
        "excess_loss_upto": np.where(k < 5, 0.3, -0.002),
        "loss_settled_upto": np.where(k < 5 + lag, 0.85, 0.95),
        "share": share(k),
        "mass": 3.0 / num_lengths,
    }
    rows = [
        pd.DataFrame(of_lengths).assign(
            weights=weights, k99=needed, hard_tokens_later=later, whole_accuracy=0.99, whole_loss=0.1
        )
        for weights, needed in zip(("trained", "initialised"), k99, strict=True)
    ]
    constant = pd.DataFrame({"part": ["constant"], "weights": "trained", "k99": k99[0]})
    table = pd.concat([*rows, constant], ignore_index=True).assign(of="states", checkpoint=checkpoint, seed=0)
    other = table.assign(of="output", k99=99.0, error_upto=1.0)
    return pd.concat([other, table], ignore_index=True).assign(run="r", task="texts", model=checkpoint)


def networks(**words):
    """Three networks with such tables, a hundredth apart."""
    each = [table(**words).assign(checkpoint=name) for name in ("one", "two", "three")]
    for number, rows in enumerate(each):
        rows["k99"] *= 1 + 0.01 * number
    return pd.concat(each, ignore_index=True)


def test_a_network_whose_longest_paths_remove_the_error_has_no_tail_and_does_not_count():
    flat = table(error=lambda k: 0.5 + 0 * k).assign(checkpoint="four")
    assert verdict("atlas_tail", pd.concat([networks(), flat]), "checkpoint")["outcome"] == "held"
    two = networks().query("checkpoint != 'three'")
    assert_undecided("atlas_tail", pd.concat([two, flat]), "fewer than 3 checkpoints", "checkpoint")


def test_one_network_is_not_judged():
    assert_undecided("atlas_tail", table().drop(columns="checkpoint"), "this needs a sweep over checkpoint")


def test_an_error_as_small_as_one_head_leaves_needs_one_head():
    assert_undecided("atlas_training_lengthens", networks(k99=(0.5, 0.2)), "threshold lies within the interval")


def layers(depth, growth):
    """Rows of each layer of a network, with k99 = 2 layer^growth of trained weights and 1 of fresh ones."""
    layer = np.arange(1, depth + 1)
    rows = pd.DataFrame({"part": "layer", "of": "layer", "layer": layer})
    weights = (("trained", 2.0 * layer**growth), ("initialised", 1.0))
    return pd.concat([rows.assign(weights=name, k99=k99) for name, k99 in weights], ignore_index=True)


def grid(power=0.5, untrained=(), norm="post", growth=None, **words):
    """Networks of five depths, three seeds each, with k99 = depth^power; `untrained` depths have learned nothing.
    growth: of k99 with the layer, within one network; None: without rows of layers."""
    parts = []
    for depth, seed in itertools.product((2, 4, 8, 16, 24), range(3)):
        rows = table(k99=((1 + 0.01 * seed) * depth**power, 1.0), num_lengths=depth + 1, **words)
        if growth is not None:
            rows = pd.concat([rows, layers(depth, growth + 0.01 * seed)], ignore_index=True)
        accuracy = 0.3 if depth in untrained else 0.99
        keys = {LAYERS: str(depth), "model.norm": norm}  # as tables have them
        # the same error and shares at every depth, as far as its lengths go
        parts.append(rows.assign(seed=seed, whole_accuracy=accuracy, **keys))
    return pd.concat(parts, ignore_index=True)


def shared_and_not(ratio, power=0.5, untrained=()):
    """The grid with layers of their own, whose masses sum to 3, and with shared ones: masses times a ratio, k99 = depth
    to this power."""
    shared = grid(power, untrained).assign(**{SHARED: "true"})
    shared["mass"] *= ratio
    return pd.concat([grid().assign(**{SHARED: "false"}), shared], ignore_index=True)


def passing_through():
    """The mean loss is near with paths of up to two heads, and then a nat off to the other side until the tokens have
    settled, with 7 heads; the mean does with 8."""
    rows = networks(lag=2)
    early, between = rows.path_length == 2, rows.path_length.between(3, 7)
    return rows.assign(excess_loss_upto=rows.excess_loss_upto.mask(early, 0.001).mask(between, -1.0))


def two_ends(k):
    return (k == 0) / 2 + (k == len(k) - 1) / 2


# name: (a table that supports it, the number measured on it, tables that refute it)
TABLES = {
    "atlas_tail": (
        networks(error=partial(geometric, ratio=1.2)),
        math.log(1.2),
        [networks(error=gaussian), networks(error=partial(geometric, ratio=1.3))],
    ),
    "atlas_tokens_behind_mean": (networks(lag=2), 2, [networks(lag=-1), passing_through()]),
    "atlas_training_lengthens": (
        networks(k99=(8.0, 0.2)),
        np.log([8.0, 8.08, 8.16]).mean(),  # over one head
        [networks(k99=(4.0, 8.0))],
    ),
    "atlas_hard_tokens": (networks(later=-0.9), -0.9, [networks(later=1.5), networks(later=-1.5)]),
    "grid_no_fraction": (grid(0.5), 0.5, [grid(1.0), grid(1.3)]),
    "grid_variance": (grid(share=binomial), math.log(0.5), [grid(share=two_ends)]),
    "grid_shared_cancel": (shared_and_not(1.01), math.log(1.01), [shared_and_not(0.5)]),
    "grid_tail": (
        grid(error=partial(geometric, heads=2, ratio=1.2)),
        math.log(1.2),
        [grid(error=partial(geometric, heads=2, ratio=1.3))],
    ),
    "grid_hard_tokens": (grid(later=-0.9), -0.9, [grid(later=1.5), grid(later=-1.5)]),
    "grid_post_norm_grows": (grid(growth=0.8), 0.81, [grid(growth=0.1)]),  # mean of the seeds
    "grid_pre_norm_saturates": (grid(norm="pre", growth=0.1), 0.11, [grid(norm="pre", growth=0.8)]),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_hold_and_fail(name):
    table, measured, refuting = TABLES[name]
    facet = [LAYERS, SHARED] if SHARED in table else LAYERS
    assert_holds_and_fails(name, table, refuting, measured, facet=facet)


def by_depth(name, rows):
    """Outcomes for 8, 16 and 24 layers; with fewer there is no verdict."""
    return [row["outcome"] for row in judge(name, rows, LAYERS)]


def test_shares_of_both_signs_have_no_variance():
    weird = grid(share=lambda k: np.where(k == 1, 2.0, np.where(k == 0, -1.0, 0.0)))
    assert_undecided("grid_variance", weird, "shares of both signs", LAYERS)


def test_depths_that_have_not_learned_are_left_out():
    shallow = grid()[LAYERS].astype(int) <= 8
    rows = grid(untrained=(16, 24)).assign(k99=lambda of: of.k99.where(shallow, 1.0))
    assert verdict("grid_no_fraction", rows, LAYERS)["measured"] == pytest.approx(0.5, rel=1e-9)
    reason = "networks of fewer than 3 depths have learned their task"
    assert_undecided("grid_no_fraction", grid(untrained=(8, 16, 24)), reason, LAYERS)


def test_a_network_that_has_not_learned_is_not_judged():
    assert by_depth("grid_variance", grid(untrained=(8,))) == ["undecided", "held", "held"]
    assert by_depth("grid_post_norm_grows", grid(untrained=(8,), growth=0.8)) == ["undecided", "held", "held"]
    regression = grid().assign(whole_accuracy=math.nan)
    assert by_depth("grid_variance", regression) == ["undecided"] * 3
    regression.loc[regression.weights == "initialised", "whole_loss"] = 1.1
    assert by_depth("grid_variance", regression) == ["held"] * 3


def test_shared_layers_that_have_not_learned_are_not_compared():
    rows = shared_and_not(6.0, untrained=(8,))
    first, *deeper = judge("grid_shared_cancel", rows, [LAYERS, SHARED])
    assert first["outcome"] == "undecided" and {row["outcome"] for row in deeper} == {"held"}
    assert first["reason"].startswith("model.shared_layers=true: the network has not learned its task (accuracy 0.3,")


def test_depths_are_compared_within_shared_layers_and_within_layers_of_their_own():
    verdicts = judge("grid_no_fraction", shared_and_not(6.0, power=1.2), [LAYERS, SHARED])
    found = {row["where"]: (row["outcome"], round(row["measured"], 1)) for row in verdicts}
    assert found == {"model.shared_layers=false": ("held", 0.5), "model.shared_layers=true": ("failed", 1.2)}


def test_fresh_networks_alone_have_no_growth_and_trained_ones_are_judged_by_their_accuracy_alone():
    rows = grid(growth=0.8)
    assert_undecided("grid_post_norm_grows", rows[rows.weights == "initialised"], "no trained weights", LAYERS)
    assert by_depth("grid_variance", rows[rows.weights == "trained"]) == ["held"] * 3


@pytest.mark.parametrize("name", ["grid_post_norm_grows", "grid_pre_norm_saturates"])
def test_growth_with_the_layer_needs_rows_of_layers_and_the_place_of_the_norm(name):
    for norm, growth in (("post", None), ("pre", None), ("peri", 0.8)):
        assert_undecided(name, grid(norm=norm, growth=growth), NOTHING, LAYERS)
