"""The spectral gap of random attention, and why one softmax layer nearly collapses (Nait Saada et al., ICML 2025).

A row-stochastic n x n matrix P whose weights are independent before its rows are divided by their sums has one singular
value near 1 and the rest in a bulk: sqrt(n) sigma_2 tends to 2 s and sqrt(n) |lambda_2| to s, s^2 the variance of the
weights over the square of their mean (Bordenave, Caputo and Chafai 2012, whom the source follows). Derived here for
scores N(0, sigma^2): the weights are log-normal, so that s = sqrt(exp(sigma^2) - 1).

Control: scores of the same variance but of rank one, q_i k_j. Their weights are not independent, and the second
singular value does not fall like 1/sqrt(n).

rankbench.measures.attention_matrices.beside_independent compares the weights of any heads with it, by their own s.

Shapes: N query token, M key token.
"""

import math

import torch

from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

DEVIATIONS = [0.25, 0.5, 0.75, 1.0]  # sigma, of the scores
SINGULAR, EIGEN = "sqrt(n) sigma_2", "sqrt(n) |lambda_2|"


def bulk(deviation: float) -> float:
    """s for scores of this standard deviation."""
    return math.sqrt(math.expm1(deviation**2))


def predicted(**_: int) -> Predicted:
    """The limits by the scores' standard deviation."""
    for deviation in DEVIATIONS:
        yield SINGULAR, deviation, 2 * bulk(deviation)
        yield EIGEN, deviation, bulk(deviation)


def simulated(generator: torch.Generator, tokens: int) -> Measured:
    """The same for the softmax of random scores."""
    draw: dict = {"dtype": torch.float64, "generator": generator}
    for deviation in DEVIATIONS:
        independent_NM = torch.randn(tokens, tokens, **draw)
        rank_one_NM = torch.randn(tokens, 1, **draw) * torch.randn(tokens, **draw)
        for setup, scores_NM in ((CLAIMED, independent_NM), (CONTROL, rank_one_NM)):
            p_NM = (deviation * scores_NM).softmax(1)
            eigenvalues = torch.linalg.eigvals(p_NM).abs().sort(descending=True).values
            yield setup, SINGULAR, deviation, math.sqrt(tokens) * torch.linalg.svdvals(p_NM)[1].item()
            yield setup, EIGEN, deviation, math.sqrt(tokens) * eigenvalues[1].item()


LAW = Law(
    sizes={"tokens": 400},
    predicted=predicted,
    simulated=simulated,
    x_label="standard deviation of the scores",
    value_label="second value of attention",
    log_value=True,
)
