"""Claims of Amsel, Yehudai and Bruna, Benefits of rank in attention layers, and of Garg et al. 2022.

They compare networks with each other: most are judged on all configurations of a sweep together.
"""

import pandas as pd
from scipy import stats

from rankbench.claims.claim import Claim

SOFT, HARD = 0.02, 0.005  # errors under which one full-rank head has learned the farthest point, predicting 0 being 1

# Measures: one seed's rows -> a number


def _errors(rows: pd.DataFrame, evaluation: str = "soft") -> pd.DataFrame:
    """Rows of the trained networks' errors; none of an untrained one's."""
    return rows[(rows.of == "network") & (rows.weights == "trained") & (rows.evaluation == evaluation)]


def _least(found: pd.DataFrame) -> float:
    return found.error.min() if len(found) else float("nan")


def _full_rank(rows: pd.DataFrame, evaluation: str) -> float:
    found = _errors(rows, evaluation)
    return _least(found[(found["rank"] == found.width) & (found.heads == 1)])


def _full_rank_soft(rows: pd.DataFrame) -> float:
    return _full_rank(rows, "soft")


def _full_rank_hard(rows: pd.DataFrame) -> float:
    return _full_rank(rows, "hard")


def _low_over_full(rows: pd.DataFrame) -> float:
    """The smallest error of heads of at most a quarter of the rank, however many, over that of one full-rank head."""
    found = _errors(rows)
    return _least(found[found["rank"] <= found.width / 4]) / _full_rank(rows, "soft")


def _rank_correlation(found: pd.DataFrame, column: str) -> float:
    by_column = found.groupby(column).error.mean()
    return stats.spearmanr(by_column.index, by_column).statistic if len(by_column) > 1 else float("nan")


def _falls_with_rank(rows: pd.DataFrame) -> float:
    found = _errors(rows)
    return _rank_correlation(found[found.copies == 1], "rank")


def _low_rank_grows_with_points(rows: pd.DataFrame) -> float:
    found = _errors(rows)
    return _rank_correlation(found[found["rank"] <= found.width / 4], "examples")


def _angles(rows: pd.DataFrame) -> pd.Series:
    """Median angle of a network's full-rank heads by how many it has, the fewest first."""
    mine = rows[
        (rows.of == "head") & (rows.weights == "trained") & (rows.matrix == "qk") & (rows["rank"] == rows.width)
    ]
    return mine.groupby("heads").angle.median()


def _angle_alone(rows: pd.DataFrame) -> float:
    return _angles(rows).get(1, float("nan"))


def _angle_of_most(rows: pd.DataFrame) -> float:
    by_heads = _angles(rows)
    return by_heads.iloc[-1] if len(by_heads) > 1 else float("nan")


def _over_bound(rows: pd.DataFrame) -> float:
    if "bound_any" not in rows:
        return float("nan")
    found = pd.concat([_errors(rows, "soft"), _errors(rows, "hard")])
    return (found.error / found.bound_any).min()


def _deviation(rows: pd.DataFrame, form: str) -> float:
    """Largest distance of what was tried out from the formula, in standard errors."""
    mine = rows[(rows.form == form) & (rows.quantity == rows.quantity[rows.form == form].iloc[0])]
    # the jobs of a sweep repeat what does not depend on the network
    formula = mine[mine.kind == "formula"].groupby(["dimension", "heads"]).value.first()
    tried = mine[(mine.kind == "measured") & (mine.standard_error > 0)].set_index(["dimension", "heads"])
    return ((tried.value - formula.reindex(tried.index)).abs() / tried.standard_error).max()


def _vote_deviation(rows: pd.DataFrame) -> float:
    return _deviation(rows, "majority_vote")


def _construction_deviation(rows: pd.DataFrame) -> float:
    """As _deviation, of the network of two layers from the vote that it takes; one set of heads varies by itself."""
    vote = rows[(rows.form == "majority_vote") & (rows.kind == "formula")].groupby(["dimension", "heads"]).value.first()
    built = rows[rows.form == "construction"].set_index(["dimension", "heads"])
    return (built.value / vote.reindex(built.index) - 1).abs().mean()


def _random_over_bound(rows: pd.DataFrame) -> float:
    """Error of the most random rank-1 heads with their best weights, over the sharp bound for as many."""
    found = rows[(rows["rank"] == 1) & rows.heads.isin(rows.heads[rows.form == "optimal_weights"])]
    by_heads = found.pivot_table("value", "heads", "form")
    if not {"optimal_weights", "bound_sharp"} <= set(by_heads):
        return float("nan")
    return (by_heads.optimal_weights / by_heads.bound_sharp).dropna().iloc[-1]


