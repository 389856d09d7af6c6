"""Bounds on Lipschitz constants beside the Jacobian norms that were measured, and claims on them; table `lipschitz`.

A measure takes one seed's rows, what a control calls takes the rows of all seeds.
"""

from functools import partial

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, above, looked_up, require

LOWER, ASCENTS = "kind == 'lower_bound'", "quantity == 'ascent'"  # rows that controls set
MAP = ["seed", "weights", "part", "layer", "tokens", "p"]


def upper(rows: pd.DataFrame, quantity: str) -> pd.Series:
    """Finite bounds, or exact constants, of this quantity for each measured map."""
    known = (rows.quantity == quantity) & rows.kind.isin(["bound", "exact"]) & np.isfinite(rows.value)
    return rows[known].groupby(MAP).value.min()


def has_bound(rows: pd.DataFrame, quantity: str) -> bool:
    """Whether the rows have this bound of a map, and a Jacobian norm to compare it with."""
    return len(upper(rows, quantity)) > 0 and (rows.kind == "lower_bound").any()


def smallest_slack(rows: pd.DataFrame, quantity: str) -> float:
    """Smallest ratio of this bound to the largest Jacobian norm measured of the same map."""
    largest_norm = rows[rows.kind == "lower_bound"].groupby(MAP).value.agg(lambda of: of.max(skipna=False))
    both = pd.concat({"bound": upper(rows, quantity), "norm": largest_norm}, axis=1, join="inner")
    require(not both.empty, "no Jacobian norm was measured where there is this bound")
    return (both.bound / both.norm).min(skipna=False)


def upper_of(rows: pd.DataFrame, quantity: str) -> pd.Series:
    """The bound of each row's map."""
    return looked_up(rows, upper(rows, quantity))


# These claims are about fresh layers or about all weights, so no network needs to have learned anything.
of_layers = partial(Claim, table="lipschitz", why_untrained=None)


def bound_holds(quantity: str, bound: str, statement: str, source: str) -> Claim:
    """Claim that no measured Jacobian norm is above a bound; bound: what the control calls it."""
    return of_layers(
        statement=statement,
        source=source,
        measure=partial(smallest_slack, quantity=quantity),
        claimed=above(1.0 - 1e-9),
        applies=partial(has_bound, quantity=quantity),
        is_check=True,
        exact=True,
        control=Control.beyond(
            f"each measured norm a hundredth above {bound}",
            of=LOWER,
            value=lambda rows: 1.01 * upper_of(rows, quantity),
        ),
    )
