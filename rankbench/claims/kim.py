"""Claims of Kim et al. 2021, The Lipschitz constant of self-attention."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import stats

from rankbench.claims.claim import Claim

LEFT = -3.0  # log10 of what the iteration leaves of the error it began with: a thousandth, taken as "inverted"

# Measures: one seed's rows -> a number


def _values(rows: pd.DataFrame, p: float, quantity: str) -> pd.Series:
    """By tokens, of the best start at the end of the ascent."""
    mine = rows[(rows.p == p) & (rows.quantity == quantity) & (rows.start <= 1)]
    return mine[mine.step == mine.step.max()].set_index("tokens").value.sort_index()


def _slope_off(rows: pd.DataFrame) -> float:
    """How far the slope of the best lower bound against log N is from the upper bound's, relative."""
    lower, upper = _values(rows, np.inf, "ascent"), _values(rows, np.inf, "theorem")
    slope = [stats.linregress(np.log(values.index), values).slope for values in (lower, upper)]
    return abs(slope[0] / slope[1] - 1)


def _short_of_exact(rows: pd.DataFrame) -> float:
    """Largest over odd N of the exact constant less the best lower bound."""
    exact = rows[(rows.kind == "exact") & (rows.p == np.inf)].set_index("tokens").value
    best = rows[rows.quantity.isin(["ascent", "ascent_mirrored"])].groupby("tokens").value.max()
    return (exact - best[exact.index]).max()


def _smallest_slack(rows: pd.DataFrame) -> float:
    """Smallest bound over lower bound of the same layer, tokens and norm; only of bounds on all inputs."""
    axes = ["weights", "part", "layer", "tokens", "p"]
    bounds = rows[(rows.kind == "bound") & rows.quantity.isin(["theorem", "one_dimension"])]
    upper = bounds.groupby(axes).value.min()
    lower = rows[rows.kind == "lower_bound"].groupby(axes).value.max()
    return (upper / lower).dropna().min()


def _growth_exponent_2(rows: pd.DataFrame) -> float:
    """Exponent of N in the best lower bound for p = 2."""
    lower = _values(rows, 2, "ascent")
    return stats.linregress(np.log(lower.index), np.log(lower)).slope


def _bound_grown(rows: pd.DataFrame) -> float:
    """log10 of the bound for p = inf at the last training step over the one at the first; of the layer with least."""
    bounds = rows[np.isfinite(rows.lipschitz_inf)].set_index("step").sort_index().groupby("layer").lipschitz_inf
    return np.log10(bounds.last() / bounds.first()).min()


def _second_half(rows: pd.DataFrame) -> float:
    """The norm that the best start reaches over what it had at half the steps; of the layer where it grows least."""
    path = rows[(rows.quantity == "ascent") & (rows.p == np.inf) & (rows.start == 1)]
    if "trained" in set(path.weights):
        path = path[path.weights == "trained"]
    half = path[path.step <= path.step.max() / 2]
    axes = ["weights", "layer", "tokens"]
    return (path.groupby(axes).value.max() / half.groupby(axes).value.max()).min()


def _left_of_error(rows: pd.DataFrame, attention: str) -> float:
    """log10 of the largest error at the last iteration over that before the first; 1e-15 of it is rounding. Of a whole
    network's inverse, which has no first: over the largest entry of what is looked for."""
    mine = rows[rows.attention == attention]
    if "trained" in set(mine.weights):
        mine = mine[mine.weights == "trained"]
    if mine.empty:
        return float("nan")
    left = mine.relative_error.max()
    if (mine.part == "attention").all():
        last = mine[mine.iteration == mine.iteration.max()]
        left = last.error.max() / mine[mine.iteration == 0].error.max()
    return float(np.log10(max(left, 1e-15)))


def _dot_left(rows: pd.DataFrame) -> float:
    return _left_of_error(rows, "dot")


def _l2_left(rows: pd.DataFrame) -> float:
    return _left_of_error(rows, "l2")


def _contractive_left(rows: pd.DataFrame) -> float:
    return _left_of_error(rows, "contractive_l2")


def _trained_left(rows: pd.DataFrame) -> float:
    return _left_of_error(rows, rows.attention.iloc[0])


