"""Claims on path spectra, on tables with known tails."""

import math

import numpy as np
import pandas as pd
import pytest

from rankbench.judging import judge
from rankbench.papers.own.atlas import CLAIMS

LENGTHS = 21


def geometric(k):
    return 10.0 ** -(k / 4)


def gaussian(k):
    return np.exp(-8 * (k / (LENGTHS - 1)) ** 2)


def table(error=geometric, k99=(8.0, 4.0), lag=2, checkpoint="one", num_lengths=LENGTHS):
    """A spectrum of trained and of fresh weights. k99: of each; lag: lengths by which nine tokens in ten come later
    than the mean."""
    k = np.arange(num_lengths)
    of_lengths = {
        "path_length": k,
        "part": "length",
        "error_upto": np.where(k == num_lengths - 1, 1e-15, error(k)),
        "error_below_floor": (k == num_lengths - 1).astype(float),
        "excess_loss_upto": np.where(k < 5, 0.3, -0.002),
        "loss_settled_upto": np.where(k < 5 + lag, 0.85, 0.95),
    }
    rows = [
        pd.DataFrame(of_lengths).assign(weights=weights, k99=needed)
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
    (verdict,) = judge("atlas_tail", pd.concat([table(), flat]), "checkpoint")
    assert verdict["outcome"] == "undecided" and verdict["reason"].startswith("fewer than 3 checkpoints")


def test_one_network_is_not_judged():
    (verdict,) = judge("atlas_tail", table().drop(columns="checkpoint"))
    assert (verdict["outcome"], verdict["reason"]) == ("undecided", "this needs a sweep over checkpoint")


@pytest.mark.parametrize(("lag", "wanted"), [(2, "held"), (0, "undecided"), (-1, "failed")])
def test_tokens_come_later_than_their_mean(lag, wanted):
    assert outcome("atlas_tokens_behind_mean", networks(lag=lag)) == (wanted, lag)


@pytest.mark.parametrize(("k99", "wanted"), [((8.0, 4.0), "held"), ((4.0, 8.0), "failed"), ((0.5, 0.2), "undecided")])
def test_trained_weights_need_longer_paths_or_not(k99, wanted):
    assert outcome("atlas_training_lengthens", networks(k99=k99))[0] == wanted


@pytest.mark.parametrize("name", CLAIMS)
def test_the_control_fails(name, outcomes_with_control):
    assert outcomes_with_control(name, networks()) == ({"held"}, {"failed"})
