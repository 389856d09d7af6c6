"""The attention-paths blog: conditions of weakly interdependent paths, and what it names as causes of the collapse.

The blog calls paths weakly interdependent where these conditions hold. It prints no numbers; the thresholds are ours.
"""

from functools import partial

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, above, below, exact_check, has_row, of_any_weights, require
from rankbench.judging.residual_left import layers_ahead, left_along, log10_kept
from rankbench.judging.sweeps import between, rows_by_value

PAPERS = {"Attention-paths blog": "Weak interdependence of attention paths"}

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
    require(not enough.empty, f"no paths in the order {order}")
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


CONDITIONS: dict[str, Claim] = {
    "blog_paths_orthogonal": _pairs(
        column="cosine", statement="Condition 1: outputs of two paths are orthogonal (mean size of their cosine)."
    ),
    "blog_paths_uncorrelated": _pairs(
        column="correlation",
        statement="Condition 2: outputs of two paths hardly covary over inputs (mean size of their correlation).",
    ),
    "blog_frozen_paths_add_up": exact_check(
        statement="Condition 3, of frozen paths: the output is the sum of all paths (relative rest; Theorem 2.1 of "
        "Dong et al. 2021).",
        source=SOURCE,
        table="independence",
        measure=partial(_size, of="network", column="interaction"),
        claimed=below(EXACT),
        by=("scheme",),
        applies=partial(has_row, scheme="frozen", of="network"),
        control=_control("network", "interaction", 1e-8),
    ),
    "blog_paths_additive": _condition(
        statement="Condition 3, of recomputed paths: the output is nearly the sum of all paths (relative rest).",
        measure=partial(_size, of="network", column="interaction"),
        claimed=below(SMALL),
        by=("scheme",),
        floor="interaction_below_floor",
        applies=partial(has_row, scheme="recomputed", of="network"),
        control=_control("network", "interaction", 1.1 * SMALL),
    ),
    "blog_pairs_additive": _pairs(
        column="interaction",
        statement="Condition 3, of recomputed paths: two paths hardly interact in one network (mean relative "
        "interaction).",
    ),
    "blog_cross_gradients_below_own": _condition(
        statement="Condition 4: second derivatives of the loss by two heads' parameters are small beside the heads' "
        "own (mean ratio; the blog compares them with 1, which the scale of the parameters decides).",
        measure=lambda rows: rows[_other_heads(rows)].cross_gradient_relative.mean(),
        claimed=below(SMALL),
        floor="cross_gradient_below_floor",
        applies=lambda rows: bool(_other_heads(rows).any()),
        control=Control("each head beside itself", _own_for_cross),
    ),
    "blog_paths_independent": _condition(
        statement="Condition 5: outputs of two paths share little information (mean KSG estimate, nats).",
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

CAUSES = "Attention-paths blog, rank collapse"

# Measures: one seed's rows -> a number


def _least_speeding_up(rows: pd.DataFrame) -> float:
    """Decades of the relative residual that a layer removes over those that the layer before it removes; of the layer
    where this is least. 0 if a layer removes none."""
    logs = rows[rows.variant == "attention_only_no_norm"].sort_values("layer").log10_relative_residual.to_numpy()
    is_followed = len(logs) >= 3 and np.isfinite(logs).all()
    require(is_followed, "this needs attention alone, of two layers or more, whose logarithms float64 holds")
    removed = -np.diff(logs)
    return (removed[1:] / removed[:-1]).min() if removed.min() > 0 else 0.0


def _decades_between(rows: pd.DataFrame, key: str) -> float:
    logs = [log10_kept(of_value, "full") for of_value in rows_by_value(rows, key, fewest=2).values()]
    return max(logs) - min(logs)


# Controls


def _same_everywhere(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    by_value = rows_by_value(rows, key)
    first = next(iter(by_value.values()))
    return pd.concat([first.assign(**{key: value}) for value in by_value])


CAUSES_OF_COLLAPSE: dict[str, Claim] = {
    # the opposite of knob_temperature: one of the two fails
    "blog_saturation_collapses": left_along(
        key="model.temperature",
        side=+1,
        statement="Saturated softmax makes tokens alike: the lower the temperature, the less is left",
        source=f"{CAUSES}, cause 1",
    ),
    "blog_tied_collapses_sooner": of_any_weights(
        statement="Correlated queries and keys add to the collapse: with W_Q = W_K attention alone collapses sooner "
        "than with independent ones (layers, log3 of the ratio of the logarithms of what is left; the reading of "
        "'correlated' is ours).",
        source=f"{CAUSES}, cause 2",
        table="collapse",
        claimed=above(0.0),
        **between(
            *("model.tied_qk", "true", "false"),
            lambda tied, free: layers_ahead(log10_kept(tied, "full"), log10_kept(free, "full")),
        ),
    ),
    "blog_layers_feed_back": of_any_weights(
        statement="What one layer loses speeds up the loss in the next, a feedback loop: every layer of attention "
        "alone removes more decades of the relative residual than the layer before it (ratio, of the layer where it "
        "is least).",
        source=f"{CAUSES}, cause 3",
        table="collapse",
        measure=_least_speeding_up,
        claimed=above(1.0),
        sourced=True,
        by=("weights",),
        control=Control.beyond(
            "each layer removes a hundredth less than the one before",
            log10_relative_residual=lambda rows: 0.99**rows.layer - 1,
        ),
    ),
    "blog_scale_matters": of_any_weights(
        statement="The scale of the scores changes what is left: by more than a factor of ten between two temperatures "
        "of a sweep (decades; the threshold is ours).",
        source=f"{CAUSES}, cause 4",
        table="collapse",
        measure=partial(_decades_between, key="model.temperature"),
        claimed=above(1.0),
        along="model.temperature",
        exists=True,
        control=Control("as much is left at each temperature", partial(_same_everywhere, key="model.temperature")),
    ),
}

CLAIMS = CONDITIONS | CAUSES_OF_COLLAPSE
