"""Conditions of the attention-paths blog (on weakly interdependent paths), as tests on the tables.

The blog calls paths weakly interdependent where these conditions hold. It prints no numbers; the thresholds are ours.
"""

from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, NotMeasurable, below, exact_check, has_row

SMALL = 0.1  # a measure below this is small; it is 1 for two equal paths
NATS = 0.1  # mutual information of Gaussian numbers with a correlation of .43
LOST = 0.05  # accuracy that a few paths may lose against the whole network
FEW = 0.1  # share of the paths that counts as few
EXACT = 1e-10  # relative to the output: rounding leaves 1e-15 in float64, more than 1e-8 in float32

# Measures: one seed's rows -> a number


def _size(rows: pd.DataFrame, of: str, column: str) -> float:
    """Mean absolute value of a column."""
    return rows[rows.of == of][column].abs().mean()


def _other_heads(rows: pd.DataFrame) -> pd.Series:
    """Mask of the rows on two different heads."""
    return (rows.of == "heads") & (rows["first"] != rows["second"])


def _share_needed(rows: pd.DataFrame, order: str) -> float:
    """Smallest share of the paths within LOST of the whole network's accuracy; mean over repeats."""
    enough = rows[(rows.order == order) & (rows.accuracy >= rows.whole_accuracy - LOST)]
    if enough.empty:
        raise NotMeasurable(f"no paths in the order {order}")
    return enough.groupby("repeat", dropna=False).kept_share.min().mean()


# Where claims apply, and controls


def _has_paths(rows: pd.DataFrame, column: str) -> bool:
    return rows[rows.of == "paths"][column].notna().any()


def _own_for_cross(rows: pd.DataFrame) -> pd.DataFrame:
    same_head = rows[(rows.of == "heads") & (rows["first"] == rows["second"])]
    return same_head.assign(second="another head")


SOURCE = "Attention-paths blog, weak interdependence"
_condition = partial(Claim, source=SOURCE, table="independence")


def _control(of: str, column: str, by: float) -> Control:
    larger = {column: f"{column}.abs() + {by}"}
    return Control.beyond(f"the same, where {column} is {by:g} larger", f"of == '{of}'", **larger)


def _pairs(column: str, statement: str) -> Claim:
    """Claim on the mean absolute value of a column over pairs of paths, judged under both schemes."""
    return _condition(
        statement=statement,
        measure=partial(_size, of="paths", column=column),
        claimed=below(SMALL),
        by=("scheme",),
        floor=f"{column}_below_floor",
        applies=partial(_has_paths, column=column),
        control=_control("paths", column, 1.1 * SMALL),
    )


def _pruned(order: str, statement: str) -> Claim:
    return Claim(
        statement=statement,
        source="Attention-paths blog, why paths matter",
        table="pruning",
        measure=partial(_share_needed, order=order),
        claimed=below(FEW),
        applies=partial(has_row, order=order),
        scale="share",
        control=Control("paths in random order", lambda rows: rows[rows.order == "random"].assign(order=order)),
    )


CLAIMS: dict[str, Claim] = {
    "blog_paths_orthogonal": _pairs(
        column="cosine", statement="1: outputs of two paths are orthogonal (mean size of their cosine)."
    ),
    "blog_paths_uncorrelated": _pairs(
        column="correlation",
        statement="2: outputs of two paths hardly covary over inputs (mean size of their correlation).",
    ),
    "blog_frozen_paths_add_up": exact_check(
        statement="3, of frozen paths: the output is the sum of all paths (relative rest; Theorem 2.1 of Dong et al. "
        "2021).",
        source=SOURCE,
        table="independence",
        measure=partial(_size, of="network", column="interaction"),
        claimed=below(EXACT),
        by=("scheme",),
        applies=partial(has_row, scheme="frozen", of="network"),
        control=_control("network", "interaction", 1e-8),
    ),
    "blog_paths_additive": _condition(
        statement="3, of recomputed paths: the output is nearly the sum of all paths (relative rest).",
        measure=partial(_size, of="network", column="interaction"),
        claimed=below(SMALL),
        by=("scheme",),
        floor="interaction_below_floor",
        applies=partial(has_row, scheme="recomputed", of="network"),
        control=_control("network", "interaction", 1.1 * SMALL),
    ),
    "blog_pairs_additive": _pairs(
        column="interaction",
        statement="3, of recomputed paths: two paths hardly interact in one network (mean relative interaction).",
    ),
    "blog_cross_gradients_below_own": _condition(
        statement="4: second derivatives of the loss by two heads' parameters are small beside the heads' own (mean "
        "ratio; the blog compares them with 1, which the scale of the parameters decides).",
        measure=lambda rows: rows[_other_heads(rows)].cross_gradient_relative.mean(),
        claimed=below(SMALL),
        floor="cross_gradient_below_floor",
        applies=lambda rows: bool(_other_heads(rows).any()),
        control=Control("each head beside itself", _own_for_cross),
    ),
    "blog_paths_independent": _condition(
        statement="5: outputs of two paths share little information (mean KSG estimate, nats).",
        measure=lambda rows: rows[rows.of == "paths"].information_ksg.mean(),
        claimed=below(NATS),
        by=("scheme",),
        applies=partial(_has_paths, column="information_ksg"),
        control=_control("paths", "information_ksg", 1.1 * NATS),
    ),
    "blog_few_paths_suffice": _pruned(
        order="greedy",
        statement="A few paths carry the prediction: the share of paths, each taken for the loss that it saves, that "
        "comes within 5 points of the whole network's accuracy.",
    ),
    "blog_largest_paths_suffice": _pruned(
        order="norm",
        statement="The few paths with the largest outputs carry the prediction: the share of paths that comes within 5 "
        "points of the whole network's accuracy.",
    ),
}
