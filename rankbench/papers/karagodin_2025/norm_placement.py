"""How fast tokens become one cluster, by place of the norm (Karagodin, Ge, Polyanskiy and Rigollet, NeurIPS 2025).

The tokens' directions u_i move as du_i/dt = (A_i - <A_i, u_i> u_i) / s_i, A_i the attention of u_i. The place of the
norm is a speed regulation s. Near one cluster A is the mean direction, so that 1 - cos of two tokens falls at the rate
2/s. post: s = 1, so exp(-2 t). pre: s is the length of the state, which grows like t, so t^-2. peri also norms the
branch's output, with the same rate. nGPT norms the branch and the sum: s = |A|, which tends to 1, so exp(-2 t).
Branches over sqrt(t), with post-norm: s = sqrt(t), so exp(-4 sqrt(t)). The speed regulation is the source's; the rates
are derived again here, all with scores <u_i, u_j>.

The first speed, d cos/dt of orthonormal tokens with scores beta <u_i, u_j>, is 2 q / s with q = 1/(exp(beta) + n - 1),
the weight of another token. post and pre begin with s = 1, peri and nGPT with s = |A| = q sqrt(exp(2 beta) + n - 1).

If all cosines are c, they stay equal, and c follows dc/dt = 2 q (1 - c) (1 + (n-1) c) / s with
q = 1/(exp(beta (1-c)) + n - 1). The law `meeting` starts from orthonormal tokens, and compares this with networks with
K = Q = V = 1.

Control: tokens that attend only to themselves. They do not move.

Shapes: N token, D width.
"""

import itertools
import math

import numpy as np
import scipy
import torch
from torch import Tensor

from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted, mean_cosine
from rankbench.model.bare import drawn_network, with_identity_maps

# Time from which, up to twice that time, the late rate is measured. By then tokens are close to one cluster.
LATE = {"post": 4.0, "pre": 100.0, "peri": 100.0, "nGPT": 4.0, "post, branch / sqrt(t)": 8.0}
BRANCH_NORMED = ("peri", "nGPT")
PLACES = ("post", "pre", "peri", "nGPT")
STEPS, POINTS = 160, 8
MEETING_BETA, MEETING_TIME = 3.0, 6.0
BETAS = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]
SHORT = 1e-6  # time of one step, in which the first speed is measured


def log_decay(place: str, t: float) -> float:
    """Logarithm of 1 - cos at a late time, up to a constant."""
    if place in ("pre", "peri"):
        return -2 * math.log(t)
    return -2 * t if place in ("post", "nGPT") else -4 * math.sqrt(t)


def _times(place: str) -> list[float]:
    """Times of the steps: evenly spaced in the time in which 1 - cos falls exponentially."""
    last = 2 * LATE[place]
    shares = [step / STEPS for step in range(STEPS + 1)]
    if place in ("post", "nGPT"):
        return [share * last for share in shares]
    if place in ("pre", "peri"):
        return [(1 + last) ** share - 1 for share in shares]
    return [share**2 * last for share in shares]


