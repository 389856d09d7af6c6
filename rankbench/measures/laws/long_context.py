"""Critical scaling of attention over long contexts (Chen, Lin, Polyanskiy and Rigollet, ICLR 2026).

Scores beta <x_i, x_j> with beta = gamma log n, for n unit tokens of pairwise inner product rho. A token gives itself
the weight w = 1 / (1 + (n-1) n^(-gamma (1-rho))) and each other q = (1-w)/(n-1). With x_i = sqrt(rho) u +
sqrt(1-rho) e_i, e_i orthonormal, the outputs have the cosine below, derived here; its limits are the source's: 1 for
gamma below 1/(1-rho), 4 rho/(1 + 3 rho) at it, rho above.

Control: beta = gamma, which does not grow with log n. Then every gamma here gives nearly the average of all tokens.

Shapes: N token, D width.
"""

import math

import torch
from torch import Tensor

from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted

RHO = 0.5
GAMMAS = [number / 4 for number in range(2, 17)]  # 1/(1-rho) = 2, the critical one, is in the middle


def output_cosine(tokens: int, gamma: float, rho: float = RHO) -> float:
    """Cosine of two tokens' outputs for so many tokens."""
    own = 1 / (1 + (tokens - 1) * tokens ** (-gamma * (1 - rho)))
    other = (1 - own) / (tokens - 1)
    product = rho + (1 - rho) * (2 * own * other + (tokens - 2) * other**2)
    return product / (rho + (1 - rho) * (own**2 + (tokens - 1) * other**2))


def limit(gamma: float, rho: float = RHO) -> float:
    """The cosine for infinitely many tokens."""
    if gamma == 1 / (1 - rho):
        return 4 * rho / (1 + 3 * rho)
    return 1.0 if gamma < 1 / (1 - rho) else rho


def predicted(tokens: int, **_: int) -> Predicted:
    """The cosine by gamma, for so many tokens and in the limit."""
    for gamma in GAMMAS:
        yield f"n = {tokens}", gamma, output_cosine(tokens, gamma)
        yield "n to infinity", gamma, limit(gamma)


def simulated(generator: torch.Generator, tokens: int, width: int) -> Measured:
    """The same of random tokens, whose pairwise products are rho up to 1/sqrt(width)."""
    noise_ND = torch.randn(tokens + 1, width, dtype=torch.float64, generator=generator)
    unit_ND = noise_ND / noise_ND.norm(dim=1, keepdim=True)
    x_ND = math.sqrt(RHO) * unit_ND[0] + math.sqrt(1 - RHO) * unit_ND[1:]
    x_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
    gram_NN = x_ND @ x_ND.T
    for gamma in GAMMAS:
        for setup, beta in ((CLAIMED, gamma * math.log(tokens)), (CONTROL, gamma)):
            yield setup, f"n = {tokens}", gamma, _mean_cosine((beta * gram_NN).softmax(1), gram_NN)


def _mean_cosine(p_NN: Tensor, gram_NN: Tensor) -> float:
    """Mean cosine of two different outputs P X, from X X^T."""
    lengths_N = ((p_NN @ gram_NN) * p_NN).sum(1).sqrt()
    sum_N = (1 / lengths_N) @ p_NN  # the sum of the outputs' directions, in terms of the tokens
    tokens = len(p_NN)
    return ((sum_N @ gram_NN @ sum_N - tokens) / (tokens * (tokens - 1))).item()


LAW = Law(
    sizes={"tokens": 100, "width": 4096},
    predicted=predicted,
    simulated=simulated,
    x_label="gamma (beta = gamma log n)",
    value_label="cosine of two outputs",
)
