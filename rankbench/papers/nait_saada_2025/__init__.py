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

from rankbench.judging.claim import Claim, Control, above, of_any_weights
from rankbench.judging.of_laws import agrees
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


PAPERS = {"Nait Saada et al. 2025": "Mind the gap: a spectral analysis of rank collapse and signal propagation"}
LAWS = {
    "spectral_gap": Law(
        sizes={"tokens": 400},
        predicted=predicted,
        simulated=simulated,
        x_label="standard deviation of the scores",
        value_label="second value of attention",
        log_value=True,
    )
}

CLAIMS: dict[str, Claim] = {
    "law_gap_of_heads": of_any_weights(
        statement="Heads that have learned are no random Markov matrices: their second singular value is above that of "
        "independent weights of the same variance (ratio, mean over heads; above 1.5, threshold: ours).",
        source="Nait Saada et al. 2025, Mind the gap; how far heads are from its law is measured here",
        table="attention",
        measure=lambda rows: rows[rows.weights == "trained"].singular_over_law.mean(),
        claimed=above(1.5),
        scale="positive",
        control=Control.beyond(
            "the same weights, those of each row in a random order", singular_over_law="shuffled_over_law"
        ),
    ),
    # threshold: among 400 x 400 log-normal weights the largest still lift sigma_2, at sigma = 1 by .15
    "law_spectral_gap": agrees(
        law="spectral_gap",
        line=0.3,
        statement="The second singular value and eigenvalue of random attention fall as 2 s/sqrt(n) and s/sqrt(n), s "
        "the relative standard deviation of the weights",
        source="Nait Saada et al. 2025, Mind the gap; Bordenave et al. 2012",
        control="scores of the same variance and of rank one",
        relative=True,
    ),
}
