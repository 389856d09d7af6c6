"""Claims of Dong et al. 2021 on the collapse of the residual, and of those who answered them."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pandas as pd

from rankbench.claims.claim import Claim
from rankbench.claims.dong_paths import whole_accuracy
from rankbench.tables import last_of_layer

A_TENTH = -1.0  # log10 of the share of the relative residual above which a network has not collapsed
RATE = "Dong et al. 2021, Theorem 2.3"
FIG2 = "Dong et al. 2021, sec. 4.1 and Fig. 2"
LAYERNORM = "Dong et al. 2021, sec. 3.3"
WU = "Wu et al. 2024, On the role of attention masks and LayerNorm in transformers"
VANISHED = -3.0  # log10 of the relative residual: a thousandth, taken as "converged to rank 1"

# Measures: one seed's rows -> a number


def _last(rows: pd.DataFrame, variant: str, column: str) -> float:
    mine = rows[rows.variant == variant]
    return mine[mine.layer == mine.layer.max()][column].mean()


def _attention_from_cubic(rows: pd.DataFrame) -> float:
    return abs(_last(rows, "attention_only_no_norm", "growth_exponent") - 3)


def _mlp_from_cubic(rows: pd.DataFrame) -> float:
    return abs(_last(rows, "no_skip", "growth_exponent") - 3)


def _above_bound(rows: pd.DataFrame) -> float:
    bounded = rows[(rows.variant == "attention_only_no_norm") & rows.log10_bound.notna()]
    return (bounded.log10_residual - bounded.log10_bound).max()


def _mlp_over_attention(rows: pd.DataFrame) -> float:
    return _last(rows, "no_skip", "log10_residual") / _last(rows, "attention_only_no_norm", "log10_residual")


def _lost_with_skips(rows: pd.DataFrame) -> float:
    mine = rows[rows.variant == "no_mlp"].set_index("layer").log10_relative_residual
    return mine[mine.index.max()] - mine[0]


def _smallest_slack(rows: pd.DataFrame) -> float:
    return rows[(rows.bound == "theorem") & rows.covered & (rows.layer > 0)].slack_min.min()


def _fall_without_contraction(rows: pd.DataFrame) -> float:
    """Decades that the residual of attention alone changes by, where the bound contracts nowhere at the first layer."""
    mine = rows[(rows.bound == "theorem") & rows.source.str.startswith("Theorem")].sort_values("layer")
    if mine.empty or mine[mine.layer == 1].contractive.iloc[0] > 0:
        return float("nan")
    return mine.log10_measured.iloc[-1] - mine.log10_measured.iloc[0]


def _largest_change_of_residual(rows: pd.DataFrame) -> float:
    states = rows[(rows.weights == "initialised") & (rows.variant == "full") & (rows.sublayer != "weights")]
    start = states[states.layer == 0].residual.iloc[0]
    return (states.residual / start - 1).abs().max()


def _log10_left(rows: pd.DataFrame, variant: str) -> float:
    """log10 of the relative residual behind the last layer; what rounding hides counts as at the noise floor."""
    states = rows[(rows.variant == variant) & (rows.sublayer != "weights") & (rows.layer == rows.layer.max())]
    return np.log10(max(states.relative_residual.iloc[0], np.finfo(states["dtype"].iloc[0]).eps))


def _left_with_norms(rows: pd.DataFrame) -> float:
    return _log10_left(rows, "attention_only")


def _left_without_norms(rows: pd.DataFrame) -> float:
    return _log10_left(rows, "attention_only_no_norm")


def _left_with_over_without(rows: pd.DataFrame) -> float:
    return _left_with_norms(rows) - _left_without_norms(rows)


def log10_kept(rows: pd.DataFrame, variant: str) -> float:
    """log10 of the relative residual behind the last layer over that of the embedding, of one kind of weights; what
    rounding hides counts as at the noise floor."""
    states = last_of_layer(rows[rows.variant == variant])
    first, last = states[states.layer == 0].iloc[0], states[states.layer == states.layer.max()].iloc[0]
    return np.log10(max(last.relative_residual, np.finfo(last["dtype"]).eps) / first.relative_residual)


def _kept_without_skips(rows: pd.DataFrame) -> float:
    return max(log10_kept(rows, "no_skip"), log10_kept(rows, "attention_only"))


def _kept_with_skips(rows: pd.DataFrame) -> float:
    whole, without = (rows[rows.variant == name].relative_residual.dropna() for name in ("full", "no_skip"))
    if np.array_equal(whole, without):  # there was no skip to take out
        return float("nan")
    return min(log10_kept(rows, "full"), log10_kept(rows, "no_mlp"))


def _kept_by_mlps(rows: pd.DataFrame) -> float:
    """Decades of the relative residual behind the last layer, below rounding too."""
    by_variant = rows.pivot(index="layer", columns="variant", values="log10_relative_residual")
    if by_variant.no_skip.equals(by_variant.attention_only):  # there was no MLP to take out
        return float("nan")
    return by_variant.no_skip.iloc[-1] - by_variant.attention_only.iloc[-1]


def _changed_by_training(rows: pd.DataFrame) -> float:
    kept = {
        kind: [log10_kept(mine, variant) for variant in mine.variant.unique()] for kind, mine in rows.groupby("weights")
    }
    return np.abs(np.subtract(kept["trained"], kept["initialised"])).max()


def _rate(statement: str, source: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim on the residual below floating point, judged for trained and initialised weights by themselves."""
    return Claim(statement, source, "collapse", measure, side, line, by=("weights",), learned=None)


