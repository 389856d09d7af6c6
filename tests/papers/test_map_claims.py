"""Claims on the map of depth and inverse temperature, on tables with known maps."""

import math

import pandas as pd
import pytest

from rankbench.judging import judge
from rankbench.papers.own.signal_map import CLAIMS

DEPTHS, BETAS, CRITICAL = (1, 4, 8, 16), (0.1, 1.0, 2.0, 20.0), math.sqrt(2)


def table(accuracy, off=0.0, betas=BETAS):
    """Three draws, .001 apart. accuracy: a function of theory's cosine and of whether beta is above the critical one;
    off: distance of the measured cosine from theory's."""
    rows = []
    for draw in range(3):
        for layers in DEPTHS:
            for number, beta in enumerate(betas):
                cosine = 0.2 + 0.02 * layers + 0.1 * (beta < CRITICAL)
                of_cell = {"layers": layers, "beta": beta, "theory_cosine": cosine}
                of_cell |= {"draw": draw, "seed": len(betas) * draw + number, "initial_cosine": cosine + off}
                rows.append(of_cell | {"test_accuracy": accuracy(cosine, beta > CRITICAL) + 0.001 * draw})
    return pd.DataFrame(rows).assign(run="r", task="sorting", model="m", critical_beta=CRITICAL)


def verdict(name, rows):
    (judged,) = judge(name, rows.assign(**{"model.layers": rows.layers}), "model.layers")
    return judged["outcome"], judged["measured"]


@pytest.mark.parametrize(("off", "wanted"), [(0.0, "held"), (0.11, "held"), (-0.13, "failed")])
def test_the_distance_from_theory(off, wanted):
    outcome, measured = verdict("map_theory", table(lambda cosine, above: 0.5, off))
    assert outcome == wanted and measured == pytest.approx(abs(off), abs=1e-12)


@pytest.mark.parametrize(("sign", "wanted"), [(-1, "held"), (1, "failed")])
def test_accuracy_falls_or_grows_where_tokens_are_alike(sign, wanted):
    rows = table(lambda cosine, above: 0.5 + 0.3 * sign * cosine)
    outcome, measured = verdict("map_collapse_hurts", rows)
    assert outcome == wanted and measured == pytest.approx(sign)
    spearman = rows[rows.draw == 0][["theory_cosine", "test_accuracy"]].rank().corr().iloc[0, 1]
    assert measured == pytest.approx(spearman)


@pytest.mark.parametrize(("lost", "wanted"), [(0.2, "held"), (-0.2, "failed")])
def test_networks_above_the_critical_temperature_learn_less_or_more(lost, wanted):
    outcome, measured = verdict("map_condensation_hurts", table(lambda cosine, above: 0.5 - lost * above))
    assert outcome == wanted and measured == pytest.approx(-lost)


@pytest.mark.parametrize("name", CLAIMS)
def test_without_a_map_nothing_is_judged(name):
    rows = table(lambda cosine, above: 0.5)
    for part in (rows[rows.layers == 1], rows[rows.beta == 1.0], rows.assign(theory_cosine=math.nan)):
        assert verdict(name, part)[0] == "undecided"
    if name == "map_condensation_hurts":
        assert verdict(name, table(lambda cosine, above: 0.5, betas=(0.1, 1.0)))[0] == "undecided"
