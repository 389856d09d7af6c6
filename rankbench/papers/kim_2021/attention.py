"""Claims of Kim et al. 2021, The Lipschitz constant of self-attention, on attention layers.

The claims on language models are in char_lm. Theorem 3.2 and the constants of one head of width 1 hold for all
weights. They are therefore checks, and so is what follows from them: a broken check means a wrong formula or ascent.
Figs. 2 and 7 follow. For p = inf the constant of that head is 1 + 4 W0((N - 1) e^-3/2) at odd N, and its slope against
log N tends to that of the bound; for p = 2 it is at most polylogarithmic in N.
"""

from functools import partial

import numpy as np
import pandas as pd
import scipy

from rankbench.judging.claim import (
    AtMost,
    Claim,
    Control,
    above,
    below,
    has_row,
    looked_up,
    require,
    untrained_by_loss,
    within,
)
from rankbench.judging.lipschitz import ASCENTS, bound_holds, of_layers, upper_of
from rankbench.judging.of_laws import agrees

INVERTED = -3.0  # log10 of the share of the initial error that is left: a thousandth counts as inverted
LEFT_BY_ROUNDING = 64 * np.finfo(float).eps  # of the largest entry: the most that rounding leaves of a vanished error
WIDER = 2.0  # "much wider" (app. N) is read as above twice the range, "remains similar" as within a factor of 2 of it
# Exponent of the number of steps above which an ascent counts as growing without bound: the norm of dot products is of
# second degree in their inputs, which steps of equal size move at a constant speed. At a bound the exponent is 0.
GROWS = 0.5
PARTS = 5  # of an ascent's steps, in each of which it must grow
LAYER = ["seed", "weights", "attention", "layer", "tokens", "width", "inputs", "coefficient"]


