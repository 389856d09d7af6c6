"""Claim of Wu et al. 2025: causal attention leads to the first token."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.wu_2025.position_bias import LAW

PAPERS = {"Wu et al. 2025": "On the emergence of position bias in transformers"}
LAWS = {"position_bias": LAW}

CLAIMS: dict[str, Claim] = {
    # the line: the random error of 16 networks of 4 heads, .02 to .03, and what norms and tokens that become alike add
    "law_position_bias": agrees(
        law="position_bias",
        line=0.1,
        statement="Causal attention with random queries and keys leads to the first token as uniform causal attention "
        "does: its weight in the last token grows with depth to 1, and with a skip more slowly",
        source="Wu et al. 2025, On the emergence of position bias in transformers; closed form derived here",
        control="attention without a mask",
    ),
}
