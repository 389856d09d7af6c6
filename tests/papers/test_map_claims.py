"""Claims on the map of depth and inverse temperature, on tables with known maps."""

import math

import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided

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
                of_cell["model.layers"] = layers
                rows.append(of_cell | {"test_accuracy": accuracy(cosine, beta > CRITICAL) + 0.001 * draw})
    return pd.DataFrame(rows).assign(run="r", task="sorting", model="m", critical_beta=CRITICAL)


def half(cosine, above):
    return 0.5


# name: (a table that supports it, the number measured on it, tables that refute it)
TABLES = {
    "map_theory": (table(half, off=0.11), 0.11, [table(half, off=-0.13)]),
    # Spearman's correlation is -1, although Pearson's is not
    "map_collapse_hurts": (table(lambda cosine, _: 0.5 - cosine**3), -1.0, [table(lambda cosine, _: 0.5 + cosine)]),
    "map_condensation_hurts": (
        table(lambda _, above: 0.5 - 0.2 * above),
        -0.2,
        [table(lambda _, above: 0.5 + 0.2 * above)],
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_hold_and_fail(name):
    supporting, measured, refuting = TABLES[name]
    assert_holds_and_fails(name, supporting, refuting, measured)


@pytest.mark.parametrize("name", CLAIMS)
def test_without_a_map_nothing_is_judged(name):
    rows = table(half)
    for part in (rows[rows.layers == 1], rows[rows.beta == 1.0], rows.assign(theory_cosine=math.nan)):
        assert_undecided(name, part, "needs a map over", "model.layers")
    if name == "map_condensation_hurts":
        assert_undecided(name, table(half, betas=(0.1, 1.0)), "on one side of the critical one", "model.layers")
