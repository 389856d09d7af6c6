"""How much of the tokens' differences a network leaves, and claims on it.

The share that is left is averaged over seeds, not its logarithm: a mean of -100 and -100,000 would say nothing. A share
below 10^-150 is given as a bound. Two collapses are compared by the ratio of their logarithms: attention alone triples
the logarithm in each layer, so log3 of the ratio is the number of layers by which one is ahead.
"""

import math
from functools import partial

import pandas as pd

from rankbench.judging.claim import AtMost, Claim, above, looked_up, of_any_weights, require
from rankbench.judging.sweeps import at_one_end, in_order, log10_of
from rankbench.runs.tables import last_of_layer

TENTH = 0.1  # share of the relative residual above which a network has not collapsed
HALF = 0.5  # share of a rank or an entropy above which it counts as kept
SMALLEST = -150.0  # log10 of the smallest share whose square, and so whose spread, float64 can hold

# Measures: one seed's rows -> a number


def share(log10: float) -> float:
    """10^log10, or a bound of it where its square underflows in float64."""
    return AtMost(10.0**SMALLEST) if log10 < SMALLEST else 10.0 ** min(log10, -SMALLEST)


def log10_left(rows: pd.DataFrame, variant: str) -> float:
    """log10 of a variant's relative residual after the last layer; rows of one kind of weights, table `collapse`."""
    return of_variant(rows, variant).log10_relative_residual.iloc[-1]


def log10_kept(rows: pd.DataFrame, variant: str) -> float:
    """log10 of a variant's relative residual after the last layer over that of the embedding."""
    by_layer = of_variant(rows, variant).log10_relative_residual
    return by_layer.iloc[-1] - by_layer.iloc[0]


def of_variant(rows: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Rows of a variant by layer."""
    by_layer = rows[rows.variant == variant].sort_values("layer")
    require(not by_layer.empty, f"the table has no variant {variant}")
    return by_layer


def of_embedding(rows: pd.DataFrame, column: str) -> pd.Series:
    """Each row's number of the embedding that belongs to it, for controls."""
    keys = ["seed", *rows.columns.intersection(["weights", "variant", "bound"])]
    return looked_up(rows, rows[rows.layer == 0].groupby(keys)[column].first())


def layers_ahead(first: float, second: float) -> float:
    """Number of layers by which the first collapse is ahead of the second, from the log10 shares that they leave."""
    require(first < 0 and second < 0, "there is no collapse to compare: the relative residual has not fallen")
    check_no_overflow(first, second)
    return math.log(first / second, 3)


def check_no_overflow(*log10_shares: float) -> None:
    """Raise NotMeasurable for a share whose logarithm float64 does not hold."""
    overflows = any(map(math.isinf, log10_shares))
    require(not overflows, "the logarithm of what is left overflows in float64: use fewer layers")


def kept_followed(rows: pd.DataFrame) -> float:
    """Share of the embedding's relative residual that the whole network leaves; table `collapse`."""
    return share(log10_kept(rows, "full"))


def kept_measured(rows: pd.DataFrame) -> float:
    """Share of the embedding's relative residual that is left; table `residual`, for networks that `collapse` excludes.

    It is a bound where a sequence is below its noise floor: the larger of its residual and the floor, over the size of
    the tokens.
    """
    first, last = ends(rows)
    kept = last.relative_residual / first.relative_residual
    if not last.below_floor:
        return kept
    require(last.residual > 0, "rounding has left nothing of the residual")
    return AtMost(kept * max(1.0, last.noise_floor / last.residual))


def ends(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Rows of the embedding and of the state after the last layer."""
    states = last_of_layer(rows[rows.variant == "full"])
    require(not states.empty, "the table has no variant full")
    first, last = (states[states.layer == layer].iloc[0] for layer in (0, states.layer.max()))
    require(math.isfinite(last.relative_residual), "the tokens after the last layer are all zero")
    return first, last


# A claim that more than a share of something is kept, whether or not a network has learned
keeps = partial(Claim, scale="positive", why_untrained=None)
# A claim on the table `collapse`, judged separately for trained and initialised weights, whether learned or not
of_collapse = partial(Claim, table="collapse", by=("weights",), why_untrained=None)


def left_along(key: str, side: int, statement: str, source: str, table: str = "collapse") -> Claim:
    """Claim that what is left grows (side=+1) or falls (-1) with the key."""
    followed = table == "collapse"
    measure = partial(log10_kept, variant="full") if followed else lambda rows: log10_of(kept_measured(rows))
    line = "above .5" if side > 0 else "below -.5"
    return of_any_weights(
        statement=f"{statement} (Kendall's rank correlation of {key} and the share of the embedding's relative "
        f"residual that is left; {line}, three pairs in four in this order, threshold: ours; changes of less than a "
        "tenth count as none).",
        source=source,
        table=table,
        **in_order(key, side, measure),
    )


def left_at(key: str, end: int, statement: str, source: str, table: str = "collapse", exists: bool = True) -> Claim:
    """Claim that more than a tenth is left at the smallest (end=0) or the largest (-1) value of the key."""
    return keeps(
        statement=f"{statement} more than a tenth of the embedding's relative residual is left after the last layer "
        f"(the share at the {'largest' if end else 'smallest'} {key} of the sweep).",
        source=source,
        table=table,
        claimed=above(TENTH),
        exists=exists,
        **at_one_end(key, end, kept_followed if table == "collapse" else kept_measured),
    )