def _late_times(place: str) -> list[float]:
    late = [t for t in _times(place) if t >= LATE[place]]
    return late[:: -(-len(late) // POINTS)]


def predicted(**_: int) -> Predicted:
    """1 - cos relative to that at the first late time, by place and time."""
    for place in LATE:
        first, *others = _late_times(place)
        for t in others:
            yield place, t / LATE[place], math.exp(log_decay(place, t) - log_decay(place, first))


def simulated(generator: torch.Generator, tokens: int, width: int) -> Measured:
    """The same for random tokens that follow the differential equation, by the midpoint rule."""
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
        if place not in ("pre", "peri"):
            x_ND = u_ND
        # from the distances to the mean, because 1 - cos would be lost to rounding
        distances[later] = (u_ND - u_ND.mean(0)).square().sum().item() / (len(u_ND) - 1)
    return distances


def _velocity(place: str, x_ND: Tensor, t: float, alone: bool, beta: float = 1.0) -> Tensor:
    u_ND = x_ND / x_ND.norm(dim=1, keepdim=True)
    a_ND = u_ND if alone else (beta * u_ND @ u_ND.T).softmax(1) @ u_ND
    if place in BRANCH_NORMED:
        a_ND = a_ND / a_ND.norm(dim=1, keepdim=True)
    if place in ("pre", "peri"):
        return a_ND
    tangent_ND = a_ND - (a_ND * u_ND).sum(1, keepdim=True) * u_ND
    return tangent_ND / math.sqrt(t) if place.endswith("sqrt(t)") else tangent_ND


def first_speed(place: str, tokens: int, beta: float) -> float:
    """d cos/dt of orthonormal tokens that begin to move."""
    normed = place in BRANCH_NORMED
    return 2 / (math.sqrt(math.exp(2 * beta) + tokens - 1) if normed else math.exp(beta) + tokens - 1)


def predicted_first(tokens: int) -> Predicted:
    """The first speed by place and beta."""
    yield from ((place, beta, first_speed(place, tokens, beta)) for place in PLACES for beta in BETAS)


def simulated_first(generator: torch.Generator, tokens: int) -> Measured:
    """The same from one short step of tokens in random orthogonal directions."""
    x_NN = torch.linalg.qr(torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)).Q
    for setup in (CLAIMED, CONTROL):
        for place, beta, _ in predicted_first(tokens):
            moved_NN = x_NN + SHORT * _velocity(place, x_NN, 0.0, setup == CONTROL, beta)
            yield setup, place, beta, mean_cosine(moved_NN) / SHORT


def cosines(place: str, tokens: int, beta: float, times: list[float]) -> np.ndarray:
    """Cosine of two tokens at these times, in increasing order, for tokens that are orthonormal at time 0."""

    def velocity(_: float, state: np.ndarray) -> list[float]:
        c, size = state  # size: of the state, with pre-norm and peri-norm
        other = 1 / (math.exp(beta * (1 - c)) + tokens - 1)
        own = 1 - (tokens - 1) * other
        along = own + (1 - own) * c  # <A_i, u_i>
        length = math.sqrt(own * along + (1 - own) * (c * own + other + (tokens - 2) * other * c))  # |A_i|
        regulation = (length if place in BRANCH_NORMED else 1.0) * (size if place in ("pre", "peri") else 1.0)
        growth = along / length if place in BRANCH_NORMED else along
        return [2 * other * (1 - c) * (1 + (tokens - 1) * c) / regulation, growth]

    solution = scipy.integrate.solve_ivp(velocity, (0, times[-1]), [0.0, 1.0], t_eval=times, rtol=1e-10, atol=1e-12)
    return solution.y[0]


def predicted_meeting(tokens: int, layers: int) -> Predicted:
    """The cosine by place and time."""
    times = [*_meeting_times(layers).values()]
    for place in PLACES:
        values = cosines(place, tokens, MEETING_BETA, times)
        yield from ((place, t, value) for t, value in zip(times, values.tolist(), strict=True))


def _meeting_times(layers: int) -> dict[int, float]:
    """Times of the layers after which the cosine is measured."""
    every = max(layers // POINTS, 1)
    return {layer: MEETING_TIME * layer / layers for layer in range(every, layers + 1, every)}


def network_of_meeting(generator: torch.Generator, tokens: int, layers: int) -> Measured:
    """The same for networks with K = Q = V = 1 whose layers are short steps, on tokens in orthogonal directions."""
    x_NN = torch.linalg.qr(torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)).Q
    keys = {"width": tokens, "layers": 1, "norm_kind": "l2norm", "norm_affine": False, "skip": True}
    keys |= {"branch_scale": MEETING_TIME / layers, "temperature": 1 / (MEETING_BETA * math.sqrt(tokens))}
    times = _meeting_times(layers)
    for setup, alone in ((CLAIMED, 0.0), (CONTROL, 1.0)):
        for place in PLACES:
            mixes = {"mix_attention": 1 - alone, "mix_identity": alone}
            drawn = with_identity_maps(drawn_network(generator, tokens, norm=place.lower(), **keys, **mixes))
            x_1ND = x_NN[None]
            for layer in range(1, layers + 1):
                x_1ND = drawn.sublayers[0](x_1ND)  # all layers are the same
                if layer in times:
                    yield setup, place, times[layer], mean_cosine(x_1ND[0])


NORM_PLACEMENT = Law(
    sizes={"tokens": 8, "width": 16},
    predicted=predicted,
    simulated=simulated,
    x_label="time over the first late time",
    value_label="1 - cos of two tokens, relative",
    log_value=True,
)
FIRST_SPEED = Law({"tokens": 16}, predicted_first, "beta", "first speed of the cosine", simulated=simulated_first)
MEETING = Law(
    {"tokens": 32, "layers": 480}, predicted_meeting, "time", "cosine of two tokens", network=network_of_meeting
)
