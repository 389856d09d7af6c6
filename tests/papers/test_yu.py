"""The claims on the number of heads: each holds on a table that supports it, and fails in its control and on others."""

import math

import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided

from rankbench.papers.yu_2025 import CLAIMS

ERRORS = {2: {1: 0.4, 2: 0.02, 3: 0.015, 4: 0.01}, 4: {1: 0.78, 2: 0.46, 3: 0.3, 4: 0.02, 6: 0.01}}


def table(errors=None, **changed):
    """Errors by directions and heads, of three seeds a thousandth apart; beside them those of fresh weights."""
    rows = [
        {"seed": seed, "of": "network", "weights": weights, "evaluation": "soft", "task.directions": directions}
        | {"heads": heads, "error": value * (1 + 0.001 * seed)}
        for directions, by_heads in {**ERRORS, **(errors or {})}.items()
        for heads, error in by_heads.items()
        for seed in range(3)
        for weights, value in (("trained", error), ("initialised", 1.3))
    ]
    return pd.DataFrame(rows).assign(**changed)


def with_four(**by_heads):
    """The table with other errors for four directions."""
    return table({4: ERRORS[4] | {int(heads[1:]): error for heads, error in by_heads.items()}})


MEASURED = {"yu_fewer_heads": math.log10(15), "yu_enough_heads": 0.02}
REFUTED = {
    "yu_fewer_heads": [with_four(h3=0.15), with_four(h4=0.04), table({2: {1: 0.1, 2: 0.02, 3: 0.015, 4: 0.01}})],
    "yu_enough_heads": [with_four(h4=0.1), table({2: {1: 0.4, 2: 0.2, 3: 0.015, 4: 0.01}})],
}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_hold_and_fail(name):
    assert_holds_and_fails(name, table(), REFUTED[name], MEASURED[name], rel=1e-3)


@pytest.mark.parametrize("name", CLAIMS)
def test_networks_that_have_not_learned_or_are_missing_decide_nothing(name):
    assert_undecided(name, with_four(h6=0.3), "most heads has not learned")
    assert_undecided(name, table(weights="initialised"), "no trained network")
    lacking = table()[lambda rows: rows.heads < rows["task.directions"]]
    assert_undecided(name, lacking, "no network with as many heads as directions")
    assert_undecided(name, table().drop(columns="task.directions"), "this needs a sweep over task.directions")
