"""Modes of tokens on the circle, and the number of their metastable clusters (Bruno, Pasqualotto, Agazzi, ICLR 2025).

Tokens move by d theta_i/dt = mean over j of exp(beta (cos(theta_j - theta_i) - 1)) sin(theta_j - theta_i), which climbs
W * mu, mu their density and W = exp(beta (cos - 1)) / beta. Around the uniform density its k-th Fourier mode grows at
the rate k^2 exp(-beta) I_k(beta) / beta. The mode that grows fastest, k* = argmax k^2 I_k(beta), is the source's number
of clusters that form first and stay for long. The rates are derived here.

Here all rates are measured, from tokens that are evenly spaced except for a small disturbance. The number of clusters
of random tokens scatters around k* by one, because its neighbours grow nearly as fast, and falls with time. So the law
`plateau` compares k* with the number that lasts longest while the mode k* would grow by exp(10).

Control: tokens that repel. Then every disturbance decays.

Shapes: R run, N token.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter

import scipy
import torch
from torch import Tensor

from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

BETAS = [2.0, 5.0, 9.0, 20.0, 50.0]
MODES = range(1, 17)
DISTURBANCE, STEPS = 1e-7, 20
GAP = 0.1  # angle that separates two clusters, three times the mean one of 200 tokens
GROWTHS = 10  # times in units of 1/rate


def growth_rate(mode: int, beta: float) -> float:
    """Rate at which the k-th Fourier mode of an almost uniform density grows."""
    return mode**2 * float(scipy.special.ive(mode, beta)) / beta


def fastest_mode(beta: float) -> int:
    """Mode that grows fastest, k*."""
    return max(range(1, 2 + math.ceil(2 * beta)), key=lambda mode: growth_rate(mode, beta))


def predicted(**_: int) -> Predicted:
    """Growth rates relative to that of k*, by beta and k."""
    for beta in BETAS:
        largest = growth_rate(fastest_mode(beta), beta)
        yield from ((f"beta = {beta:g}", mode, growth_rate(mode, beta) / largest) for mode in MODES)


def simulated(generator: torch.Generator, tokens: int) -> Measured:
    """The same for tokens, while the mode k* grows by e (midpoint rule)."""
    even_N = torch.arange(tokens, dtype=torch.float64) * (2 * math.pi / tokens)
    start_N = even_N + DISTURBANCE * torch.randn(tokens, dtype=torch.float64, generator=generator)
    for setup, sign in ((CLAIMED, 1), (CONTROL, -1)):
        for beta in BETAS:
            *_, end_N = _moved(start_N, beta, sign, growths=1)
            for mode in MODES:
                growth = _amplitude(end_N, mode) / _amplitude(start_N, mode)
                yield setup, f"beta = {beta:g}", mode, math.log(growth)


def _moved(theta: Tensor, beta: float, sign: int, growths: int) -> Iterator[Tensor]:
    """The tokens (..., N) at each of `STEPS` times while the mode k* grows by e, `growths` times over."""
    step = 1 / growth_rate(fastest_mode(beta), beta) / STEPS
    for _ in range(growths * STEPS):
        middle = theta + sign * step / 2 * _velocity(theta, beta)
        theta = theta + sign * step * _velocity(middle, beta)
        yield theta


def _velocity(theta: Tensor, beta: float) -> Tensor:
    direction = torch.stack([theta.cos(), theta.sin()], -1)
    kernel = (beta * (direction @ direction.mT - 1)).exp()
    mean_cos, mean_sin = (kernel @ direction / theta.shape[-1]).unbind(-1)
    return direction[..., 0] * mean_sin - direction[..., 1] * mean_cos  # of the mean of kernel * sin(theta_j - theta_i)


def _amplitude(theta_N: Tensor, mode: int) -> float:
    return torch.polar(torch.ones_like(theta_N), mode * theta_N).mean().abs().item()


def predicted_plateau(**_: int) -> Predicted:
    """Number of clusters of the plateau, k*, by beta."""
    yield from (("clusters", beta, fastest_mode(beta)) for beta in BETAS)


def simulated_plateau(generator: torch.Generator, tokens: int, samples: int) -> Measured:
    """The number of clusters that lasts longest, mean over `samples` runs of random tokens."""
    start_RN = 2 * math.pi * torch.rand(samples, tokens, dtype=torch.float64, generator=generator)
    for setup, sign in ((CLAIMED, 1), (CONTROL, -1)):
        for beta in BETAS:
            numbers = torch.stack([num_clusters(theta_RN) for theta_RN in _moved(start_RN, beta, sign, GROWTHS)], 1)
            yield setup, "clusters", beta, sum(map(longest, numbers.tolist())) / samples


def num_clusters(theta_RN: Tensor) -> Tensor:
    """Number of groups of tokens without a gap between neighbours above GAP, (R,)."""
    sorted_RN = (theta_RN % (2 * math.pi)).sort(-1).values
    gaps_RN = torch.cat([sorted_RN, sorted_RN[:, :1] + 2 * math.pi], 1).diff(dim=1)
    return (gaps_RN > GAP).sum(1).clamp(min=1)


def longest(numbers: list[int]) -> int:
    """The number with the longest run of repetitions."""
    return max(((number, len(list(times))) for number, times in groupby(numbers)), key=itemgetter(1))[0]


PAPERS = {"Bruno, Pasqualotto and Agazzi 2025": "Emergence of meta-stable clustering in mean-field transformers"}
LAWS = {
    "metastable": Law({"tokens": 200}, predicted, "mode k", "growth rate over that of k*", simulated=simulated),
    "plateau": Law(
        {"tokens": 200, "samples": 8},
        predicted_plateau,
        "beta",
        "clusters that last longest",
        simulated=simulated_plateau,
        log_x=True,
        log_value=True,
    ),
}
BRUNO = "Bruno, Pasqualotto and Agazzi 2025, Emergence of meta-stable clustering in mean-field transformers"
_agrees = partial(agrees, source=BRUNO, control="tokens that repel")

CLAIMS = {
    # threshold: the midpoint rule errs by 4e-4 in 20 steps, and second-order terms of the disturbance are far smaller
    "law_metastable": _agrees(
        law="metastable",
        line=0.005,
        statement="Modes of tokens on the circle grow at rates in proportion to k^2 I_k(beta), and so the one of the "
        "metastable clusters, k*, grows fastest",
    ),
    # threshold: runs scatter by one around k*, the mode that grows fastest, because its neighbours grow nearly as fast
    "law_plateau": _agrees(
        law="plateau",
        line=2.0,
        statement="Random tokens on the circle stay longest in k* = argmax k^2 I_k(beta) clusters, give or take two",
    ),
}
