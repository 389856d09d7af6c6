"""Sentences that the papers say in passing, as tests on tables that other claims use as well."""

from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from rankbench.claims.claim import AtMost, Claim, Control, NotMeasurable, above, below
from rankbench.claims.dong_collapse import layers_ahead, log10_kept
from rankbench.claims.dong_paths import DONG_PATHS, FIG3, every_seed_goes_round
from rankbench.claims.knobs import kept_measured
from rankbench.claims.sweeps import log10_of, rows_at, rows_by_value, with_exchanged

CAUSES = "Attention-paths blog, rank collapse"
SKIP, ALONE = "san_skip", "san"  # model of dong_fig3_circle: attention with a skip, and alone

# Measures: one seed's rows -> a number


def _ahead_of_softmax(rows: pd.DataFrame, attention: str) -> float:
    """Layers by which the collapse under this attention is ahead of that under the softmax of dot products."""
    logs = [log10_of(kept_measured(rows_at(rows, "model.attention", name))) for name in (attention, "dot")]
    if any(isinstance(log, AtMost) for log in logs):
        raise NotMeasurable("rounding hides what is left")
    return layers_ahead(*logs)


def _ahead_if_tied(rows: pd.DataFrame) -> float:
    return layers_ahead(*(log10_kept(rows_at(rows, "model.tied_qk", tied), "full") for tied in ("true", "false")))


def _least_speeding_up(rows: pd.DataFrame) -> float:
    """Decades of the relative residual that a layer removes over those that the layer before it removes; of the layer
    where this is least. 0 if a layer removes none."""
    logs = rows[rows.variant == "attention_only_no_norm"].sort_values("layer").log10_relative_residual.to_numpy()
    if len(logs) < 3 or not np.isfinite(logs).all():
        raise NotMeasurable("this needs attention alone, of two layers or more, whose logarithms float64 holds")
    removed = -np.diff(logs)
    return (removed[1:] / removed[:-1]).min() if removed.min() > 0 else 0.0


def _decades_between(rows: pd.DataFrame, key: str) -> float:
    """Decades between the largest and the smallest share that is left in a sweep."""
    logs = [log10_kept(of_value, "full") for of_value in rows_by_value(rows, key).values()]
    if len(logs) < 2:
        raise NotMeasurable(f"this needs a sweep over {key}")
    return max(logs) - min(logs)


def _moves_less(rows: pd.DataFrame) -> float:
    with_skip, alone = (_way(rows_at(rows, "model", name)) for name in (SKIP, ALONE))
    return float(with_skip < alone)


def _way(rows: pd.DataFrame) -> float:
    """Length of the way of both points under the trained layer, for each step that it ran."""
    trained = rows[rows.weights == "trained"].sort_values("step")
    moved = trained.groupby("token")[["x", "y"]].diff()
    return np.hypot(moved.x, moved.y).sum() / trained.step.max()


# Controls


def _same_everywhere(rows: pd.DataFrame, key: str) -> pd.DataFrame:
    by_value = rows_by_value(rows, key)
    first = next(iter(by_value.values()))
    return pd.concat([first.assign(**{key: value}) for value in by_value])


def _xformer(attention: str, side: int, statement: str) -> Claim:
    return Claim(
        statement=f"{statement} (layers by which it is ahead of the softmax: log3 of the ratio of the logarithms of "
        "what is left of the embedding's relative residual).",
        source="Dong et al. 2021, Remark 1, expected there",
        table="residual",
        measure=partial(_ahead_of_softmax, attention=attention),
        claimed=(above if side > 0 else below)(0.0),
        along="model.attention",
        why_untrained=None,
        control=with_exchanged("model.attention", attention, "dot"),
    )


REMARKS: dict[str, Claim] = {
    "dong_low_rank_collapses_faster": _xformer(
        "kernel", +1, "Attention whose weights have a low rank, here of kernels, collapses even faster"
    ),
    "dong_sparse_collapses_slower": _xformer(
        "sparse", -1, "Attention to random parts of the keys, here a quarter of them, collapses more slowly"
    ),
    "dong_fig4_consistent": replace(
        DONG_PATHS["dong_fig4_falls_with_length"],
        statement="Whatever the depth, the number of heads, the alphabet, the length and the width, accuracy falls "
        "with path length (as in dong_fig4_falls_with_length).",
        since="",
    ),
    "dong_fig3_skips_slow_points": Claim(
        statement="Skips slow the points down: run freely, the points of attention with a skip go a shorter way in a "
        "step than those of attention alone (share of seeds; the line, half of them, is ours).",
        source=FIG3,
        table="rollout",
        measure=_moves_less,
        claimed=above(0.5),
        scale="rate",
        either_way=(0.0, 1.0),
        along="model",
        applies=lambda rows: {SKIP, ALONE} <= set(rows.model),
        why_untrained=lambda rows: every_seed_goes_round(rows[rows.model.isin([SKIP, ALONE])]),
        control=with_exchanged("model", SKIP, ALONE),
    ),
    "blog_tied_collapses_sooner": Claim(
        statement="Correlated queries and keys add to the collapse: with W_Q = W_K attention alone collapses sooner "
        "than with independent ones (layers, log3 of the ratio of the logarithms of what is left; the reading of "
        "'correlated' is ours).",
        source=f"{CAUSES}, cause 2",
        table="collapse",
        measure=_ahead_if_tied,
        claimed=above(0.0),
        along="model.tied_qk",
        why_untrained=None,
        control=with_exchanged("model.tied_qk", "true", "false"),
    ),
    "blog_layers_feed_back": Claim(
        statement="What one layer loses speeds up the loss in the next, a feedback loop: every layer of attention "
        "alone removes more decades of the relative residual than the layer before it (ratio, of the layer where it "
        "is least).",
        source=f"{CAUSES}, cause 3",
        table="collapse",
        measure=_least_speeding_up,
        claimed=above(1.0),
        sourced=True,
        by=("weights",),
        why_untrained=None,
        control=Control.beyond(
            "each layer removes a hundredth less than the one before",
            log10_relative_residual=lambda rows: 0.99**rows.layer - 1,
        ),
    ),
    "blog_scale_matters": Claim(
        statement="The scale of the scores changes what is left: by more than a factor of ten between two temperatures "
        "of a sweep (decades; the line is ours).",
        source=f"{CAUSES}, cause 4",
        table="collapse",
        measure=partial(_decades_between, key="model.temperature"),
        claimed=above(1.0),
        along="model.temperature",
        exists=True,
        why_untrained=None,
        control=Control("as much is left at each temperature", partial(_same_everywhere, key="model.temperature")),
    ),
}
