"""Claims of Bruno, Pasqualotto and Agazzi 2025: tokens on the circle stay long in a few clusters."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.bruno_2025.metastable import METASTABLE, PLATEAU

PAPERS = {"Bruno, Pasqualotto and Agazzi 2025": "Emergence of meta-stable clustering in mean-field transformers"}
LAWS = {"metastable": METASTABLE, "plateau": PLATEAU}

CLAIMS: dict[str, Claim] = {
    # the line: the midpoint rule errs by 4e-4 in 20 steps, and second-order terms of the disturbance are far smaller
    "law_metastable": agrees(
        law="metastable",
        line=0.005,
        statement="Modes of tokens on the circle grow at rates in proportion to k^2 I_k(beta), and so the one of the "
        "metastable clusters, k*, grows fastest",
        source="Bruno, Pasqualotto and Agazzi 2025, Emergence of meta-stable clustering in mean-field transformers",
        control="tokens that repel",
    ),
    # the line: runs scatter by one around k*, the mode that grows fastest, because its neighbours grow nearly as fast
    "law_plateau": agrees(
        law="plateau",
        line=2.0,
        statement="Random tokens on the circle stay longest in k* = argmax k^2 I_k(beta) clusters, give or take two",
        source="Bruno, Pasqualotto and Agazzi 2025, Emergence of meta-stable clustering in mean-field transformers",
        control="tokens that repel",
    ),
}
