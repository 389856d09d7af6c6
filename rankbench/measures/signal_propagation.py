"""Cosines of tokens by layer in a fresh Transformer: the map of (q, p) (Giorlandino and Goldt, ICLR 2026).

q: mean square of a token's entries; p: mean product of the entries of two tokens. Random queries and keys, with scores
of variance beta^2 log(n) q^2, are the energies of a Random Energy Model: among many tokens a query attends to all
alike below beta_c = sqrt(2/(q(q-p))), and above it the sum of its squared weights is Y = 1 - beta_c/beta. Attention and
its skip thus turn (q, p) into

    (q + p + (q - p) Y, 2 p),    or, with the average of all tokens subtracted (centred),    (q + (q - p) Y, p).

A ReLU MLP whose maps have weights of variance w / fan-in and biases of variance b, and its skip, then add (q', p') with
q' = w z/2 + b, p' = w z k(c)/2 + b, z = w q + b, c the cosine of two hidden tokens and k Cho and Saul's arc-cosine
kernel. Norms divide both by q. w = .2, b = .0004 and a first cosine of .2 are those of the source's figure 4.

That map is the limit of many tokens, in which two queries attend to different tokens. Finite numbers are far from it:
two queries of cosine c meet with a probability of about n^-(1-c)/(1+c). So for n tokens let Y be the mean sum of a
query's squared weights, and O the mean sum of the products of two queries' weights. Attention turns (q, p) into
(p + (q - p) Y, p + (q - p) O), or centred ((q - p) (Y - 1/n), (q - p) (O - 1/n)), to which a skip adds (q, p). Both
means are integrals, derived here.
"""

import math
from collections.abc import Iterator
from functools import cache

import torch
from numpy.polynomial.hermite_e import hermegauss
from torch import Tensor

FIRST_COSINE, WEIGHT_VARIANCE, BIAS_VARIANCE = 0.2, 0.2, 0.02**2
STEP = 0.25


def critical_beta(q: float, p: float) -> float:
    """Critical inverse temperature beta_c, at which attention's weights begin to concentrate."""
    return math.sqrt(2 / (q * (q - p)))


@cache
def mean_overlap(deviation: float, correlation: float, tokens: int) -> float:
    """Mean sum of the products of two queries' softmax weights; with correlation 1, of one query's squared weights.

    A query's scores of n tokens are independent normal numbers of this standard deviation, and those of two queries for
    one token have this correlation. Since 1/Z is the integral of exp(-t Z), the mean is n times the integral of
    E[u u' exp(-u - u')] E[exp(-u - u')]^(n-1) over log t and log t', u = t exp(score). Given the part b of their scores
    that the queries share, the rest is independent. Sums over even grids of steps of 1/4 give all this to 1e-6 for
    deviations up to 30, because the integrands are smooth.
    """
    shared, own = deviation * math.sqrt(correlation), deviation * math.sqrt(1 - correlation)
    log_t_T = STEP * torch.arange(math.ceil((16 * deviation + 25) / STEP), dtype=torch.float64) - 8 * deviation - 20
    if shared < 2 * STEP:
        nodes_B, share_B = map(torch.from_numpy, hermegauss(15))
        own_TB, others_TB = _given(log_t_T[:, None] + shared * nodes_B, own)
        share_B = share_B / share_B.sum()
    else:
        reach = math.ceil(8 * shared / STEP)
        b_B = STEP * torch.arange(-reach, reach + 1, dtype=torch.float64)
        share_B = (-b_B.square() / (2 * shared**2)).softmax(0)
        ends = [log_t_T[:1] + b_B[:reach], log_t_T, log_t_T[-1:] + b_B[reach + 1 :]]
        own_TB, others_TB = (values.unfold(0, len(b_B), 1) for values in _given(torch.cat(ends), own))
    product_TT = (own_TB * share_B) @ own_TB.mT * ((others_TB * share_B) @ others_TB.mT) ** (tokens - 1)
    return tokens * STEP**2 * product_TT.sum().item()


def _given(log_u: Tensor, deviation: float) -> tuple[Tensor, Tensor]:
    """E[u exp(-u)] and E[exp(-u)] for log u of these means and this standard deviation."""
    z_Z = torch.linspace(-8, 8, 401, dtype=torch.float64)
    density_Z = (-z_Z.square() / 2).softmax(0)
    u = (log_u[..., None] + deviation * z_Z).exp()
    survives = (-u).exp()
    return (u * survives).nan_to_num(0) @ density_Z, survives @ density_Z


def after_attention(q: float, p: float, beta: float, centred: bool, tokens: int | None = None) -> tuple[float, float]:
    """(q, p) of attention's output, from those of its input; without `tokens`, in the limit of many."""
    apart = max(0.0, q - p)
    if tokens is None:
        condenses = apart > 0 and beta > critical_beta(q, p)
        alike, overlap, average = (1 - critical_beta(q, p) / beta if condenses else 0.0), 0.0, 0.0
    else:
        deviation = beta * math.sqrt(math.log(tokens) * q * apart)
        alike, overlap = (mean_overlap(deviation, correlation, tokens) for correlation in (1.0, max(0.0, p / q)))
        average = 1 / tokens
    if centred:
        return apart * (alike - average), apart * (overlap - average)
    return p + apart * alike, p + apart * overlap


def after_mlp(q: float, p: float) -> tuple[float, float]:
    """(q, p) of the MLP's output, from those of its input."""
    hidden = WEIGHT_VARIANCE * q + BIAS_VARIANCE
    c = min(1.0, (WEIGHT_VARIANCE * p + BIAS_VARIANCE) / hidden)
    kernel = (math.sqrt(1 - c**2) + c * (math.pi - math.acos(c))) / math.pi
    return WEIGHT_VARIANCE * hidden / 2 + BIAS_VARIANCE, WEIGHT_VARIANCE * hidden * kernel / 2 + BIAS_VARIANCE


def cosines(
    norm: str, centred: bool, beta: float, tokens: int | None = None, first: float = FIRST_COSINE
) -> Iterator[float]:
    """Cosine of two tokens after each layer, from the first cosine on, without end."""
    q, p = 1.0, first
    while True:
        yield p / q
        for branch in (lambda q, p: after_attention(q, p, beta, centred, tokens), after_mlp):
            added_q, added_p = branch(1.0, p / q) if norm == "pre" else branch(q, p)
            q, p = q + added_q, p + added_p
            if norm == "post":
                q, p = 1.0, p / q
