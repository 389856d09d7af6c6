"""Claims on heads and their attention weights, also compared with the laws of random ones; table `attention`."""

import numpy as np
import pandas as pd

from rankbench.claims.claim import Claim, Control, above, exact_check
from rankbench.claims.sweeps import rows_at, with_exchanged

ZHAI = "Zhai et al. 2023, Preventing attention entropy collapse, Theorem 3.1"


def _trained_mean(rows: pd.DataFrame, column: str) -> float:
    return rows[rows.weights == "trained"][column].mean()


def _log10_scores_lowered(rows: pd.DataFrame) -> float:
    """log10 of the bound on trained heads' scores with plain weights over that with weights over their norms."""
    rows = rows.assign(log10_bound=np.log10(rows.score_norm_bound))
    plain, over_norms = (
        _trained_mean(rows_at(rows, "model.weight_norm", value), "log10_bound") for value in ("none", "sigma")
    )
    return plain - over_norms


HEADS: dict[str, Claim] = {
    "zhai_heads_above_bound": exact_check(
        statement="No row of attention has less entropy than the bound from the spectral norms of the head's maps and "
        "of its tokens (least entropy less bound, in nats, the smallest over heads).",
        source=ZHAI,
        table="attention",
        measure=lambda rows: (rows.least_entropy_nats - rows.entropy_bound_nats).min(),
        claimed=above(0.0),
        control=Control.beyond(
            "the mean entropy of the head as its bound", entropy_bound_nats=lambda rows: rows.entropy_nats
        ),
    ),
    "zhai_reparam_lowers_scores": Claim(
        statement="With weights over their spectral norms trained heads have a smaller bound on their scores, and so a "
        "higher one on their entropy (log10 of the bound without them over that with them, mean over heads).",
        source=ZHAI,
        table="attention",
        measure=_log10_scores_lowered,
        claimed=above(0.0),
        along="model.weight_norm",
        why_untrained=None,
        control=with_exchanged("model.weight_norm", "sigma", "none"),
    ),
    "law_gap_of_heads": Claim(
        statement="Heads that have learned are no random Markov matrices: their second singular value is above that of "
        "independent weights of the same variance (ratio, mean over heads; above 1.5, which is our line).",
        source="Nait Saada et al. 2025, Mind the gap; how far heads are from its law is measured here",
        table="attention",
        measure=lambda rows: _trained_mean(rows, "singular_over_law"),
        claimed=above(1.5),
        why_untrained=None,
        scale="positive",
        control=Control.beyond(
            "the same weights, those of each row in a random order",
            singular_over_law=lambda rows: rows.shuffled_over_law,
        ),
    ),
}
