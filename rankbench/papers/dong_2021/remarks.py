"""Sentences of Dong et al. 2021 said in passing, as tests on tables that other claims use as well."""

from dataclasses import replace

import numpy as np
import pandas as pd

from rankbench.judging.claim import AtMost, Claim, above, below, of_any_weights, require
from rankbench.judging.residual_left import kept_measured, layers_ahead
from rankbench.judging.sweeps import between, log10_of
from rankbench.papers.dong_2021.paths import FIG3, PATHS, every_seed_goes_round

SKIP, ALONE = "san_skip", "san"  # model of dong_fig3_circle: attention with a skip, and alone

# Measures: one seed's rows -> a number


def _ahead(rows: pd.DataFrame, others: pd.DataFrame) -> float:
    logs = [log10_of(kept_measured(of_one)) for of_one in (rows, others)]
    require(not any(isinstance(log, AtMost) for log in logs), "rounding hides what is left")
    return layers_ahead(*logs)


def _way(rows: pd.DataFrame) -> float:
    """Length of the way of both points under the trained layer, for each step that it ran."""
    trained = rows[rows.weights == "trained"].sort_values("step")
    moved = trained.groupby("token")[["x", "y"]].diff()
    return np.hypot(moved.x, moved.y).sum() / trained.step.max()


def _xformer(attention: str, side: int, statement: str) -> Claim:
    return of_any_weights(
        statement=f"{statement} (layers by which it is ahead of the softmax: log3 of the ratio of the logarithms of "
        "what is left of the embedding's relative residual).",
        source="Dong et al. 2021, Remark 1, expected there",
        table="residual",
        claimed=(above if side > 0 else below)(0.0),
        **between("model.attention", attention, "dot", _ahead),
    )


REMARKS: dict[str, Claim] = {
    "dong_low_rank_collapses_faster": _xformer(
        "kernel", +1, "Attention whose weights have a low rank, here of kernels, collapses even faster"
    ),
    "dong_sparse_collapses_slower": _xformer(
        "sparse", -1, "Attention to random parts of the keys, here a quarter of them, collapses more slowly"
    ),
    "dong_fig4_consistent": replace(
        PATHS["dong_fig4_falls_with_length"],
        statement="Whatever the depth, the number of heads, the alphabet, the length and the width, accuracy falls "
        "with path length (as in dong_fig4_falls_with_length).",
    ),
    "dong_fig3_skips_slow_points": Claim(
        statement="Skips slow the points down: run freely, the points of attention with a skip go a shorter way in a "
        "step than those of attention alone (share of seeds; the threshold, half of them, is ours).",
        source=FIG3,
        table="rollout",
        claimed=above(0.5),
        scale="rate",
        either_way=(0.0, 1.0),
        applies=lambda rows: {SKIP, ALONE} <= set(rows.model),
        why_untrained=lambda rows: every_seed_goes_round(rows[rows.model.isin([SKIP, ALONE])]),
        **between("model", SKIP, ALONE, lambda with_skip, alone: float(_way(with_skip) < _way(alone))),
    ),
}
