"""Claims on path spectra, on tables with known tails."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import scipy
from judged import assert_undecided

from rankbench.judging import judge
from rankbench.judging.claim import NOTHING

LENGTHS = 21


def geometric(k):
    return 10.0 ** -(k / 4)


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


def outcome(name, rows):
    (verdict,) = judge(name, rows, "checkpoint")
    return verdict["outcome"], verdict["measured"]


@pytest.mark.parametrize(
    ("error", "wanted", "ratio"),
    [
        (geometric, "held", 1.0),
        (gaussian, "failed", (math.sqrt(3) - math.sqrt(2)) / (math.sqrt(2) - 1)),
        (lambda k: np.where(k < 10, geometric(k), 10.0 ** -(2.5 + (k - 10) / 12)), "failed", 2.0),
    ],
)
def test_a_factor_of_ten_costs_the_same_or_not(error, wanted, ratio):
    found, measured = outcome("atlas_tail", networks(error=error))
    assert found == wanted
    # a Gaussian is straight between two lengths to a hundredth
    assert math.exp(measured) == pytest.approx(ratio, rel=1e-12 if error is geometric else 0.05)


def test_a_network_whose_longest_paths_remove_the_error_has_no_tail_and_does_not_count():
    flat = table(error=lambda k: 0.5 + 0 * k).assign(checkpoint="four")
    assert outcome("atlas_tail", pd.concat([networks(), flat]))[0] == "held"
    assert_undecided("atlas_tail", pd.concat([table(), flat]), "fewer than 3 checkpoints", "checkpoint")


def test_one_network_is_not_judged():
    assert_undecided("atlas_tail", table().drop(columns="checkpoint"), "this needs a sweep over checkpoint")


@pytest.mark.parametrize(("lag", "wanted"), [(2, "held"), (0, "undecided"), (-1, "failed")])
def test_tokens_come_later_than_their_mean(lag, wanted):
    assert outcome("atlas_tokens_behind_mean", networks(lag=lag)) == (wanted, lag)


def test_a_mean_that_passes_through_has_not_settled():
    """It is near with paths of up to two heads, and then a nat off to the other side until the tokens have settled."""
    rows = networks(lag=2)
    early, between = rows.path_length == 2, rows.path_length.between(3, 7)
    rows["excess_loss_upto"] = rows.excess_loss_upto.mask(early, 0.001).mask(between, -1.0)
    assert outcome("atlas_tokens_behind_mean", rows) == ("failed", -1)  # the mean at 8 heads, the tokens at 7


@pytest.mark.parametrize(("k99", "wanted"), [((8.0, 4.0), "held"), ((4.0, 8.0), "failed"), ((0.5, 0.2), "undecided")])
def test_trained_weights_need_longer_paths_or_not(k99, wanted):
    assert outcome("atlas_training_lengthens", networks(k99=k99))[0] == wanted


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
        # the same error and shares at every depth, as far as its lengths go
        parts.append(
            rows.assign(seed=seed, whole_accuracy=accuracy, **{"model.layers": str(depth), "model.norm": norm})
        )  # as tables have it
    return pd.concat(parts, ignore_index=True)


def outcomes(name, rows):
    return [verdict["outcome"] for verdict in judge(name, rows, "model.layers")]


@pytest.mark.parametrize(("power", "wanted"), [(0.5, "held"), (1.0, "failed"), (1.3, "failed")])
def test_the_power_with_which_the_needed_length_grows(power, wanted):
    (verdict,) = judge("grid_no_fraction", grid(power), "model.layers")
    assert verdict["outcome"] == wanted and verdict["measured"] == pytest.approx(power, abs=0.01)  # the seeds' 1 %


def test_depths_that_have_not_learned_are_left_out():
    (verdict,) = judge("grid_no_fraction", grid(untrained=(16, 24)), "model.layers")
    assert verdict["measured"] == pytest.approx(0.5, abs=0.01)
    (verdict,) = judge("grid_no_fraction", grid(untrained=(8, 16, 24)), "model.layers")
    assert verdict["reason"] == "networks of fewer than 3 depths have learned their task"


@pytest.mark.parametrize(
    ("share", "wanted"),
    [
        (binomial, "held"),
        (lambda k: (k == 0) / 2 + (k == len(k) - 1) / 2, "failed"),
        (lambda k: np.where(k == 1, 2.0, np.where(k == 0, -1.0, 0.0)), "undecided"),  # a variance below 0
    ],
)
def test_the_variance_of_length_against_its_mean(share, wanted):
    assert outcomes("grid_variance", grid(share=share)) == [wanted] * 3  # from 8 layers on
    verdict = judge("grid_variance", grid(), "model.layers")[0]
    assert verdict["measured"] == pytest.approx(math.log(0.5))


def test_a_network_that_has_not_learned_is_not_judged():
    assert outcomes("grid_variance", grid(untrained=(8,))) == ["undecided", "held", "held"]
    assert outcomes("grid_post_norm_grows", grid(untrained=(8,), growth=0.8)) == ["undecided", "held", "held"]
    regression = grid().assign(whole_accuracy=math.nan)
    assert outcomes("grid_variance", regression) == ["undecided"] * 3
    regression.loc[regression.weights == "initialised", "whole_loss"] = 1.1
    assert outcomes("grid_variance", regression) == ["held"] * 3


def shared_and_not(ratio, power=0.5, untrained=()):
    """The grid with layers of their own, whose masses sum to 3, and with shared ones: masses times a ratio, k99 = depth
    to this power."""
    shared = grid(power, untrained).assign(**{"model.shared_layers": "true"})
    shared["mass"] *= ratio
    return pd.concat([grid().assign(**{"model.shared_layers": "false"}), shared], ignore_index=True)


@pytest.mark.parametrize(("ratio", "wanted"), [(6.0, "held"), (1.01, "held"), (0.5, "failed")])
def test_shared_layers_against_layers_of_their_own(ratio, wanted):
    verdicts = judge("grid_shared_cancel", shared_and_not(ratio), ["model.layers", "model.shared_layers"])
    assert [verdict["where"] for verdict in verdicts] == [f"model.layers={depth}" for depth in (8, 16, 24)]
    assert {verdict["outcome"] for verdict in verdicts} == {wanted}
    assert verdicts[0]["measured"] == pytest.approx(math.log(ratio))


def test_shared_layers_that_have_not_learned_are_not_compared():
    rows = shared_and_not(6.0, untrained=(8,))
    first, *deeper = judge("grid_shared_cancel", rows, ["model.layers", "model.shared_layers"])
    assert first["outcome"] == "undecided" and {verdict["outcome"] for verdict in deeper} == {"held"}
    assert first["reason"].startswith("model.shared_layers=true: the network has not learned its task (accuracy 0.3,")


def test_depths_are_compared_within_shared_layers_and_within_layers_of_their_own():
    verdicts = judge("grid_no_fraction", shared_and_not(6.0, power=1.2), ["model.layers", "model.shared_layers"])
    found = {verdict["where"]: (verdict["outcome"], round(verdict["measured"], 1)) for verdict in verdicts}
    assert found == {"model.shared_layers=false": ("held", 0.5), "model.shared_layers=true": ("failed", 1.2)}


@pytest.mark.parametrize(("later", "wanted"), [(0.1, "held"), (-0.9, "held"), (1.5, "failed"), (-1.5, "failed")])
def test_hard_tokens_need_as_many_heads(later, wanted):
    assert outcomes("grid_hard_tokens", grid(later=later)) == [wanted] * 5
    assert outcome("atlas_hard_tokens", networks(later=later))[0] == wanted


def test_the_tail_of_deep_networks():
    assert outcomes("grid_tail", grid(error=lambda k: 10.0 ** -(k / 2)))[0] == "held"


@pytest.mark.parametrize(
    ("growth", "grows", "saturates"),
    [(0.8, "held", "failed"), (0.1, "failed", "held"), (0.49, "undecided", "undecided")],
)
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_needed_length_grows_to_the_last_layer_or_saturates(norm, growth, grows, saturates):
    name, wanted = {"post": ("grid_post_norm_grows", grows), "pre": ("grid_pre_norm_saturates", saturates)}[norm]
    verdicts = judge(name, grid(norm=norm, growth=growth), "model.layers")
    assert [verdict["outcome"] for verdict in verdicts] == [wanted] * 3  # from 8 layers on
    assert [verdict["measured"] for verdict in verdicts] == pytest.approx([growth + 0.01] * 3)  # mean of the seeds


def test_fresh_networks_alone_have_no_growth_and_trained_ones_are_judged_by_their_accuracy_alone():
    rows = grid(growth=0.8)
    assert_undecided("grid_post_norm_grows", rows[rows.weights == "initialised"], "no trained weights", "model.layers")
    assert outcomes("grid_variance", rows[rows.weights == "trained"]) == ["held"] * 3


@pytest.mark.parametrize("name", ["grid_post_norm_grows", "grid_pre_norm_saturates"])
def test_growth_with_the_layer_needs_rows_of_layers_and_the_place_of_the_norm(name):
    for norm, growth in (("post", None), ("pre", None), ("peri", 0.8)):
        assert_undecided(name, grid(norm=norm, growth=growth), NOTHING, "model.layers")
