"""Claim of Queipo-de-Llano et al. 2025: one massive token compresses a layer."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.queipo_2025.massive_token import LAW

PAPERS = {
    "Queipo-de-Llano et al. 2025": "Attention sinks and compression valleys in LLMs are two sides of the same coin"
}
LAWS = {"massive_token": LAW}

CLAIMS: dict[str, Claim] = {
    # the line: alpha R, a 60th of the sum at the shortest massive token, errs by a fifth at random, and the bound
    # leaves out what is of second order in it
    "law_massive_token": agrees(
        law="massive_token",
        line=0.01,
        statement="Where one token is at least eight times as long as the others, the stable rank of a layer is the "
        "bound (M + R) / (M + alpha R) that its length alone sets",
        source="Queipo-de-Llano et al. 2025, massive activations; alpha = 1/D of independent tokens",
        control="the same squared norm spread over all tokens",
        relative=True,
    ),
}
