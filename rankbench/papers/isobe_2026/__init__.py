"""Claims after Isobe, Inoue and Imaizumi 2026: training lets tokens leave their cluster before the last layer.

The source analyses a mean-field limit with noise, in which a regularised MLP alone is trained. Here whole language
models are trained, so the claims are on networks outside of its setting. The relative residual is the distance
of the tokens from all being equal, 0 where they have met.
"""

from functools import partial

import pandas as pd

from rankbench.judging.claim import BEFORE_TRAINING, Claim, Control, above, below, require, untrained_by_loss
from rankbench.runs.tables import last_of_layer

PAPERS = {
    "Isobe, Inoue and Imaizumi 2026": "Training-induced escape from token clustering in a mean-field formulation of "
    "transformers"
}
ISOBE = "Isobe, Inoue and Imaizumi 2026, Training-induced escape from token clustering; measured here"
TENTH = 1.1  # factor from which the relative residual counts as another one


def _by_layer(rows: pd.DataFrame, weights: str) -> pd.Series:
    """Relative residual of the state after each layer, the embedding first; table `residual`."""
    states = last_of_layer(rows[(rows.variant == "full") & (rows.weights == weights)])
    require(not states.empty, f"the table has no {weights} weights of the variant full")
    return states.set_index("layer").relative_residual.sort_index()


def _valley(rows: pd.DataFrame) -> float:
    residual = _by_layer(rows, "trained")
    return min(residual.iloc[0], residual.iloc[-1]) / residual.min()


def _last_over_smallest(rows: pd.DataFrame) -> float:
    residual = _by_layer(rows, "initialised")
    return residual.iloc[-1] / residual.min()


_of_residual = partial(Claim, source=ISOBE, table="residual", scale="positive", floor="below_floor", since="2026-11-27")

CLAIMS: dict[str, Claim] = {
    "isobe_trained_escape": _of_residual(
        statement="In trained language models tokens first become alike and then differ again: the relative residual "
        "falls from the embedding on and rises again up to the last layer, each by more than a tenth (the smaller of "
        "the two ends over the smallest of all layers; threshold: ours).",
        measure=_valley,
        claimed=above(TENTH),
        why_untrained=untrained_by_loss,
        control=BEFORE_TRAINING,
    ),
    "isobe_fresh_stay": _of_residual(
        statement="Before training tokens do not leave the cluster: the relative residual after the last layer is the "
        "smallest of all layers, up to a tenth (last over smallest; threshold: ours).",
        measure=_last_over_smallest,
        claimed=below(TENTH),
        why_untrained=None,
        control=Control(
            "the same layers in reverse order", lambda rows: rows.assign(layer=rows.layer.max() - rows.layer)
        ),
    ),
}
