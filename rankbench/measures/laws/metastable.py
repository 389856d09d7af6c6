"""Modes of tokens on the circle, and the number of their metastable clusters (Bruno, Pasqualotto, Agazzi, ICLR 2025).

Tokens move by d theta_i/dt = mean over j of exp(beta (cos(theta_j - theta_i) - 1)) sin(theta_j - theta_i), which climbs
W * mu, mu their density and W = exp(beta (cos - 1)) / beta. Around the uniform density its k-th Fourier mode grows at
the rate k^2 exp(-beta) I_k(beta) / beta. The mode that grows fastest, k* = argmax k^2 I_k(beta), is the source's number
of clusters that form first and stay for long. The rates are derived here.

Here all rates are measured, from tokens that are spaced evenly but for a small disturbance. The number of clusters of
random tokens scatters around k* by one, because its neighbours grow nearly as fast, and falls with time.

Control: tokens that repel. Then every disturbance decays.

Shapes: N token.
"""

import math

import torch
from scipy import special
from torch import Tensor

from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted

BETAS = [2.0, 5.0, 9.0, 20.0, 50.0]
MODES = range(1, 17)
DISTURBANCE, STEPS = 1e-7, 20


def growth_rate(mode: int, beta: float) -> float:
    """Rate at which the k-th Fourier mode of an almost uniform density grows."""
    return mode**2 * float(special.ive(mode, beta)) / beta


def fastest_mode(beta: float) -> int:
    """k*."""
    return max(range(1, 2 + math.ceil(2 * beta)), key=lambda mode: growth_rate(mode, beta))


def predicted(**_: int) -> Predicted:
    """Growth rates over that of k*, by beta and k."""
    for beta in BETAS:
        largest = growth_rate(fastest_mode(beta), beta)
        yield from ((f"beta = {beta:g}", mode, growth_rate(mode, beta) / largest) for mode in MODES)


def simulated(generator: torch.Generator, tokens: int) -> Measured:
    """The same of tokens, while the mode k* grows by e (midpoint rule)."""
    even_N = torch.arange(tokens, dtype=torch.float64) * (2 * math.pi / tokens)
    start_N = even_N + DISTURBANCE * torch.randn(tokens, dtype=torch.float64, generator=generator)
    for setup, sign in ((CLAIMED, 1), (CONTROL, -1)):
        for beta in BETAS:
            step, theta_N = 1 / growth_rate(fastest_mode(beta), beta) / STEPS, start_N
            for _ in range(STEPS):
                middle_N = theta_N + sign * step / 2 * _velocity(theta_N, beta)
                theta_N = theta_N + sign * step * _velocity(middle_N, beta)
            for mode in MODES:
                growth = _amplitude(theta_N, mode) / _amplitude(start_N, mode)
                yield setup, f"beta = {beta:g}", mode, math.log(growth)


def _velocity(theta_N: Tensor, beta: float) -> Tensor:
    apart_NN = theta_N - theta_N[:, None]
    return ((beta * (apart_NN.cos() - 1)).exp() * apart_NN.sin()).mean(1)


def _amplitude(theta_N: Tensor, mode: int) -> float:
    return torch.polar(torch.ones_like(theta_N), mode * theta_N).mean().abs().item()


LAW = Law({"tokens": 200}, predicted, "mode k", "growth rate over that of k*", simulated=simulated)
