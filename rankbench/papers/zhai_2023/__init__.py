"""The least entropy that a row of attention can have (Zhai et al. 2023, Theorem 3.1; rankbench.measures.entropy_bound).

Control: scores whose largest entry, instead of their norm, is sigma. They can have gaps of 2 sigma.

Shapes: B start of the search, T score.
"""

import math

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.judging.claim import Claim, Control, above, exact_check, of_any_weights, require
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import HALF, keeps
from rankbench.judging.sweeps import at_value, between
from rankbench.measures.entropy_bound import least_entropy
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

SIGMAS = [0.5, 1.0, 2.0, 3.0, 4.0, 6.0]
STEPS = 300


def predicted(tokens: int, **_: int) -> Predicted:
    """The least entropy by sigma."""
    yield from ((f"T = {tokens}", sigma, least_entropy(tokens, sigma)) for sigma in SIGMAS)


def simulated(generator: torch.Generator, tokens: int, samples: int) -> Measured:
    """The least entropy that a search finds from `samples` random starts."""
    start_BT = torch.randn(samples, tokens, dtype=torch.float64, generator=generator)
    for sigma in SIGMAS:
        for setup, order in ((CLAIMED, 2), (CONTROL, math.inf)):
            yield setup, f"T = {tokens}", sigma, _searched(start_BT, sigma, order)


def _searched(start_BT: Tensor, sigma: float, order: float) -> float:
    """Least entropy after projected descent along its gradient, -p (log p + entropy), in steps of sigma / 2."""
    z_BT, best = start_BT, math.inf
    for _ in range(STEPS):
        z_BT = z_BT * (sigma / torch.linalg.vector_norm(z_BT, order, dim=1, keepdim=True))
        logs_BT = z_BT.log_softmax(1)
        entropy_B1 = -(logs_BT.exp() * logs_BT).sum(1, keepdim=True)
        ascent_BT = logs_BT.exp() * (logs_BT + entropy_B1)
        z_BT = z_BT + 0.5 * sigma * ascent_BT / ascent_BT.norm(dim=1, keepdim=True)
        best = min(best, entropy_B1.min().item())
    return best


PAPERS = {"Zhai et al. 2023": "Preventing attention entropy collapse"}
LAWS = {
    "entropy_bound": Law(
        sizes={"tokens": 8, "samples": 20},
        predicted=predicted,
        simulated=simulated,
        x_label="norm sigma of the scores",
        value_label="least entropy of a row (nats)",
        log_value=True,
    )
}
ZHAI = "Zhai et al. 2023, Preventing attention entropy collapse, Theorem 3.1"


def _log10_scores_bound(rows: pd.DataFrame) -> float:
    return np.log10(rows[rows.weights == "trained"].score_norm_bound).mean()


def _entropy_kept(rows: pd.DataFrame) -> float:
    require("attention_entropy" in rows, "the table has no attention_entropy; add it to analysis.dynamics.metrics")
    weights = rows[rows.sublayer == "weights"]
    by_layer = weights.groupby(["layer", "step"]).attention_entropy.mean().unstack()
    return (by_layer.iloc[:, -1] / by_layer.iloc[:, 0]).min(skipna=False)


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
    "zhai_reparam_lowers_scores": of_any_weights(
        statement="With weights over their spectral norms trained heads have a smaller bound on their scores, and so a "
        "higher one on their entropy (log10 of the bound without them over that with them, mean over heads).",
        source=ZHAI,
        table="attention",
        claimed=above(0.0),
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
    # threshold: the descent ends where its steps turn in place, at rounding
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
