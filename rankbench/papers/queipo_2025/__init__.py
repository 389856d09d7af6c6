"""One massive token and the stable rank (Queipo-de-Llano et al. 2025, Attention sinks and compression valleys).

With M the squared norm of one token, R the sum of those of the others, and alpha the mean of their squared cosines with
it, weighted by their squared norms, the largest singular value of the states X has sigma_1^2 >= M + alpha R. So the
stable rank, ||X||_F^2 / sigma_1^2, is at most (M + R) / (M + alpha R), and is close to that as soon as the token is
some times as long as the others. For independent Gaussian tokens alpha is 1/D on average.

Control: the same squared norm M spread over all tokens, which are longer then but leave the stable rank as it was.
"""

import torch

from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

FACTORS = (8, 12, 20, 40, 100)  # length of the massive token over that of the others


def bound(factor: float, tokens: int, width: int) -> float:
    """(M + R) / (M + alpha R) of one token that is `factor` times as long as the others, with alpha = 1/D."""
    massive, rest = factor**2, tokens - 1
    return (massive + rest) / (massive + rest / width)


def predicted(tokens: int, width: int) -> Predicted:
    """The bound by factor."""
    yield from ((f"{tokens} tokens", factor, bound(factor, tokens, width)) for factor in FACTORS)


def simulated(generator: torch.Generator, tokens: int, width: int) -> Measured:
    """The stable rank of Gaussian tokens, one of them lengthened, and of tokens that are all as much longer."""
    x_ND = torch.randn(tokens, width, dtype=torch.float64, generator=generator)
    x_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
    for factor in FACTORS:
        first_N1 = torch.ones(tokens, 1, dtype=torch.float64)
        first_N1[0] = factor
        spread = ((factor**2 + tokens - 1) / tokens) ** 0.5
        for setup, states in ((CLAIMED, first_N1 * x_ND), (CONTROL, spread * x_ND)):
            largest = torch.linalg.matrix_norm(states, 2)
            yield setup, f"{tokens} tokens", factor, (states.square().sum() / largest**2).item()


PAPERS = {
    "Queipo-de-Llano et al. 2025": "Attention sinks and compression valleys in LLMs are two sides of the same coin"
}
LAWS = {
    "massive_token": Law(
        sizes={"tokens": 64, "width": 64},
        predicted=predicted,
        simulated=simulated,
        x_label="length of the massive token over that of the others",
        value_label="stable rank",
        log_x=True,
        log_value=True,
    )
}
CLAIMS = {
    # threshold: alpha R, a 60th of the sum at the shortest massive token, errs by a fifth at random, and the bound
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
