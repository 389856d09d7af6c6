"""Claims of Chen, Lin, Polyanskiy and Rigollet 2026: attention whose scores grow as the number of tokens' logarithm."""

from rankbench.judging.claim import Claim
from rankbench.judging.of_laws import agrees
from rankbench.papers.chen_2026.long_context import GRADIENT, LONG_CONTEXT

PAPERS = {"Chen, Lin, Polyanskiy and Rigollet 2026": "Critical attention scaling in long-context transformers"}
LAWS = {"long_context": LONG_CONTEXT, "long_context_gradient": GRADIENT}
CHEN = "Chen, Lin, Polyanskiy and Rigollet 2026, Critical attention scaling in long-context transformers"

CLAIMS: dict[str, Claim] = {
    # the line: products of random tokens err by 1/sqrt(4096) = .016, which the mean over pairs reduces
    "law_long_context": agrees(
        law="long_context",
        line=0.02,
        statement="Attention with beta = gamma log n has a critical gamma, 1/(1-rho): below it outputs become alike, "
        "above it they stay as they were, and for n tokens the cosine is the closed form's",
        source=CHEN,
        control="beta = gamma, which does not grow with the number of tokens",
    ),
    # the line: beta times the products' error, 1/sqrt(1024), moves the weights by up to a tenth where they are a half
    "law_long_context_gradient": agrees(
        law="long_context_gradient",
        line=0.1,
        statement="With beta = gamma log n gradients vanish for gamma below the critical one and are those of the norm "
        "above it; for n tokens they are the closed form's",
        source=CHEN,
        control="beta = gamma, which does not grow with the number of tokens",
    ),
}
