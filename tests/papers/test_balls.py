"""Claims on the bound around the data, on tables with known ratios."""

import numpy as np
import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided

from rankbench.judging.claim import NOTHING
from rankbench.papers.own.balls import CLAIMS, looseness

RADII = (0.01, 0.02, 1.0)


def table(**bounds: tuple[float, ...]) -> pd.DataFrame:
    """bounds: by model.norm, the bound at each of RADII; ascent finds 1, 1 and 2 there."""
    rows = [
        {"seed": seed, "model.norm": norm, "radius": radius, "kind": kind, "value": value * (1 + 0.01 * seed)}
        for seed in range(5)
        for norm, of_norm in bounds.items()
        for radius, bound, found in zip(RADII, of_norm, (1.0, 1.0, 2.0), strict=True)
        for kind, value in (("bound", bound), ("lower_bound", found))
    ]
    where = {"run": "sweep", "task": "char_lm", "model": "causal_l2_tied", "weights": "trained", "part": "network"}
    return pd.DataFrame(rows).assign(
        **where, layer=0, p=2.0, quantity="certified_ball", start=0, step=0, tokens=12, attention="l2"
    )


TIGHT, LOOSE, FAR = (1.0, 1.5, 19.0), (1.0, 1.5, 21.0), (1.0, 11.0, np.inf)
MEASURED = {"ball_without_norms": np.log10(9.5), "ball_near_data": np.log10(1.5)}


@pytest.mark.parametrize("name", CLAIMS)
def test_claims_hold_and_fail(name):
    assert_holds_and_fails(name, table(none=TIGHT, pre=LOOSE), [table(none=LOOSE, pre=FAR)], MEASURED[name])


def test_dot_products_have_no_bound_everywhere_so_none_is_asked_for():
    assert_undecided("ball_without_norms", table(none=LOOSE, pre=FAR).assign(attention="dot"), NOTHING)


def test_a_ball_without_a_bound_is_not_passed_over():
    assert_undecided(
        "ball_without_norms", table(none=(1.0, 1.5, np.nan), pre=LOOSE), "a ball has no bound", "model.norm"
    )


def test_ratios_are_of_trained_weights_alone():
    rows = table(none=TIGHT, pre=FAR)
    before = rows.assign(weights="initialised", value=rows.value.where(rows.kind == "lower_bound", 1e9))
    of_norm = pd.concat([rows, before]).query("`model.norm` == 'none' and seed == 0")
    assert looseness(of_norm).tolist() == pytest.approx(np.log10([1.0, 1.5, 9.5]).tolist(), rel=1e-12)
