"""Claims on rankbench.measures.certified_ball; table `lipschitz` of a sweep over model.norm."""

from functools import partial

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, below, require
from rankbench.judging.lipschitz import of_layers
from rankbench.judging.sweeps import at_value, rows_at

NEAR = 0.02  # radius of a ball, in the Frobenius norm over all tokens of a sequence
USELESS = 1e6  # ratio above which all count alike: a bound may be infinite
OF_BALLS = "quantity == 'certified_ball' and weights == 'trained'"
SOURCE = "rankbench, rankbench.measures.certified_ball"


def looseness(rows: pd.DataFrame) -> pd.Series:
    """log10 of the bound over the largest Jacobian norm that ascent finds, of the trained network, by radius."""
    balls = rows.query(OF_BALLS) if "radius" in rows else rows[:0]
    require(not balls.empty, "the table has no balls; give analysis.lipschitz.radii")
    by_radius = balls.groupby(["radius", "kind"]).value.agg(lambda of: of.max(skipna=False)).unstack()
    require(by_radius.notna().all(axis=None), "a ball has no bound, or no norm beside it")
    return np.log10((by_radius.bound / by_radius.lower_bound).clip(upper=USELESS))


def _near_the_data(rows: pd.DataFrame) -> float:
    of_radius = looseness(rows_at(rows, "model.norm", "pre"))
    near = of_radius[of_radius.index >= NEAR]
    require(not near.empty, f"no ball has a radius of {NEAR} or more")
    return near.iloc[0]


def _largest_everywhere(rows: pd.DataFrame) -> pd.DataFrame:
    bounds = rows.eval(f"{OF_BALLS} and kind == 'bound'")
    largest = rows[bounds].groupby([*rows.columns.intersection(["seed", "model.norm", "model.layers"])]).value
    return rows.assign(value=rows.value.where(~bounds, largest.transform("max").reindex(rows.index)))


_of_sweep = partial(of_layers, source=SOURCE, claimed=below(1.0), along="model.norm", since="2026-11-26")

CLAIMS: dict[str, Claim] = {
    "ball_without_norms": _of_sweep(
        statement="With tied L2 attention, no norms and no singular value above 1, the bound on the whole trained "
        "network's Jacobian is within ten times the largest norm that ascent finds, on balls of every radius (log10 of "
        "the largest ratio).",
        applies=lambda rows: (rows.attention == "l2").all(),  # no theorem holds everywhere for dot products
        **at_value("model.norm", "none", "pre", lambda rows: looseness(rows).max()),
        in_words="the bound is up to {} times the largest norm found",
    ),
    "ball_near_data": _of_sweep(
        statement=f"With pre-norm the bound is within ten times the largest norm that ascent finds up to a radius of "
        f"{NEAR} around the data (log10 of the ratio there).",
        measure=_near_the_data,
        control=Control("the bound on the largest ball in place of that near the data", _largest_everywhere),
        in_words="the bound is {} times the largest norm found",
    ),
}
