"""Claim of Hausdorff 1921: causal uniform attention is a summation method."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.hausdorff_1921.cesaro import LAW

PAPERS = {"Hausdorff 1921": "Summation methods and moment sequences"}
LAWS = {"cesaro": LAW}

CLAIMS: dict[str, Claim] = {
    # the line: rounding of a random 8 x 8 system that is solved, with a condition of up to 1e5
    "law_cesaro": agrees(
        law="cesaro",
        line=1e-9,
        statement="Causal uniform attention is a Hausdorff matrix with any skip: the first token's weight in token n "
        "is sum_k (-1)^k binom(n-1, k) (1 - a + a/(k+1))^t after t layers",
        source="Hausdorff 1921; derived here",
        control="attention without a mask",
        exact=True,
    ),
}
