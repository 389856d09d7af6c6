"""Claim of Newhouse et al. 2025: a cap on the singular values gives a certificate; table `lipschitz`."""

import math

import pandas as pd

from rankbench.judging.claim import Claim, NotMeasurable, below, exact_check
from rankbench.judging.sweeps import at_one_end

PAPERS = {"Newhouse et al. 2025": "Training transformers with enforced Lipschitz constants"}


def _above_cap(rows: pd.DataFrame) -> float:
    """log10 of the trained network's certificate over that of a network whose matrices are all at the cap."""
    of_network = rows[(rows.weights == "trained") & (rows.part == "network") & (rows.p == 2)]
    values = of_network.set_index("quantity").value
    if not {"theorem", "capped"} <= set(values.index):
        raise NotMeasurable("the table has no certificate of a trained network beside that at the cap")
    return math.log10(values["theorem"] / values["capped"])


CLAIMS: dict[str, Claim] = {
    "newhouse_capped_certificate": exact_check(
        statement="With no singular value above the cap the trained network's certificate is at most that of a network "
        "whose matrices are all at the cap, and without a cap it is above (log10 of their ratio).",
        source="Newhouse et al. 2025, Training transformers with enforced Lipschitz constants",
        table="lipschitz",
        claimed=below(1e-4),  # the trained weights are float32: some 1e-6 in each of a dozen factors
        **at_one_end("optimizer.cap", 0, _above_cap),
    ),
}