def _output_range(rows: pd.DataFrame) -> float:
    """Standard deviation of the trained layer's outputs over that of its inputs."""
    mine = rows[rows.weights == "trained"] if "trained" in set(rows.weights) else rows
    spread = mine.groupby("of").sd.mean()
    return spread["output"] / spread["input"]


FIG2 = "Kim et al. 2021, sec. 5.1 and Fig. 2"
FIG3 = "Kim et al. 2021, sec. 5.2 and Fig. 3"
FIG7 = "Kim et al. 2021, app. K and Fig. 7"
FIG8 = "Kim et al. 2021, app. L and Fig. 8"
FIG10 = "Kim et al. 2021, app. N and Fig. 10"
THEOREM = "Kim et al. 2021, Theorem 3.2"
OURS = "rankbench, exact constant of one head of width 1"


def _fresh(statement: str, source: str, measure: Callable[[pd.DataFrame], float], side: int, line: float) -> Claim:
    """A claim that needs no network to have learned anything."""
    return Claim(statement, source, "lipschitz", measure, side, line, learned=None)


def _inverted(statement: str, source: str, measure: Callable[[pd.DataFrame], float], side: int) -> Claim:
    """A claim on the fixed-point iteration, judged at each coefficient, range of inputs and size."""
    by = ("coefficient", "inputs", "tokens", "width")
    return Claim(statement, source, "invertibility", measure, side, LEFT, by=by, learned=None)


KIM: dict[str, Claim] = {
    "kim_bound_holds": Claim(
        "No measured Jacobian norm is above the bound of Theorem 3.2 (smallest ratio of bound and lower bound).",
        *(THEOREM, "lipschitz", _smallest_slack, +1, 1.0 - 1e-9),
        learned=None,
        exact=True,
    ),
    "kim_bound_grows": Claim(
        "Training makes the bound on Lip_inf of every L2 attention grow (log10 of the last over the first).",
        *("not in the paper; Theorem 3.2", "dynamics", _bound_grown, +1, 0.0),
        learned=None,
    ),
    "kim_fig2_slope": _fresh(
        "The lower bound grows with log N like the upper bound (slopes less than a tenth apart).",
        *(FIG2, _slope_off, -1, 0.1),
    ),
    "kim_fig2_exact": _fresh(
        "At odd N the best lower bound is the exact constant 1 + 4 W0((N - 1) e^-3/2) to .001 (largest difference).",
        *(OURS, _short_of_exact, -1, 1e-3),
    ),
    "kim_fig7_log": _fresh(
        "The lower bound for p = 2 grows slower than the square root of N (exponent of N below .5).",
        *(FIG7, _growth_exponent_2, -1, 0.5),
    ),
    "kim_fig8_diverges": _fresh(
        "Under ascent ||J||_inf of dot-product attention keeps growing (last over half-way, above 1.5).",
        *(FIG8, _second_half, +1, 1.5),
    ),
    "kim_fig3_dot_not_inverted": _inverted(
        "Dot-product attention is not inverted: more than a thousandth of the error is left (log10).",
        *(FIG3, _dot_left, +1),
    ),
    "kim_fig3_l2_inverted": _inverted(
        "L2 attention is inverted for small enough c: less than a thousandth of the error is left (log10).",
        *(FIG3, _l2_left, -1),
    ),
    "kim_fig3_contractive_inverted": _inverted(
        "Contractive L2 attention is inverted: less than a thousandth of the error is left (log10).",
        *("Kim et al. 2021, sec. 4.2", _contractive_left, -1),
    ),
    "kim_fig5_inverted": _inverted(
        "Trained, the layer and (inputs=test) the network are inverted: less than a thousandth is left of the error "
        "(log10; the paper: so for contractive L2, not for dot-product attention).",
        *("Kim et al. 2021, app. J and Fig. 5", _trained_left, -1),
    ),
    "kim_fig10_keeps_range": Claim(
        "Outputs are less than twice as spread as the inputs (the paper: so for trained L2 attention, not for dot).",
        *(FIG10, "histograms", _output_range, -1, 2.0),
        by=("inputs",),
        learned=None,
    ),
}
