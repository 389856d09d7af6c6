"""Claim of Saxe et al. 2014: orthogonal maps keep the rank."""

import pandas as pd

from rankbench.judging.claim import Claim, above, require
from rankbench.judging.residual_left import HALF, ends, keeps
from rankbench.judging.sweeps import at_value

PAPERS = {"Saxe et al. 2014": "Exact solutions to the nonlinear dynamics of learning"}


def _rank_of_residual_kept(rows: pd.DataFrame) -> float:
    first, last = ends(rows)
    require(not last.below_floor, "the residual after the last layer is rounding")
    return last.effective_rank_centred / first.effective_rank_centred


CLAIMS: dict[str, Claim] = {
    "knob_orthogonal_values": keeps(
        statement="With orthogonal value maps more than half of the residual's effective rank is left after the last "
        "layer (rank over that of the embedding).",
        source="Saxe et al. 2014, Exact solutions to the nonlinear dynamics of learning",
        table="residual",
        claimed=above(HALF),
        is_check=True,
        **at_value("model.values", "orthogonal", "free", _rank_of_residual_kept),
    ),
}