def _full_rank_misses(rows: pd.DataFrame) -> float:
    return rows[(rows.quantity == "error") & (rows.form == "full_rank")].value.max()


def _in_context(rows: pd.DataFrame) -> pd.Series:
    """Error behind the last example by the number of heads."""
    found = _errors(rows)
    return found[found.examples == found.examples.max()].groupby("heads").error.mean()


def _many_over_few_heads(rows: pd.DataFrame) -> float:
    by_heads = _in_context(rows)
    return by_heads.iloc[-1] / by_heads.iloc[0] if len(by_heads) > 1 else float("nan")


def _over_averaging(rows: pd.DataFrame) -> float:
    last = rows[(rows.evaluation == "averaging") & (rows.examples == rows.examples.max())].error
    return _in_context(rows).min() / last.iloc[0] if len(_in_context(rows)) and len(last) else float("nan")


SLIDES = "Amsel, Yehudai and Bruna"
GARG = "Garg et al. 2022, as shown by Amsel, Yehudai and Bruna"


def _trained(statement: str, measure, side: int, line: float, published: float | None = None, **how) -> Claim:
    how = {"across": True, "learned": None} | how
    return Claim(statement, SLIDES, "head_rank", measure, side, line, published=published, **how)


def _theory(statement: str, measure, side: int, line: float, exact: bool = False) -> Claim:
    return Claim(statement, SLIDES, "rank_theory", measure, side, line, learned=None, exact=exact, across=True)


AMSEL: dict[str, Claim] = {
    "amsel_full_rank_soft": _trained(
        "One full-rank softmax head learns the farthest point (error; d = 64, best of 5 runs: .0154).",
        *(_full_rank_soft, -1, SOFT, 0.0154),
    ),
    "amsel_full_rank_hard": _trained(
        "What one full-rank head misses is temperature: with hardmax its error is almost 0.", _full_rank_hard, -1, HARD
    ),
    "amsel_low_rank_above": _trained(
        "However many there are, heads of a quarter of the rank or less err ten times as much as one full-rank head.",
        *(_low_over_full, +1, 10.0),
    ),
    "amsel_error_falls_with_rank": _trained(
        "With as many parameters, the error falls with the rank (Spearman's rank correlation below 0).",
        *(_falls_with_rank, -1, 0.0),
    ),
    "amsel_m_is_minus_identity": _trained(
        "One full-rank head learns W_QK = -I for the farthest point (angle to I in degrees; d = 64: 179.6).",
        *(_angle_alone, +1, 175.0, 179.6),
    ),
    "amsel_m_of_many_heads": _trained(
        "Many full-rank heads learn nearly the same (median angle above 150 degrees; 64 of them at d = 64: 168.5).",
        *(_angle_of_most, +1, 150.0, 168.5),
    ),
    "amsel_low_rank_grows_with_n": _trained(
        "Heads of a quarter of the rank or less err the more, the more points there are (Spearman's rank correlation).",
        *(_low_rank_grows_with_points, +1, 0.0),
    ),
    "amsel_trained_above_bound": _trained(
        "No trained heads are below the lower bound for any value maps (smallest ratio to it).", _over_bound, +1, 1.0
    ),
    "amsel_vote_formula": _theory(
        "A majority vote of random rank-1 heads errs as its formula says (largest deviation in standard errors).",
        *(_vote_deviation, -1, 4.0),
    ),
    "amsel_construction": _theory(
        "Two layers of rank-1 heads take that vote (mean relative deviation from its formula).",
        *(_construction_deviation, -1, 0.15),
    ),
    "amsel_bound_is_tight": _theory(
        "The lower bound for rank 1 is tight: random heads with their best weights err less than twice as much.",
        *(_random_over_bound, -1, 2.0),
    ),
    "amsel_full_rank_exact": _theory(
        "One full-rank hardmax head is the nearest neighbour (error).", _full_rank_misses, -1, 1e-20, exact=True
    ),
    "garg_many_heads_fail": Claim(
        "In-context regression is worse with many heads of low rank (error of the most heads over that of the fewest).",
        *(GARG, "head_rank", _many_over_few_heads, +1, 2.0),
        learned=None,
        across=True,
    ),
    "garg_learns_regression": Claim(
        "The best network beats averaging behind the last example (ratio of the errors).",
        *(GARG, "head_rank", _over_averaging, -1, 1.0),
        learned=None,
        across=True,
    ),
}