def _of_trained(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the trained weights if there are any, otherwise all rows."""
    trained = rows.weights == "trained"
    return rows[trained] if trained.any() else rows


# Lipschitz constants: a measure takes one seed's rows, a control's falsify the rows of all seeds


def _by_tokens(rows: pd.DataFrame, p: float, quantity: str) -> pd.Series:
    """Values of a quantity by the number of tokens; for an ascent, its best start at the last step."""
    chosen = rows[(rows.p == p) & (rows.quantity == quantity) & (rows.start <= 1)]
    values = chosen[chosen.step == chosen.step.max()].set_index("tokens").value.sort_index()
    require(len(values) >= 2, f"fewer than two numbers of tokens with {quantity} for p = {p:g}")
    return values


def _slope_off(rows: pd.DataFrame) -> float:
    curves = (_by_tokens(rows, np.inf, quantity) for quantity in ("ascent", "theorem"))
    lower, upper = (scipy.stats.linregress(np.log(values.index), values).slope for values in curves)
    return lower / upper - 1


def _exponent_2(rows: pd.DataFrame) -> float:
    lower = _by_tokens(rows, 2, "ascent")
    return scipy.stats.linregress(np.log(lower.index), np.log(lower)).slope


def _least_growth(rows: pd.DataFrame, attention: str) -> float:
    best = (rows.quantity == "ascent") & (rows.p == np.inf) & (rows.start == 1) & (rows.attention == attention)
    require(best.any(), f"no ascent of attention={attention}")
    exponents = []
    for _, path in rows[best & (rows.step > 0)].groupby(["layer", "tokens"]):
        by_step = path.groupby("step").value.max()
        ends = [by_step[by_step.index <= by_step.index.max() * part / PARTS] for part in range(1, PARTS + 1)]
        require(min(map(len, ends)) > 0, f"an ascent needs a row in each {PARTS}th of its steps")
        norms, steps = ([end.iloc[-1] for end in ends], [end.index[-1] for end in ends])
        exponents += list(np.diff(np.log(norms)) / np.diff(np.log(steps)))
    return min(exponents)


def _has_ascents_of_both(rows: pd.DataFrame) -> bool:
    """Whether there are ascents of dot products and of L2 attention, its control."""
    return all(has_row(rows, attention=kind, part="attention", quantity="ascent") for kind in ("dot", "l2"))


# Inversion


def _left(rows: pd.DataFrame, attention: str) -> float:
    """log10 of the largest error at the last iteration over the largest before the first. For the inverse of a whole
    network, which has no initial error, the error is relative to the target's largest entry."""
    rows = _of_trained(rows[rows.attention == attention])
    require(not rows.empty, f"no layer with attention={attention}")
    last, first = rows[rows.iteration == rows.iteration.max()], rows[rows.iteration == 0]
    left, rounding = np.max(last.relative_error.to_numpy()), LEFT_BY_ROUNDING
    if (rows.part == "attention").all():
        left = np.max(last.error.to_numpy()) / first.error.max()
        rounding *= (first.error / first.relative_error).max() / first.error.max()
    require(np.isfinite(left), "the iteration overflowed in float64")
    return float(np.log10(left)) if left > rounding else AtMost(np.log10(rounding))


def _leaving(rows: pd.DataFrame, share: float) -> pd.DataFrame:
    """Leave this share of the first error at the last iteration."""
    first = rows[rows.iteration == 0].groupby(LAYER).error.max()
    last = rows.iteration == rows.iteration.max()
    left = rows.error.where(~last, share * looked_up(rows, first))
    return rows.assign(error=left, relative_error=rows.relative_error.where(~last, share))


def _l2_for_dot(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.attention == "l2"].assign(attention="dot")


def _beyond_contraction(rows: pd.DataFrame) -> float:
    """log10 of the error after k iterations over c^k times the first error. The maximum over the k at which rounding
    does not hide the error."""
    rows = rows[(rows.attention == "contractive_l2") & (rows.part == "attention")]
    first = rows[rows.iteration == 0].groupby(LAYER).error.max()
    seen = rows[(rows.iteration > 0) & ~(rows.relative_error <= LEFT_BY_ROUNDING)]  # nan, an overflow, is no rounding
    require(not seen.empty, "rounding hides the error from the first iteration on")
    beyond = np.log10(seen.error / looked_up(seen, first)) - seen.iteration * np.log10(seen.coefficient)
    return beyond.max(skipna=False)


def _above_contraction(rows: pd.DataFrame) -> pd.DataFrame:
    is_first = rows.iteration == 0
    first, power = rows[is_first].groupby(LAYER).max(numeric_only=True), 1.01 * rows.coefficient**rows.iteration
    errors = {name: power * looked_up(rows, first[name]) for name in ("error", "relative_error")}
    return rows.assign(**{name: rows[name].where(is_first, errors[name]) for name in errors})


# Histograms


def _range_ratio(rows: pd.DataFrame) -> float:
    ends = _of_trained(rows).groupby("of")[["smallest", "largest"]].first()
    ranges = ends.largest - ends.smallest
    return ranges["output"] / ranges["input"]


def _range_differs(rows: pd.DataFrame) -> float:
    ratio = _range_ratio(rows)
    return max(ratio, 1 / ratio)


def _range_of_inputs(rows: pd.DataFrame, times: float) -> pd.DataFrame:
    """Set the range of the outputs to this multiple of the inputs' range."""
    axes = ["seed", "weights", "layer", "inputs"]
    ends = rows[rows.of == "input"].groupby(axes)[["smallest", "largest"]].first()
    wanted = looked_up(rows, times * (ends.largest - ends.smallest))
    output = rows.of == "output"
    return rows.assign(smallest=rows.smallest.where(~output, 0.0), largest=rows.largest.where(~output, wanted))


FIG2 = "Kim et al. 2021, sec. 5.1 and Fig. 2"
FIG3 = "Kim et al. 2021, sec. 5.2 and Fig. 3"
FIG5 = "Kim et al. 2021, app. J and Fig. 5"
FIG10 = "Kim et al. 2021, app. N and Fig. 10"

_inverted = partial(
    Claim,
    table="invertibility",
    why_untrained=None,
    by=("coefficient", "inputs", "tokens", "width"),
    floor="below_floor",
)


_entries = partial(Claim, table="histograms", why_untrained=untrained_by_loss, by=("layer", "inputs"))

ATTENTION: dict[str, Claim] = {
    "kim_bound_holds": bound_holds(
        "theorem",
        "the theorem's bound",
        statement="No measured Jacobian norm is above the bound of Theorem 3.2 (smallest ratio of bound to norm).",
        source="Kim et al. 2021, Theorem 3.2",
    ),
    "kim_fig2_slope": of_layers(
        statement="The lower bound grows with log N like the bound of Theorem 3.2 (relative difference of the "
        "slopes; threshold: ours, a tenth to either side).",
        source=FIG2,
        measure=_slope_off,
        claimed=within(0.1),
        applies=partial(has_row, quantity="theorem", kind="bound", p=np.inf),
        is_check=True,
        control=Control.beyond(
            "a lower bound that grows by four fifths as much",
            of=ASCENTS,
            value=lambda rows: 0.8 * rows.value + 0.2 * rows.groupby(["seed", "quantity"]).value.transform("mean"),
        ),
    ),
    "kim_fig7_log": of_layers(
        statement="The lower bound for p = 2 grows slower than the square root of N in Theorem 3.2 (exponent of N).",
        source="Kim et al. 2021, app. K and Fig. 7",
        measure=_exponent_2,
        claimed=below(0.5),
        sourced=True,
        applies=partial(has_row, quantity="ascent", kind="lower_bound", p=2),
        is_check=True,
        control=Control.beyond(
            "the bound of Theorem 3.2 in place of the lower bound",
            of=ASCENTS,
            value=partial(upper_of, quantity="theorem"),
        ),
    ),
    "kim_fig8_diverges": of_layers(
        statement="Under ascent ||J||_inf of dot-product attention keeps growing, in every fifth of the steps after "
        "the first at least with their square root; that of L2 attention, which has a bound, does not (exponent of "
        "the number of steps, in the fifth in which it grows least; threshold: ours, .5).",
        source="Kim et al. 2021, app. L and Fig. 8",
        measure=partial(_least_growth, attention="dot"),
        claimed=above(GROWS),
        across=True,
        by=("weights",),
        applies=_has_ascents_of_both,
        since="2026-11-26",
        control=Control(
            "L2 attention under the same ascent in its place",
            lambda rows: pd.concat([rows[rows.attention == "l2"], _l2_for_dot(rows)]),
        ),
    ),
    "kim_fig3_dot_not_inverted": _inverted(
        statement="Dot-product attention is not inverted (log10 of the share of the error that is left; threshold: "
        "ours, a thousandth).",
        source=FIG3,
        measure=partial(_left, attention="dot"),
        claimed=above(INVERTED),
        applies=partial(has_row, attention="dot", part="attention"),
        control=Control("L2 attention at the same inputs, in its place", _l2_for_dot),
    ),
    "kim_fig3_l2_inverted": _inverted(
        statement="L2 attention is inverted for small enough c, taken as the smallest of the table (log10 of the "
        "share of the error that is left; threshold: ours, a thousandth).",
        source=FIG3,
        measure=lambda rows: _left(rows[rows.coefficient == rows.coefficient.min()], "l2"),
        claimed=below(INVERTED),
        by=("inputs", "tokens", "width"),
        applies=partial(has_row, attention="l2", part="attention"),
        control=Control("two thousandths of the error left", partial(_leaving, share=0.002)),
    ),
    "kim_fig3_contractive_inverted": _inverted(
        statement="Contractive L2 attention is inverted as fast as a contraction is: after k iterations at most c^k "
        "of the error is left (log10 of the largest ratio to it).",
        source="Kim et al. 2021, sec. 4.2 (Banach's fixed-point theorem)",
        measure=_beyond_contraction,
        claimed=below(0.0),
        applies=partial(has_row, attention="contractive_l2", part="attention"),
        is_check=True,
        exact=True,
        control=Control("a hundredth more than c^k left", _above_contraction),
    ),
    "kim_fig5_dot_not_inverted": _inverted(
        statement="Trained, dot-product attention is not inverted, neither the layer nor (inputs=test) the network "
        "(log10 of the share of the error that is left; threshold: ours, a thousandth).",
        source=FIG5,
        measure=partial(_left, attention="dot"),
        claimed=above(INVERTED),
        applies=partial(has_row, attention="dot", weights="trained"),
        why_untrained=untrained_by_loss,
        control=Control("half a thousandth of the error left", partial(_leaving, share=0.0005)),
    ),
    "kim_fig5_contractive_inverted": _inverted(
        statement="Contractive L2 attention is inverted with trained weights, too, the layer and (inputs=test) the "
        "network (log10 of the share of the error that is left; threshold: ours, a thousandth).",
        source="Kim et al. 2021, sec. 4",
        measure=partial(_left, attention="contractive_l2"),
        claimed=below(INVERTED),
        applies=partial(has_row, attention="contractive_l2", weights="trained"),
        control=Control("two thousandths of the error left", partial(_leaving, share=0.002)),
    ),
    "kim_fig10_dot_widens": _entries(
        statement="Trained dot-product attention gives outputs of a much wider range than its inputs (from the "
        "smallest to the largest entry, ratio; threshold: ours).",
        source=FIG10,
        measure=_range_ratio,
        claimed=above(WIDER),
        applies=partial(has_row, attention="dot", weights="trained"),
        control=Control("outputs 1.9 times as wide as the inputs", partial(_range_of_inputs, times=1.9)),
    ),
    "kim_fig10_l2_keeps_range": _entries(
        statement="Trained L2 attention (the paper: with tied keys) gives outputs of about the range of its inputs "
        "(from the smallest to the largest entry; factor between the two, whichever is wider; threshold: ours).",
        source=FIG10,
        measure=_range_differs,
        claimed=below(WIDER),
        applies=partial(has_row, attention="l2", weights="trained"),
        control=Control("outputs 2.1 times as wide as the inputs", partial(_range_of_inputs, times=2.1)),
    ),
    # threshold: the norm of 400 x 400 random entries is below its limit by 400^(-2/3) of it, .02, and scatters as much
    "law_power_iteration": agrees(
        law="power_iteration",
        line=0.03,
        statement="Power iteration underestimates a spectral norm: of a random square matrix it gives sqrt((4k + 1)/"
        "(4k + 4)) after k iterations, .935 after five",
        source="Kim et al. 2021, app. B; closed form derived here",
        control="matrices with one singular value far above the others",
    ),
    # threshold: rounding of a sum of squares of up to 1e6
    "law_score_biases": agrees(
        law="score_biases",
        line=1e-9,
        statement="Biases of queries and keys do not help: the derivative of a token where x W_Q + b_Q = 0 has the "
        "variance of the tokens, which nothing bounds",
        source="Kim et al. 2021, app. D; closed form derived here",
        control="the same inputs without biases",
        relative=True,
        exact=True,
    ),
}