def _normed(statement: str, source: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim on attention alone with and without LayerNorm."""
    return Claim(statement, source, "residual", measure, side, line, by=("weights",), learned=None)


def _fig2(statement: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim of Fig. 2, judged for trained and initialised weights by themselves."""
    return Claim(statement, FIG2, "residual", measure, side, line, by=("weights",), learned=None)


DONG_COLLAPSE: dict[str, Claim] = {
    "dong_fig2_learns": Claim(
        "The network learns to sort (accuracy above .95), and so tells of trained networks.",
        *(FIG2, "residual", whole_accuracy, +1, 0.95),
        learned=None,
    ),
    "dong_fig2_collapses": _fig2(
        "Without skips, with MLPs or without, less than a tenth of the relative residual is left (log10, last layer).",
        *(_kept_without_skips, -1, A_TENTH),
    ),
    "dong_fig2_skips": _fig2(
        "With skips, with MLPs or without, more than a tenth of the relative residual is left (log10, last layer).",
        *(_kept_with_skips, +1, A_TENTH),
    ),
    "dong_fig2_mlps_slow": _rate(
        "Without skips MLPs slow the collapse down (log10 of what is left with them over that without, last layer).",
        *(FIG2, _kept_by_mlps, +1, 0.0),
    ),
    "dong_fig2_trained_alike": Claim(
        "What is left is alike before and after training (largest difference in decades over the variants, below 1).",
        *(FIG2, "residual", _changed_by_training, -1, 1.0),
    ),
    "dong_thm_rate_cubic": _rate(
        "Attention alone cubes the residual: at the last layer its logarithm has tripled (growth exponent 3 +- .1).",
        *(RATE, _attention_from_cubic, -1, 0.1),
    ),
    "dong_thm_rate_bound": dataclasses.replace(
        _rate(
            "The residual of attention alone stays below the theorem's bound (log10 of their ratio, the largest).",
            *(RATE, _above_bound, -1, 0.0),
        ),
        exact=True,
    ),
    "dong_thm_rate_mlp_cubic": _rate(
        "With MLPs and without skips the decay is still cubic (growth exponent 3 +- .1 at the last layer).",
        *("Dong et al. 2021, Corollary 3.2", _mlp_from_cubic, -1, 0.1),
    ),
    "dong_thm_rate_mlp_slows": _rate(
        "MLPs slow the collapse down (log residual with them over that without, at the last layer).",
        *("Dong et al. 2021, sec. 3.2", _mlp_over_attention, -1, 1.0),
    ),
    "dong_thm_rate_skips": _rate(
        "Skips prevent the collapse: more than a tenth of the relative residual is left (log10 of that share).",
        *("Dong et al. 2021, sec. 3.1", _lost_with_skips, +1, -1.0),
    ),
    "dong_bound_holds": Claim(
        "The residual is below the bound of Theorem 2.2 or 2.3, Corollary 3.1 or 3.2 (smallest slack in decades).",
        *("Dong et al. 2021, Theorem 2.3, Corollaries 3.1 and 3.2", "bounds", _smallest_slack, +1, 0.0),
        by=("weights",),
        learned=None,
        exact=True,
    ),
    "dong_collapse_beyond_bound": Claim(
        "Attention alone collapses also where the bound does not fall (change of the residual in decades, below -3).",
        *("Dong et al. 2021, sec. 2.3", "bounds", _fall_without_contraction, -1, VANISHED),
        by=("weights",),
        learned=None,
    ),
    "dong_claim31": Claim(
        "With skips and W_V = 0 the residual is the same at every depth (largest relative change).",
        *("Dong et al. 2021, Claim 3.1", "residual", _largest_change_of_residual, -1, 1e-12),
        learned=None,
        exact=True,
    ),
    "dong_layernorm_collapses": _normed(
        "Attention alone collapses with LayerNorm (log10 of the relative residual behind the last layer, below -3).",
        *(LAYERNORM, _left_with_norms, -1, VANISHED),
    ),
    "dong_layernorm_plays_no_role": _normed(
        "With LayerNorm the relative residual is less than ten times that without (log10 of the ratio, last layer).",
        *(LAYERNORM, _left_with_over_without, -1, 1.0),
    ),
    "wu_layernorm_keeps_rank": _normed(
        "With LayerNorm, for some value matrices, attention alone keeps its residual (log10, last layer, above -3).",
        *(WU, _left_with_norms, +1, VANISHED),
    ),
    "wu_masked_attention_collapses": _normed(
        "Without LayerNorm attention alone collapses under this mask in this depth (log10, last layer, below -3).",
        *(WU, _left_without_norms, -1, VANISHED),
    ),
}
