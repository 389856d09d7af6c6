"""Claims of Amsel, Yehudai and Bruna, Benefits of rank in attention layers.

The claims compare networks, so they are judged on all configurations of a sweep together. Errors are squared distances
to the target; predicting 0 has the error 1. The published numbers are training losses, the best of 5 runs, at width 64;
they are shown only next to networks of that width.
"""

from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, above, below, has_row, looked_up, require, within
from rankbench.judging.head_rank import initial_for_trained, trained_errors
from rankbench.judging.published import published

PAPERS = {"Amsel, Yehudai and Bruna": "On the benefits of rank in attention layers"}

SOFT, HARD = 0.02, 0.005  # errors below which one full-rank head has learned the farthest point
LEARNED_ERROR = 0.05  # a full-rank head that errs more is still in training; the slides' worst trained head has .04
LOW = 1 / 4  # share of the width up to which a rank counts as low
WIDTH, POINTS = 64, 16  # of the published networks

# Selections of rows: of one seed or of all seeds


def _low(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["rank"] <= LOW * rows.width]


def _full(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of one head of full rank."""
    return rows[(rows["rank"] == rows.width) & (rows.heads == 1)]


def _has_low(rows: pd.DataFrame) -> bool:
    return len(_low(rows)) > 0


def _smallest(errors: pd.DataFrame, of: str) -> float:
    require(not errors.empty, f"no trained network with {of}")
    return errors.error.min()


# Measures: one seed's rows -> a number


def _full_rank(rows: pd.DataFrame, evaluation: str) -> float:
    """Error of one full-rank head, at the number of points where it is largest."""
    by_points = _full(trained_errors(rows, evaluation)).groupby("examples", dropna=False).error.min()
    require(not by_points.empty, "no trained network with one head of full rank")
    return by_points.max()


def _least_fall_with_rank(rows: pd.DataFrame) -> float:
    errors = trained_errors(rows)
    by_rank = errors[errors.copies == 1].groupby("rank").error.mean()
    require(len(by_rank) >= 2, "only one rank")
    return (by_rank / by_rank.shift()).max()


def _growth_with_points(rows: pd.DataFrame) -> float:
    by_points = _low(trained_errors(rows)).pivot_table("error", "rank", "examples")
    require(by_points.shape[1] >= 2, "only one number of points")
    return (by_points / by_points.shift(axis=1)).min(axis=None)


def _angles(rows: pd.DataFrame) -> pd.Series:
    """Median angle of the full-rank heads of one layer, indexed by their number in increasing order."""
    heads = (rows.of == "head") & (rows.weights == "trained") & (rows.matrix == "qk") & (rows["rank"] == rows.width)
    return rows[heads & (rows.layers == 1)].groupby("heads").angle.median()


def _angle_alone(rows: pd.DataFrame) -> float:
    by_heads = _angles(rows)
    require(1 in by_heads, "no trained network with one head of full rank")
    return by_heads[1]


def _angle_of_most(rows: pd.DataFrame) -> float:
    by_heads = _angles(rows)
    require(len(by_heads) >= 2, "only one number of full-rank heads")
    return by_heads.iloc[-1]


def _over_bound(rows: pd.DataFrame) -> float:
    errors = pd.concat([trained_errors(rows, "soft"), trained_errors(rows, "hard")])
    return (errors.error / errors.bound_any).min()


def _vote(rows: pd.DataFrame) -> pd.Series:
    """Formula of the majority vote, by dimension and number of heads. It is repeated in every job of a sweep."""
    formula = rows[(rows.form == "majority_vote") & (rows.kind == "formula")]
    return formula.groupby(["dimension", "heads"]).value.first()


def _vote_deviation(rows: pd.DataFrame) -> float:
    votes = rows[rows.form == "majority_vote"]
    formula = _vote(votes)
    simulated = votes[(votes.kind == "measured") & (votes.standard_error > 0)].set_index(["dimension", "heads"])
    return ((simulated.value - formula.reindex(simulated.index)).abs() / simulated.standard_error).max()


def _construction_deviation(rows: pd.DataFrame) -> float:
    """Relative deviation of the two-layer network from the vote that it takes. The mean over numbers of heads, because
    a single set of heads varies by chance."""
    built = rows[rows.form == "construction"].set_index(["dimension", "heads"])
    return (built.value / _vote(rows).reindex(built.index) - 1).abs().mean()


def _over_sharp_bound(rows: pd.DataFrame, form: str) -> float:
    """Error of random heads of this form over the sharp bound; of the number of heads where it is farthest from 1."""
    errors = rows[rows.quantity == "error"].pivot_table("value", ["dimension", "rank", "heads"], "form")
    require({form, "bound_sharp"} <= set(errors), f"no bound beside {form}")
    return max((errors[form] / errors.bound_sharp)[errors[form].notna()], key=lambda x: abs(x - 1))


# What the slides print


def _slides(figure: str) -> pd.DataFrame:
    """The slides' numbers in the format of the analysis' table."""
    table = published(figure)
    common = {"width": WIDTH, "weights": "trained", "seed": 0}
    if figure == "amsel_learned_m":
        columns = {"of": "head", "matrix": "qk", "heads": table.x.astype(int), "rank": WIDTH, "angle": table.value}
        return pd.DataFrame({**columns, **common, "layers": 1})
    layers = table["where"].str.removeprefix("layers=").astype(int)
    # the figure of the role of N has d copies throughout
    copies = table.series.map({"copies=1": 1, "copies=d^0.5": round(WIDTH**0.5)}).fillna(WIDTH).astype(int)
    points = table.series.str.extract(r"N=(\d+)")[0].astype(float).fillna(POINTS).astype(int)
    rank = (table.x * WIDTH).astype(int)
    columns = {"of": "network", "evaluation": "soft", "error": table.value, "rank": rank, "copies": copies}
    columns |= {"layers": layers, "examples": points, "heads": copies * WIDTH // rank}
    return pd.DataFrame({**columns, **common})


def _printed(rows: pd.DataFrame, figure: str = "amsel_rank_vs_heads") -> pd.DataFrame:
    """The slides' numbers for the networks in the rows."""
    printed = _slides(figure)
    keys = ["heads", "rank", "width"] + (["layers", "examples"] if "error" in printed else [])
    return printed.merge(rows[rows.of == printed.of.iloc[0]][keys].drop_duplicates())


# When networks count as trained


def _in_training(full_rank: pd.DataFrame) -> str:
    """Say why networks count as untrained; empty if those of full rank have learned the task, by the mean error over
    seeds at the number of points where it is largest."""
    by_points = full_rank.groupby("examples").error.mean()
    if by_points.empty:
        return "there is no full-rank head to show whether training was long enough"
    points, error = by_points.idxmax(), by_points.max()
    if error <= LEARNED_ERROR:
        return ""
    return f"the network of full rank has not learned its task (error {error:.3g} with {points:g} points)"


def _growth_may_turn(rows: pd.DataFrame) -> str:
    """Say why a growth with the points cannot be judged yet; empty if more training could not turn it round.

    Errors only fall in training. If they grow with the points, those at the fewest may still fall; if they do not,
    those at the most may. At the others, the network of full rank with as many copies must have learned.
    """
    errors = trained_errors(rows)
    spared = errors.examples.min() if _growth_with_points(rows) > 1 else errors.examples.max()
    return _in_training(errors[(errors["rank"] == errors.width) & (errors.examples != spared)])


def _most_heads_in_training(rows: pd.DataFrame) -> str:
    errors = trained_errors(rows)
    error = errors[(errors["rank"] == errors.width) & (errors.heads == errors.heads.max())].error.mean()
    return "" if error <= LEARNED_ERROR else f"the network of most heads has not learned its task (error {error:.3g})"


# Controls; they do not change the rows that show whether the networks were trained


def _soft_for_hard(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.concat([trained_errors(rows), trained_errors(rows).assign(evaluation="hard")])


def _full_for_low(rows: pd.DataFrame) -> pd.DataFrame:
    full = _full(trained_errors(rows))
    return pd.concat([full, full.assign(rank=1, heads=full.width)])


def _sharp_bound_of(rows: pd.DataFrame) -> pd.Series:
    return looked_up(rows, rows[rows.form == "bound_sharp"].groupby(["dimension", "rank", "heads"]).value.first())


def _vote_for_full_rank(rows: pd.DataFrame) -> pd.DataFrame:
    votes = rows[(rows.form == "majority_vote") & (rows.kind == "measured") & (rows.heads == rows.heads.min())]
    return votes.assign(form="full_rank")


SLIDES = "Amsel, Yehudai and Bruna"
UPPER, LOWER = f'{SLIDES}, slide "Upper Bound"', f'{SLIDES}, slide "Lower Bound", Theorem 2'
EXPERIMENTS = f'{SLIDES}, figures of "Experimental Setup"'
LEARNS = f'{SLIDES}, slide "What does full-rank attention learn?"'
POINTS_VARIED = f"{SLIDES}, last figure (the role of the number of points)"
CONSTRUCTION = f'{SLIDES}, slide "Modified Attention Construction"'
OPEN = f'{SLIDES}, slide "Open / in progress"'

_trained = partial(
    Claim,
    table="head_rank",
    across=True,
    applies=lambda rows: len(_full(rows)) > 0,
    why_untrained=lambda rows: _in_training(_full(trained_errors(rows))),
)
_experiment = partial(_trained, source=EXPERIMENTS, by=("layers",))
_learned_map = partial(
    _trained,
    source=LEARNS,
    published=partial(_printed, figure="amsel_learned_m"),
    control=Control("the heads' initial weights in place of the trained ones", partial(initial_for_trained, of="head")),
)
_formula = partial(Claim, table="rank_theory", across=True, why_untrained=None)

CLAIMS: dict[str, Claim] = {
    "amsel_full_rank_soft": _experiment(
        statement="One full-rank softmax head learns the farthest point (error; threshold: ours).",
        measure=partial(_full_rank, evaluation="soft"),
        claimed=below(SOFT),
        published=_printed,
        control=Control.beyond(
            "an error of .03", of="evaluation == 'soft' and rank == width and heads == 1", error=0.03
        ),
    ),
    "amsel_full_rank_hard": _experiment(
        statement="What one full-rank head misses is temperature: with hardmax its error is almost 0 (error; "
        "threshold: ours).",
        measure=partial(_full_rank, evaluation="hard"),
        claimed=below(HARD),
        control=Control("its error with softmax", _soft_for_hard),
    ),
    "amsel_low_rank_above": _experiment(
        statement="However many there are, heads of a quarter of the rank or less err much more than one full-rank "
        "head (smallest error of these over its error; threshold: ours, 10).",
        measure=lambda rows: _smallest(_low(trained_errors(rows)), "heads of low rank") / _full_rank(rows, "soft"),
        claimed=above(10.0),
        applies=_has_low,
        published=_printed,
        control=Control("the full-rank head in place of those of low rank", _full_for_low),
    ),
    "amsel_error_falls_with_rank": _experiment(
        statement="With equally many parameters, the error falls with the rank (largest ratio of the error of one rank "
        "to that of the rank below).",
        measure=_least_fall_with_rank,
        claimed=below(1.0),
        published=_printed,
        control=Control.beyond(
            "heads of lower rank that err a hundredth less than the full-rank head",
            of="rank != width",
            error=lambda rows: 0.99 * rows.seed.map(_full(trained_errors(rows)).groupby("seed").error.mean()),
        ),
    ),
    "amsel_m_is_minus_identity": _learned_map(
        statement="One full-rank head learns W_QK = -I for the farthest point (angle to I in degrees; threshold: "
        "ours).",
        measure=_angle_alone,
        claimed=above(175.0),
    ),
    "amsel_m_of_many_heads": _learned_map(
        statement="Many full-rank heads learn nearly the same (median angle to I in degrees; threshold: ours).",
        measure=_angle_of_most,
        claimed=above(150.0),
        why_untrained=_most_heads_in_training,
    ),
    "amsel_low_rank_grows_with_n": _trained(
        statement="The error of heads of a quarter of the rank or less grows with the number of points (error at one "
        "number of points over that at the next smaller one, where it grows least).",
        source=POINTS_VARIED,
        measure=_growth_with_points,
        claimed=above(1.0),
        applies=_has_low,
        why_untrained=_growth_may_turn,
        published=partial(_printed, figure="amsel_role_of_n"),
        control=Control.beyond(
            "the numbers of points in reverse order", examples="examples.max() + examples.min() - examples"
        ),
    ),
    "amsel_trained_above_bound": _trained(
        statement="No trained heads are below the lower bound for any value maps (smallest ratio of error to bound).",
        source=LOWER,
        measure=_over_bound,
        claimed=above(1.0),
        applies=lambda rows: "bound_any" in rows,
        why_untrained=None,  # it is a bound for all weights
        is_check=True,
        control=Control.beyond("every error a hundredth below the bound", error="0.99 * bound_any"),
    ),
    "amsel_vote_formula": _formula(
        statement="A majority vote of random rank-1 heads errs as its formula says (largest deviation in standard "
        "errors).",
        source=CONSTRUCTION,
        measure=_vote_deviation,
        claimed=below(4.0),
        is_check=True,
        control=Control.beyond(
            "votes that err five standard errors more",
            of="form == 'majority_vote' and kind == 'measured'",
            value=lambda rows: looked_up(rows, _vote(rows)) + 5 * rows.standard_error,
        ),
    ),
    "amsel_construction": _formula(
        statement="Two layers of rank-1 heads take that vote (mean relative deviation from its formula).",
        source=CONSTRUCTION,
        measure=_construction_deviation,
        claimed=below(0.15),
        is_check=True,
        control=Control.beyond(
            "a network that errs a fifth more than the vote",
            of="form == 'construction'",
            value=lambda rows: 1.2 * looked_up(rows, _vote(rows)),
        ),
    ),
    "amsel_bound_is_tight": _formula(
        statement="The lower bound for value maps that are multiples of the identity is tight: random maps of that "
        "rank, with the best functions of what they see, err as much as it says (relative difference, of the number of "
        "heads where it is largest; threshold: ours, .05 to either side).",
        source=OPEN,
        measure=lambda rows: _over_sharp_bound(rows, "generalised") - 1,
        claimed=within(0.05),
        by=("dimension", "rank"),
        applies=partial(has_row, form="generalised"),
        control=Control.beyond(
            "heads that err a tenth more than the bound",
            of="form == 'generalised'",
            value=lambda rows: 1.1 * _sharp_bound_of(rows),
        ),
    ),
    "amsel_hard_heads_near_bound": _formula(
        statement="Random rank-1 hardmax heads with their best constant weights, which are few of the theorem's heads, "
        "err less than twice as much as the bound (the largest ratio over the numbers of heads; threshold: ours).",
        source=OPEN,
        measure=lambda rows: _over_sharp_bound(rows[rows["rank"] == 1], "optimal_weights"),
        claimed=below(2.0),
        control=Control.beyond(
            "heads that err 2.1 times as much as the bound",
            of="form == 'optimal_weights'",
            value=lambda rows: 2.1 * _sharp_bound_of(rows),
        ),
    ),
    "amsel_full_rank_exact": _formula(
        statement="One full-rank hardmax head is the nearest neighbour (error).",
        source=UPPER,
        measure=lambda rows: rows[(rows.quantity == "error") & (rows.form == "full_rank")].value.max(),
        claimed=below(1e-20),
        is_check=True,
        exact=True,
        control=Control("the vote of the fewest rank-1 heads in its place", _vote_for_full_rank),
    ),
}
