"""The least entropy that a row of attention can have (Zhai et al. 2023, Theorem 3.1; rankbench.measures.entropy_bound).

Control: scores whose largest entry, instead of their norm, is sigma. They can have gaps of 2 sigma.

Shapes: B start of the search, T score.
"""

import math

import torch
from torch import Tensor

from rankbench.measures.entropy_bound import least_entropy
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

SIGMAS = [0.5, 1.0, 2.0, 3.0, 4.0, 6.0]
STEPS = 300


def predicted(tokens: int, **_: int) -> Predicted:
    """The least entropy by sigma."""
    yield from ((f"T = {tokens}", sigma, least_entropy(tokens, sigma)) for sigma in SIGMAS)


def simulated(generator: torch.Generator, tokens: int, samples: int) -> Measured:
    """The least entropy that a search finds from `samples` random starts."""
    start_BT = torch.randn(samples, tokens, dtype=torch.float64, generator=generator)
    for sigma in SIGMAS:
        for setup, order in ((CLAIMED, 2), (CONTROL, math.inf)):
            yield setup, f"T = {tokens}", sigma, _searched(start_BT, sigma, order)


def _searched(start_BT: Tensor, sigma: float, order: float) -> float:
    """Least entropy after projected descent along its gradient, -p (log p + entropy), in steps of sigma / 2."""
    z_BT, best = start_BT, math.inf
    for _ in range(STEPS):
        z_BT = z_BT * (sigma / torch.linalg.vector_norm(z_BT, order, dim=1, keepdim=True))
        logs_BT = z_BT.log_softmax(1)
        entropy_B1 = -(logs_BT.exp() * logs_BT).sum(1, keepdim=True)
        ascent_BT = logs_BT.exp() * (logs_BT + entropy_B1)
        z_BT = z_BT + 0.5 * sigma * ascent_BT / ascent_BT.norm(dim=1, keepdim=True)
        best = min(best, entropy_B1.min().item())
    return best


LAW = Law(
    sizes={"tokens": 8, "samples": 20},
    predicted=predicted,
    simulated=simulated,
    x_label="norm sigma of the scores",
    value_label="least entropy of a row (nats)",
    log_value=True,
)
