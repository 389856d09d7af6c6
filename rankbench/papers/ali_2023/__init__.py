"""Claims of Ali, Galanti and Wolf 2023: attention without its mean keeps tokens apart."""

import pandas as pd

from rankbench.judging.claim import Claim, above
from rankbench.judging.residual_left import HALF, ends, keeps, left_at
from rankbench.judging.sweeps import at_one_end

PAPERS = {"Ali, Galanti and Wolf 2023": "Centered self-attention layers"}
ALI = "Ali, Galanti and Wolf 2023, Centered self-attention layers"


def _rank_kept(rows: pd.DataFrame) -> float:
    first, last = ends(rows)
    return last.effective_rank / first.effective_rank


CLAIMS: dict[str, Claim] = {
    "knob_mean_removal": left_at(
        key="model.mix_uniform",
        end=0,
        statement="With the mean removed from attention",
        source=ALI,
        table="residual",
        exists=False,
    ),
    "knob_mean_removal_rank": keeps(
        statement="With the mean removed from attention more than half of the tokens' effective rank is left after the "
        "last layer (rank over that of the embedding).",
        source=ALI,
        table="residual",
        claimed=above(HALF),
        **at_one_end("model.mix_uniform", 0, _rank_kept),
    ),
}
