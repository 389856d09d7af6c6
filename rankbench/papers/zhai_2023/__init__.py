"""Claims of Zhai et al. 2023 on the entropy of attention and the spectral norms of its weights."""

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, above, exact_check
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import HALF, keeps
from rankbench.judging.sweeps import at_value, between
from rankbench.papers.zhai_2023.entropy_bound import LAW

PAPERS = {"Zhai et al. 2023": "Preventing attention entropy collapse"}
LAWS = {"entropy_bound": LAW}
ZHAI = "Zhai et al. 2023, Preventing attention entropy collapse, Theorem 3.1"


def _log10_scores_bound(rows: pd.DataFrame) -> float:
    """log10 of the bound on trained heads' scores, mean over heads."""
    return np.log10(rows[rows.weights == "trained"].score_norm_bound).mean()


def _entropy_kept(rows: pd.DataFrame) -> float:
    """Attention entropy (mean over heads) at the last step over that at the first, in the layer that loses most."""
    weights = rows[rows.sublayer == "weights"]
    by_layer = weights.groupby(["layer", "step"]).attention_entropy.mean().unstack()
    return (by_layer.iloc[:, -1] / by_layer.iloc[:, 0]).min()


CLAIMS: dict[str, Claim] = {
    "zhai_heads_above_bound": exact_check(
        statement="No row of attention has less entropy than the bound from the spectral norms of the head's maps and "
        "of its tokens (least entropy less bound, in nats, the smallest over heads).",
        source=ZHAI,
        table="attention",
        measure=lambda rows: (rows.least_entropy_nats - rows.entropy_bound_nats).min(),
        claimed=above(0.0),
        control=Control.beyond("the mean entropy of the head as its bound", entropy_bound_nats="entropy_nats"),
    ),
    "zhai_reparam_lowers_scores": Claim(
        statement="With weights over their spectral norms trained heads have a smaller bound on their scores, and so a "
        "higher one on their entropy (log10 of the bound without them over that with them, mean over heads).",
        source=ZHAI,
        table="attention",
        claimed=above(0.0),
        why_untrained=None,
        **between(
            *("model.weight_norm", "sigma", "none"),
            lambda over_norms, plain: _log10_scores_bound(plain) - _log10_scores_bound(over_norms),
        ),
    ),
    "knob_sigma_reparam": keeps(
        statement="With weights over their spectral norms no layer loses more than half of its attention's entropy in "
        "training, and without them one does (entropy at the last step over that at the first, the layer that loses "
        "most).",
        source="Zhai et al. 2023, Preventing attention entropy collapse",
        table="dynamics",
        claimed=above(HALF),
        **at_value("model.weight_norm", "sigma", "none", _entropy_kept),
    ),
    # the line: the descent ends where its steps turn in place, at rounding
    "law_entropy_bound": agrees(
        law="entropy_bound",
        line=1e-9,
        statement="Among scores of norm sigma the least entropy that a search finds is the bound of the theorem",
        source="Zhai et al. 2023, Theorem 3.1",
        control="scores whose largest entry, not whose norm, is sigma",
        relative=True,
        exact=True,
    ),
}
