"""Claims of later papers on knobs that change how fast tokens become one, each a hypothesis, as tests on the tables."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from rankbench.claims.claim import Claim
from rankbench.claims.dong_collapse import A_TENTH, VANISHED, log10_kept
from rankbench.tables import last_of_layer

HALF = 0.5  # of a rank or an entropy: what is above it counts as kept

# Measures: one seed's rows -> a number


def _kept(rows: pd.DataFrame) -> float:
    return log10_kept(rows, "full")


def _share_of_first(rows: pd.DataFrame, metric: str) -> float:
    """A metric of the state behind the last layer, over that of the embedding."""
    states = last_of_layer(rows)
    return states[states.layer == states.layer.max()][metric].iloc[0] / states[states.layer == 0][metric].iloc[0]


def _rank_kept(rows: pd.DataFrame) -> float:
    return _share_of_first(rows, "effective_rank")


def _rank_of_residual_kept(rows: pd.DataFrame) -> float:
    return _share_of_first(rows, "effective_rank_centred")


def _entropy_kept(rows: pd.DataFrame) -> float:
    """Entropy of attention at the last step over that at the first, mean over heads, in the layer that loses most."""
    by_layer = rows[rows.sublayer == "weights"].groupby(["layer", "step"]).attention_entropy.mean().unstack()
    return (by_layer.iloc[:, -1] / by_layer.iloc[:, 0]).min()


def _least_kept_in_training(rows: pd.DataFrame) -> float:
    """log10_kept of the whole network, at the step at which it is smallest."""
    states = pd.concat([last_of_layer(one) for _, one in rows.groupby("step")])
    by_step = states.pivot(index="step", columns="layer", values="relative_residual")
    return np.log10(by_step.iloc[:, -1] / by_step.iloc[:, 0]).min()


def _fresh(statement: str, source: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim on fresh networks, judged at each value of the knob."""
    return Claim(statement, source, "residual", measure, side, line, learned=None)


def _trained(statement: str, source: str, measure: Callable[[pd.DataFrame], float], line: float) -> Claim:
    """A claim on what happens while a network trains, whether or not it learns its task."""
    return Claim(statement, source, "dynamics", measure, +1, line, learned=None)


LEFT = "more than a tenth of the relative residual is left behind the last layer (log10)."

KNOBS: dict[str, Claim] = {
    "knob_residual_scale": _fresh(
        f"With branches scaled down, by 1/sqrt(layers) at least, {LEFT}",
        *("Noci et al. 2022, Signal propagation in transformers", _kept, +1, A_TENTH),
    ),
    "knob_lambda_skip": _fresh(
        f"With a skip that is strong enough {LEFT}",
        *("Joseph et al. 2024, Lambda-skip connections", _kept, +1, A_TENTH),
    ),
    "knob_temperature": _fresh(
        f"At a temperature that is low enough {LEFT}",
        *("Giorlandino and Goldt 2025, Two failure modes of deep transformers", _kept, +1, A_TENTH),
    ),
    "knob_mean_removal": _fresh(
        f"With the mean removed from attention {LEFT}",
        *("Ali, Galanti and Wolf 2023, Centered self-attention layers", _kept, +1, A_TENTH),
    ),
    "knob_mean_removal_rank": _fresh(
        "With the mean removed from attention more than half of the tokens' effective rank is left.",
        *("Ali, Galanti and Wolf 2023, Centered self-attention layers", _rank_kept, +1, HALF),
    ),
    "knob_identity_mix": _fresh(
        f"Without skips, with enough of the identity in attention, {LEFT}",
        *("He et al. 2023, Deep transformers without shortcuts", _kept, +1, A_TENTH),
    ),
    "knob_uniform_mix": _fresh(
        "Attention, a low-pass filter, makes tokens one, here with skips: less than a thousandth is left (log10).",
        *("Wang et al. 2022, Anti-oversmoothing in deep vision transformers", _kept, -1, VANISHED),
    ),
    "knob_orthogonal_values": _fresh(
        "With orthogonal value maps more than half of the residual's effective rank is left behind the last layer.",
        *("Saxe et al. 2014, Exact solutions to the nonlinear dynamics of learning", _rank_of_residual_kept, +1, HALF),
    ),
    "knob_sigma_reparam": _trained(
        "No layer loses more than half of the entropy of its attention in training.",
        *("Zhai et al. 2023, Preventing attention entropy collapse", _entropy_kept, HALF),
    ),
    "knob_dynamics": _trained(
        "With skips more than a tenth of the relative residual is left at every moment of training (log10).",
        *("Dong et al. 2021, sec. 4.1", _least_kept_in_training, A_TENTH),
    ),
}
