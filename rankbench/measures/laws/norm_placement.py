"""How fast tokens become one cluster by the place of the norm (Karagodin, Ge, Polyanskiy and Rigollet, NeurIPS 2025).

The tokens' directions u_i move as du_i/dt = (A_i - <A_i, u_i> u_i) / s_i, A_i the attention of u_i. The place of the
norm is a speed regulation s. Near one cluster A is the mean direction, so that 1 - cos of two tokens falls at the rate
2/s. post: s = 1, exp(-2 t). pre: s is the length of the state, which grows like t, so t^-2; peri, which norms the
branch's output, too, likewise. Branches over sqrt(t), with post-norm: s = sqrt(t), exp(-4 sqrt(t)). The speed
regulation is the source's; the rates are derived again here, all with scores <u_i, u_j>.

The first speed, d cos/dt of orthonormal tokens with scores beta <u_i, u_j>, is 2 q / s with q = 1/(exp(beta) + n - 1),
the weight of another token. post and pre begin with s = 1, peri with s = |A| = q sqrt(exp(2 beta) + n - 1).

Control: tokens that attend to themselves alone. They do not move.

Shapes: N token, D width.
"""

import itertools
import math

import torch
from torch import Tensor

from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted

# Time from which the late rate is measured, up to twice as long. By then tokens are close to one cluster.
LATE = {"post": 4.0, "pre": 100.0, "peri": 100.0, "post, branch / sqrt(t)": 8.0}
STEPS, POINTS = 160, 8
BETAS = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]
SHORT = 1e-6  # time of one step, in which the first speed is measured


def log_decay(place: str, t: float) -> float:
    """Logarithm of 1 - cos at a late time, up to a constant."""
    if place in ("pre", "peri"):
        return -2 * math.log(t)
    return -2 * t if place == "post" else -4 * math.sqrt(t)


def _times(place: str) -> list[float]:
    """Times of the steps: evenly spaced in the time in which 1 - cos falls exponentially."""
    last = 2 * LATE[place]
    shares = [step / STEPS for step in range(STEPS + 1)]
    if place == "post":
        return [share * last for share in shares]
    if place in ("pre", "peri"):
        return [(1 + last) ** share - 1 for share in shares]
    return [share**2 * last for share in shares]


def _late_times(place: str) -> list[float]:
    late = [t for t in _times(place) if t >= LATE[place]]
    return late[:: -(-len(late) // POINTS)]


def predicted(**_: int) -> Predicted:
    """1 - cos over that at the first late time, by place and time."""
    for place in LATE:
        first, *others = _late_times(place)
        for t in others:
            yield place, t / LATE[place], math.exp(log_decay(place, t) - log_decay(place, first))


def simulated(generator: torch.Generator, tokens: int, width: int) -> Measured:
    """The same of random tokens that follow the differential equation, by the midpoint rule."""
    start_ND = torch.randn(tokens, width, dtype=torch.float64, generator=generator)
    start_ND = start_ND / start_ND.norm(dim=1, keepdim=True)
    for setup in (CLAIMED, CONTROL):
        for place in LATE:
            distances = _distances(place, start_ND, alone=setup == CONTROL)
            first, *others = _late_times(place)
            yield from ((setup, place, t / LATE[place], distances[t] / distances[first]) for t in others)


def _distances(place: str, x_ND: Tensor, alone: bool) -> dict[float, float]:
    """Mean 1 - cos of two tokens by time."""
    times, distances = _times(place), {}
    for t, later in itertools.pairwise(times):
        middle = (t + later) / 2  # for the half step, too, because the branch over sqrt(t) is infinite at 0
        half_ND = x_ND + (later - t) / 2 * _velocity(place, x_ND, middle, alone)
        x_ND = x_ND + (later - t) * _velocity(place, half_ND, middle, alone)
        u_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
        if place.startswith("post"):
            x_ND = u_ND
        # of the distances from the mean, because 1 - cos would be lost to rounding
        distances[later] = (u_ND - u_ND.mean(0)).square().sum().item() / (len(u_ND) - 1)
    return distances


def _velocity(place: str, x_ND: Tensor, t: float, alone: bool, beta: float = 1.0) -> Tensor:
    u_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
    a_ND = u_ND if alone else (beta * u_ND @ u_ND.T).softmax(1) @ u_ND
    if place.startswith("post"):
        tangent_ND = a_ND - (a_ND * u_ND).sum(1, keepdim=True) * u_ND
        return tangent_ND if place == "post" else tangent_ND / math.sqrt(t)
    return a_ND / a_ND.norm(dim=1, keepdim=True) if place == "peri" else a_ND


def first_speed(place: str, tokens: int, beta: float) -> float:
    """d cos/dt of orthonormal tokens that begin to move."""
    return 2 / (math.sqrt(math.exp(2 * beta) + tokens - 1) if place == "peri" else math.exp(beta) + tokens - 1)


def predicted_first(tokens: int) -> Predicted:
    """The first speed by place and beta."""
    yield from ((place, beta, first_speed(place, tokens, beta)) for place in ("post", "pre", "peri") for beta in BETAS)


def simulated_first(generator: torch.Generator, tokens: int) -> Measured:
    """The same of one short step of tokens in random orthogonal directions."""
    x_NN = torch.linalg.qr(torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)).Q
    for setup in (CLAIMED, CONTROL):
        for place, beta, _ in predicted_first(tokens):
            moved_NN = x_NN + SHORT * _velocity(place, x_NN, 0.0, setup == CONTROL, beta)
            u_NN = moved_NN / moved_NN.norm(dim=1, keepdim=True)
            pairs = (u_NN @ u_NN.T).sum().item() - tokens
            yield setup, place, beta, pairs / (tokens * (tokens - 1)) / SHORT


LAW = Law(
    sizes={"tokens": 8, "width": 16},
    predicted=predicted,
    simulated=simulated,
    x_label="time over the first late time",
    value_label="1 - cos of two tokens, relative",
    log_value=True,
)
FIRST_SPEED = Law({"tokens": 16}, predicted_first, "beta", "first speed of the cosine", simulated=simulated_first)
