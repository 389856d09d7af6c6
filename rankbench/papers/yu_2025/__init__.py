"""Claims of Yu et al. 2025: as many heads as a task has directions to retrieve; table `head_rank` of a sweep over
model.heads and task.directions.

The source proves that fewer heads than the task's intrinsic dimension need a number of parameters that grows
exponentially with the sequence, and shows errors that fall at that number of heads.
"""

import math
from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, NotMeasurable, above, below, require
from rankbench.judging.head_rank import trained_errors
from rankbench.judging.sweeps import in_reverse, rows_by_value

PAPERS = {"Yu et al. 2025": "The effect of attention head count on transformer approximation"}
DIRECTIONS = "task.directions"
LEARNED = 0.05  # error of networks that have found every direction


def _errors(rows: pd.DataFrame) -> pd.DataFrame:
    """Error by directions and heads, mean over the rows' seeds."""
    by_directions = {int(d): trained_errors(of) for d, of in rows_by_value(rows, DIRECTIONS).items()}
    errors = pd.concat([of.assign(directions=d) for d, of in by_directions.items()])
    require(not errors.empty, "no trained network")
    return errors.groupby(["directions", "heads"]).error.mean().reset_index()


def _one_fewer_over_enough(rows: pd.DataFrame) -> float:
    errors = _errors(rows).set_index(["directions", "heads"]).error
    try:
        return min(math.log10(errors[d, d - 1] / errors[d, d]) for d in set(errors.index.get_level_values(0)))
    except KeyError as error:
        raise NotMeasurable("no network with as many heads as directions, or none with one fewer") from error


def _largest_from_there_on(rows: pd.DataFrame) -> float:
    errors = _errors(rows)
    enough = errors[errors.heads >= errors.directions]
    require(not enough.empty, "no network with as many heads as directions")
    return enough.error.max()


def _most_heads_in_training(rows: pd.DataFrame) -> str:
    errors = _errors(rows)
    most = errors[errors.heads == errors.heads.max()]
    if (most.heads >= most.directions).all() and most.error.max() <= LEARNED:
        return ""
    return f"the network of most heads has not learned its task (error {most.error.max():.3g})"


_of_sweep = partial(
    Claim,
    source="Yu et al. 2025, The effect of attention head count on transformer approximation",
    table="head_rank",
    across=True,
    why_untrained=_most_heads_in_training,
    control=Control(
        "the same networks with the numbers of directions in reverse order", in_reverse(DIRECTIONS).falsify
    ),
    since="2026-11-27",
)

CLAIMS: dict[str, Claim] = {
    "yu_fewer_heads": _of_sweep(
        statement="The last head that is missing counts most: one head fewer than the directions that a task retrieves "
        "errs more than ten times as much as that many heads (log10 of the ratio; of the task where it is smallest).",
        measure=_one_fewer_over_enough,
        claimed=above(1.0),
        in_words="one head fewer errs {} times as much",
    ),
    "yu_enough_heads": _of_sweep(
        statement="With as many heads as directions or more, the error is almost 0 (the largest; threshold: ours).",
        measure=_largest_from_there_on,
        claimed=below(LEARNED),
    ),
}
