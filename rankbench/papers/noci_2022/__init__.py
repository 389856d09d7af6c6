"""Claims of Noci et al. 2022: branches that are scaled down keep tokens apart."""

import math

import pandas as pd

from rankbench.judging.claim import Claim, NotMeasurable, above
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import TENTH, keeps, kept_followed, left_along
from rankbench.judging.sweeps import from_other_end, rows_by_value
from rankbench.papers.noci_2022.residual_scale import LAW

PAPERS = {"Noci et al. 2022": "Signal propagation in transformers"}
LAWS = {"residual_scale": LAW}
NOCI = "Noci et al. 2022, Signal propagation in transformers"


def _kept_with_scaled_branches(rows: pd.DataFrame) -> float:
    """Share that is left at the largest branch scale of at most 1/sqrt(layers), up to its printed digits."""
    largest = 1.01 / math.sqrt(rows.layer.max())
    small = [of_value for value, of_value in rows_by_value(rows, "model.branch_scale").items() if value <= largest]
    if not small:
        raise NotMeasurable("the sweep has no model.branch_scale of 1/sqrt(model.layers) or less")
    return kept_followed(small[-1])


CLAIMS: dict[str, Claim] = {
    "knob_residual_scale": left_along(
        key="model.branch_scale",
        side=-1,
        statement="The smaller the scale of the branches beside the skips, the more is left",
        source=NOCI,
    ),
    "knob_residual_scale_root": keeps(
        statement="With branches scaled by 1/sqrt(layers) more than a tenth of the embedding's relative residual is "
        "left after the last layer (the share that is left).",
        source=NOCI,
        table="collapse",
        measure=_kept_with_scaled_branches,
        claimed=above(TENTH),
        along="model.branch_scale",
        control=from_other_end("model.branch_scale", 0),
    ),
    # the line: below .048, the cosine that is left of 1 at a = 1/sqrt(12); the mean over 16 networks errs by .02
    "law_residual_scale": agrees(
        law="residual_scale",
        line=0.04,
        statement="With skips, uniform attention and random values, the cosine of two tokens after L layers is (g - "
        "1)/(n + g - 1), g = (1 + a^2)^L, for branches scaled by a",
        source="Noci et al. 2022, Signal propagation in transformers; closed form derived here",
        control="values that are the identity in place of random ones",
    ),
}
