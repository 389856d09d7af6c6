"""Claims of Garg et al. 2022 on regression in context, as Amsel, Yehudai and Bruna show them; table `head_rank`."""

from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, above, below, looked_up, of_any_weights, require
from rankbench.judging.head_rank import initial_for_trained, trained_errors

PAPERS = {"Garg et al. 2022": "What can transformers learn in-context? A case study of simple function classes"}
GARG = "Garg et al. 2022, as shown by Amsel, Yehudai and Bruna"


def _in_context(rows: pd.DataFrame) -> pd.Series:
    """Error after the last example, by the number of heads."""
    errors = trained_errors(rows)
    return errors[errors.examples == errors.examples.max()].groupby("heads").error.mean()


def _many_over_few_heads(rows: pd.DataFrame) -> float:
    by_heads = _in_context(rows)
    require(len(by_heads) >= 2, "only one number of heads")
    return by_heads.iloc[-1] / by_heads.iloc[0]


def _averaging(rows: pd.DataFrame) -> float:
    return rows[(rows.evaluation == "averaging") & (rows.examples == rows.examples.max())].error.mean()


def _few_heads_in_training(rows: pd.DataFrame) -> str:
    error, averaging = _in_context(rows).iloc[0], _averaging(rows)
    if error < averaging:
        return ""
    return f"the network of fewest heads has not learned its task (error {error:.3g}, averaging {averaging:.3g})"


def _error_of_fewest_heads(rows: pd.DataFrame) -> pd.Series:
    """Error of the fewest heads with each row's seed and number of examples."""
    few = trained_errors(rows[rows.heads == rows.heads.min()])
    return looked_up(rows, few.groupby(["seed", "examples"]).error.mean())


CLAIMS: dict[str, Claim] = {
    "garg_many_heads_fail": Claim(
        statement="In-context regression is worse with many heads of low rank (error after the last example of the "
        "most heads over that of the fewest; threshold: ours, 2).",
        source=GARG,
        table="head_rank",
        measure=_many_over_few_heads,
        claimed=above(2.0),
        across=True,
        why_untrained=_few_heads_in_training,
        control=Control.beyond(
            "the most heads err 1.9 times as much as the fewest",
            of="of == 'network' and heads == heads.max()",
            error=lambda rows: 1.9 * _error_of_fewest_heads(rows),
        ),
    ),
    "garg_learns_regression": of_any_weights(  # that it learns is what is claimed
        statement="The best network beats averaging after the last example (ratio of the errors).",
        source=GARG,
        table="head_rank",
        measure=lambda rows: _in_context(rows).min() / _averaging(rows),
        claimed=below(1.0),
        across=True,
        control=Control("the networks with their initial weights", partial(initial_for_trained, of="network")),
    ),
}
