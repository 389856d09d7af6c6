"""Claim of Newhouse et al. 2025: a cap on the singular values gives a certificate; table `lipschitz`."""

import math

import pandas as pd

from rankbench.judging.claim import Claim, below, exact_check, require
from rankbench.judging.sweeps import at_end, in_reverse

PAPERS = {"Newhouse et al. 2025": "Training transformers with enforced Lipschitz constants"}


CAP = "optimizer.cap"


def _above_cap(rows: pd.DataFrame) -> float:
    """log10 of the certificate of the network trained with the smallest cap over that of a network whose matrices are
    all at the cap, which only the table of a network below it has."""
    of_network = rows[(rows.weights == "trained") & (rows.part == "network") & (rows.p == 2)]
    at_cap = of_network[of_network.quantity == "capped"].value
    require(not at_cap.empty, "the table has no certificate of a trained network beside that at the cap")
    theorem = of_network[of_network.quantity == "theorem"]
    return at_end(theorem, CAP, lambda of_cap: math.log10(of_cap.value.iloc[0] / at_cap.iloc[0]), 0)


CLAIMS: dict[str, Claim] = {
    "newhouse_capped_certificate": exact_check(
        statement="With no singular value above the cap the trained network's certificate is at most that of a network "
        "whose matrices are all at the cap, and without a cap it is above (log10 of their ratio).",
        source="Newhouse et al. 2025, Training transformers with enforced Lipschitz constants",
        table="lipschitz",
        claimed=below(1e-4),  # the trained weights are float32: some 1e-6 in each of a dozen factors
        measure=_above_cap,
        along=CAP,
        control=in_reverse(CAP),
    ),
}
