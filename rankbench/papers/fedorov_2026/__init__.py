"""Random values end in antipodal clusters (Fedorov et al. 2026, Clustering in deep stochastic transformers).

Tokens on the sphere move by x_i <- norm(x_i + sqrt(dt) W m_i): m_i is the attention of x_i, with scores
beta <x_i, x_j>, and W is random, the same for all tokens and new in each layer. As dt -> 0 two tokens follow a
diffusion. Derived here: with t = tanh(beta (1-s)/2) their cosine s has, in a unit of time, the drift
(1-s^2) (d-2-s - t^2 (d-2+s)) / 2 and the variance (1-s^2)^2 (1+t^2). So it ends at 1 or -1, at -1 with probability

    (F(1) - F(s)) / (F(1) - F(-1)),    F'(s) = (1-s^2)^(-1/2) exp(-(d-2) G(s)),    G'(s) = sech(beta (1-s)) / (1-s^2).

F(-1) is infinite, and the probability 0, if cosh(2 beta) <= d - 2: the source's phase transition. In two dimensions
half of the pairs that are drawn uniformly end antipodal, at every beta. Two antipodal tokens have rank one but are
not a consensus: their residual to 1 x^T is the whole matrix.

Control: values that are the identity. Then all tokens meet, at every beta and width.

Shapes: R run, N token, D width.
"""

import math

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.measures.norms import Spectrum, frobenius_norm, residual_matrix

BETAS = [0.0, 1.0, 2.0, 3.0, 4.0]
WIDTHS = [2, 4, 8]
ANTIPODAL = -0.9  # cosine below which two tokens count as antipodal
TIME_OF_LAYER = 0.02
FAR, POINTS = 400.0, 100_001  # where the integrals over artanh(s) end: tails fall at least as exp(-|artanh(s)|/10)


def critical_beta(width: int) -> float:
    """beta above which tokens of this width can end antipodal; 0 if every positive beta allows it."""
    return math.acosh(max(1, width - 2)) / 2


def antipodal_share(width: int, beta: float) -> float:
    """Probability that two tokens that are drawn uniformly on the sphere end antipodal."""
    if width > 2 and beta <= critical_beta(width):
        return 0.0
    y = np.linspace(-FAR, FAR, POINTS)  # artanh(s); ds = (1-s^2) dy
    decay = np.exp(-2 * np.abs(y))
    apart = np.where(y > 0, 2 * decay, 2) / (1 + decay)  # 1 - s, without cancellation
    log_root = math.log(2) - np.abs(y) - np.log1p(decay)  # of sqrt(1-s^2)
    integral = scipy.integrate.cumulative_simpson(1 / np.cosh(beta * apart), x=y, initial=0)
    log_slope = log_root - (width - 2) * (integral - integral[POINTS // 2])
    scale = scipy.integrate.cumulative_simpson(np.exp(log_slope - log_slope.max()), x=y, initial=0)
    density = np.exp((width - 1) * log_root)  # of s uniform on the sphere, (1-s^2)^((d-3)/2) ds
    ends_antipodal = 1 - scale / scale[-1]
    return float(scipy.integrate.simpson(density * ends_antipodal, x=y) / scipy.integrate.simpson(density, x=y))


def predicted(**_: int) -> Predicted:
    """Share of pairs that end antipodal, by width and beta. At the largest width also two means over pairs: of the
    relative residual, 1 for an antipodal pair and 0 for any other, and of sigma_2/sigma_1, 0 for both."""
    for width in WIDTHS:
        for beta in BETAS:
            share = antipodal_share(width, beta)
            yield from _named(width, beta, (share, share, 0.0))


def simulated(generator: torch.Generator, layers: int, samples: int) -> Measured:
    """The same for `samples` runs of two tokens through this many layers."""
    for setup in (CLAIMED, CONTROL):
        for width in WIDTHS:
            start_RND = torch.randn(samples, 2, width, dtype=torch.float64, generator=generator)
            for beta in BETAS:
                x_RND = normalize(start_RND, dim=-1)
                for _ in range(layers):
                    w_RDD = _values(samples, width, setup, generator)
                    x_RND = normalize(x_RND + attended(x_RND, beta) @ w_RDD, dim=-1)
                yield from ((setup, *point) for point in _named(width, beta, _shape(x_RND)))


def attended(x_RND: Tensor, beta: float) -> Tensor:
    """Output of attention whose values are the tokens themselves."""
    return (beta * x_RND @ x_RND.mT).softmax(-1) @ x_RND


def _named(width: int, beta: float, values: tuple[float, float, float]) -> Predicted:
    share, residual, ratio = values
    yield f"d = {width}", beta, share
    if width == WIDTHS[-1]:
        yield f"d = {width}: residual to 1 x^T", beta, residual
        yield f"d = {width}: sigma_2/sigma_1", beta, ratio


def _values(samples: int, width: int, setup: str, generator: torch.Generator) -> Tensor:
    """Value maps of one layer for each run, times the size of a step: sqrt(dt) if random, dt if not."""
    if setup == CONTROL:
        return TIME_OF_LAYER * torch.eye(width, dtype=torch.float64)
    draw_RDD = torch.randn(samples, width, width, dtype=torch.float64, generator=generator)
    return math.sqrt(TIME_OF_LAYER) * draw_RDD


def _shape(x_RND: Tensor) -> tuple[float, float, float]:
    """Share of antipodal pairs, and the means of the relative residual to 1 x^T and of sigma_2/sigma_1."""
    antipodal_R = (x_RND[:, 0] * x_RND[:, 1]).sum(-1) < ANTIPODAL
    residual_R = frobenius_norm(residual_matrix(x_RND)) / frobenius_norm(x_RND)
    return antipodal_R.double().mean().item(), residual_R.mean().item(), Spectrum.of(x_RND).second.mean().item()


PAPERS = {"Fedorov et al. 2026": "Clustering in deep stochastic transformers"}
LAWS = {
    "antipodal": Law(
        sizes={"layers": 400, "samples": 400},
        predicted=predicted,
        simulated=simulated,
        x_label="beta",
        value_label="share of antipodal pairs; others: mean",
    )
}
CLAIMS = {
    # threshold: four standard deviations of a share of 400 pairs
    "law_antipodal": agrees(
        law="antipodal",
        line=0.1,
        statement="With random values that are new in each layer two tokens end antipodal with the probability of the "
        "diffusion: 0 where cosh(2 beta) <= d - 2, up to a half above. Such tokens have rank one, and are all residual",
        source="Fedorov et al. 2026, Clustering in deep stochastic transformers; closed form derived here",
        control="values that are the identity in place of random ones",
    ),
}
