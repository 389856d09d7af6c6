"""Claim of Fedorov et al. 2026: tokens become antipodal under random values."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.fedorov_2026.antipodal import LAW

PAPERS = {"Fedorov et al. 2026": "Clustering in deep stochastic transformers"}
LAWS = {"antipodal": LAW}

CLAIMS: dict[str, Claim] = {
    # the line: four standard deviations of a share of 400 pairs
    "law_antipodal": agrees(
        law="antipodal",
        line=0.1,
        statement="With random values that are new in each layer two tokens end antipodal with the probability of the "
        "diffusion: 0 where cosh(2 beta) <= d - 2, up to a half above. Such tokens have rank one, and are all residual",
        source="Fedorov et al. 2026, Clustering in deep stochastic transformers; closed form derived here",
        control="values that are the identity in place of random ones",
    ),
}
