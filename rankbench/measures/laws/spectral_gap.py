"""The spectral gap of random attention, and why one softmax layer nearly collapses (Nait Saada et al., ICML 2025).

A row-stochastic n x n matrix P whose weights are independent before its rows are divided by their sums has one singular
value near 1 and the rest in a bulk: sqrt(n) sigma_2 tends to 2 s and sqrt(n) |lambda_2| to s, s^2 the variance of the
weights over the square of their mean (Bordenave, Caputo and Chafai 2012, whom the source follows). Derived here for
scores N(0, sigma^2): the weights are log-normal, so that s = sqrt(exp(sigma^2) - 1).

Control: scores of the same variance but of rank one, q_i k_j. Their weights are not independent, and the second
singular value does not fall like 1/sqrt(n).

`beside_independent` compares the weights of any heads with the law, by their own s.

Shapes: B sequence, H head, N query token, M key token.
"""

import math

import torch
from torch import Tensor

from rankbench.measures.attention_matrices import spectral_gap
from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted

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


def beside_independent(p_BHNM: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Second values of P, without a mask, over the law's for independent weights with the same s; (B, H).

    s^2: M times the mean over rows of sum_j (P_ij - 1/M)^2. singular_over_law: sigma_2 over s (1/sqrt(M) + sqrt(N)/M),
    which is 2 s/sqrt(N) for N = M. eigenvalue_over_law: |lambda_2| over s/sqrt(N), nan for N != M. shuffled_over_law:
    singular_over_law with the weights of each row in a random order, which makes them independent of one another. Its
    distance from 1 shows the effect of a finite N and of heavy tails on the law. nan if all weights are equal.
    """
    num_queries, num_keys = p_BHNM.shape[-2:]
    deviation_BH = (p_BHNM - 1 / num_keys).square().sum(-1).mean(-1).mul(num_keys).sqrt()
    unequal_BH = torch.where(deviation_BH > 0, deviation_BH, math.nan)
    edge_BH = unequal_BH * (num_keys**-0.5 + num_queries**0.5 / num_keys)
    order = torch.rand(p_BHNM.shape, generator=generator).argsort(-1).to(p_BHNM.device)
    second_BH, shuffled_BH = (torch.linalg.svdvals(w)[..., 1] for w in (p_BHNM, p_BHNM.gather(-1, order)))
    return {
        "singular_over_law": second_BH / edge_BH,
        "shuffled_over_law": shuffled_BH / edge_BH,
        "eigenvalue_over_law": (1 - spectral_gap(p_BHNM)) * num_queries**0.5 / unequal_BH,
    }


LAW = Law(
    sizes={"tokens": 400},
    predicted=predicted,
    simulated=simulated,
    x_label="standard deviation of the scores",
    value_label="second value of attention",
    log_value=True,
)
