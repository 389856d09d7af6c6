"""Norms of Jacobians, each a lower bound of a Lipschitz constant: at given inputs, and maximised over inputs.

Shapes: B sequence or start, N token, D width, T recorded step.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import scipy
import torch
from torch import Tensor

from rankbench.measures.attention_layer import AttentionLayer, push, rows_of_token, widest_token
from rankbench.measures.norms import spectral_norm

# Adam is written out, because torch.optim.Adam rounds differently: after 300 steps the values of some starts have
# a relative difference of 1e-9.
ADAM = (0.9, 0.999)
# The gradient at a token is proportional to its attention weight, which is as small as 1e-40 for distant tokens. With
# Adam's usual 1e-8 these would never move.
ADAM_EPSILON = 1e-30
NUMBERS_AT_A_TIME = 2_000_000  # of P or of a row of J: what fits the cache, which is less than what fits the memory
FULL_SVD_UP_TO = 1024  # rows of a Jacobian; larger ones use Lanczos for the largest singular value


def jacobian_norm(function: Callable[[Tensor], Tensor], x: Tensor, p: str, chunk: int = 256) -> float:
    """||J(x)||_p of any differentiable map from x (any shape) to a tensor of any shape.

    p = inf: every row, by reverse differentiation, `chunk` rows at a time. p = 2: exact SVD up to FULL_SVD_UP_TO rows
    or columns, else Lanczos on products with J and J^T (a lower bound of the norm, to 1e-10 of it). nan if the map or
    its derivatives overflow.
    """
    y, pull, *_ = torch.func.vjp(function, x)
    if not y.isfinite().all():
        return math.nan
    if p == "2" and min(x.numel(), y.numel()) > FULL_SVD_UP_TO:
        return _largest_singular_value(x, y, pull)
    unit = torch.eye(y.numel(), dtype=y.dtype, device=y.device)
    parts = []
    for rows in unit.split(chunk):
        (pulled,) = torch.func.vmap(pull)(rows.view(-1, *y.shape))
        parts.append(pulled.flatten(1) if p == "2" else pulled.flatten(1).abs().sum(1))
    rows = torch.cat(parts)
    if not rows.isfinite().all():
        return math.nan
    return spectral_norm(rows).item() if p == "2" else rows.max().item()


def _largest_singular_value(x: Tensor, y: Tensor, pull: Callable) -> float:
    def product(apply: Callable, like: Tensor, v: np.ndarray) -> np.ndarray:
        (result,) = apply(torch.from_numpy(np.ascontiguousarray(v)).to(like).view_as(like))
        return np.ldexp(result.flatten().cpu().numpy(), -exponent)

    forward, exponent = functools.partial(product, _forward(pull, y), x), 0
    size = np.abs(forward(np.random.default_rng(0).standard_normal(x.numel()))).max()
    if not 0 < size < math.inf:  # a product with random numbers is 0 where J is
        return 0.0 if size == 0 else math.nan
    exponent = int(np.frexp(size)[1])  # Lanczos squares J, which would overflow, or vanish
    backward, shape = functools.partial(product, pull, y), (y.numel(), x.numel())
    operator = scipy.sparse.linalg.LinearOperator(shape, matvec=forward, rmatvec=backward, dtype=np.float64)
    start = np.random.default_rng(0).standard_normal(min(shape))
    # svds squares the tolerance. At 1e-10 it would be below eps, and ARPACK fails for multiples of the identity.
    (largest,) = scipy.sparse.linalg.svds(operator, k=1, tol=1e-7, v0=start, return_singular_vectors=False)
    return float(np.ldexp(largest, exponent))


def _forward(pull: Callable, y: Tensor) -> Callable:
    """v -> (J v,), from u -> (J^T u,): the derivative of the latter, pulled back, which is forward differentiation by
    two reverse ones."""
    _, forward, *_ = torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(y))
    return forward


class Ascent(NamedTuple):
    """values_TB: largest ||J||_p so far of each start at the recorded steps_T; x_BND: inputs where it is attained."""

    steps_T: list[int]
    values_TB: Tensor
    x_BND: Tensor


def random_starts(number: int, num_tokens: int, width: int, largest: float, generator: torch.Generator) -> Tensor:
    """Inputs uniform in [-c, c], c uniform in [0, largest] for each start, (B, N, D), float64. Kim et al., app. I."""
    c_B11 = largest * torch.rand(number, 1, 1, generator=generator, dtype=torch.float64)
    return c_B11 * (2 * torch.rand(number, num_tokens, width, generator=generator, dtype=torch.float64) - 1)


def ascend(
    layer: AttentionLayer, starts_BND: Tensor, p: str, steps: int, lr: float, record_every: int, *, mirror: bool = False
) -> Ascent:
    """Maximise ||J(X)||_p over inputs with Adam from all starts at once (Kim et al. 2021, app. I: lr .1).

    p = inf: the largest absolute row sum of one token (widest_token). p = 2: u^T J v, where u and v take one step of
    power iteration for each step of the ascent and are constants in its gradient; being unit vectors, they keep the
    objective at or below ||J||_2. The best value so far is kept, so overshooting loses nothing.

    mirror, for one head of width 1: half-way, every token keeps its distance to the widest token and the tokens move to
    alternate sides of it, which centres their mean and leaves P unchanged. Adam alone cannot move a token across, and
    gets stuck if the first draw has more tokens on one side.
    """
    _, num_tokens, width = starts_BND.shape
    numbers_per_start = num_tokens * (num_tokens * len(layer.maps.w_q_HDK) if p == "2" else width * width)
    mirrored_at = widest_token(layer) if mirror else None
    parts = [
        _ascend(_objective(layer, x_BND, p), x_BND.clone(), steps, lr, record_every, mirrored_at)
        for x_BND in starts_BND.split(max(1, NUMBERS_AT_A_TIME // numbers_per_start))
    ]
    values_TB, x_BND = torch.cat([part.values_TB for part in parts], 1), torch.cat([part.x_BND for part in parts])
    return Ascent(parts[0].steps_T, values_TB, x_BND)


def ascend_on_balls(
    function: Callable[[Tensor], Tensor],
    centre_ND: Tensor,
    radii: Sequence[float],
    generator: torch.Generator,
    starts: int = 3,
    steps: int = 60,
) -> list[float]:
    """Lower bounds of the largest ||J(x)||_2 with ||x - centre||_F <= r, for each radius in increasing order.

    function maps each sequence of a batch (B, N, D) by itself. The ascent is that of `ascend`, with a step back into
    the ball after each, from the centre, from random inputs on the sphere, and from the best input of the ball before.
    """
    best, best_ND, found = 0.0, centre_ND, []
    for radius in radii:
        random_BND = torch.randn(starts - 1, *centre_ND.shape, generator=generator, dtype=torch.float64).to(centre_ND)
        into_ball = functools.partial(_into_ball, centre_ND, radius)
        starts_BND = torch.cat([best_ND[None], into_ball(centre_ND + 1e9 * radius * random_BND)])
        push_through = functools.partial(_push_through, function)
        lr = 0.3 * radius / centre_ND.numel() ** 0.5  # Adam then moves by about a third of the radius at first
        objective = _power_iteration(push_through, starts_BND)
        ends_BND = _ascend(objective, starts_BND, steps, lr, steps, project=into_ball).x_BND
        for x_ND in (centre_ND, *ends_BND):
            value = jacobian_norm(lambda y_ND: function(y_ND[None])[0], x_ND, "2")
            if value > best:
                best, best_ND = value, x_ND
        found.append(best)
    return found


def _into_ball(centre_ND: Tensor, radius: float, x_BND: Tensor) -> Tensor:
    """Inputs outside of the ball moved to its surface, along the line to the centre."""
    move_BND = x_BND - centre_ND
    length_B = move_BND.flatten(1).norm(dim=1).clamp(min=radius)
    # rounded inwards: the surface of a ball that is smaller by more than rounding
    factor_B = torch.where(length_B > radius, radius * (1 - 1e-12) / length_B, 1.0)
    return centre_ND + factor_B[:, None, None] * move_BND


def _push_through(function: Callable[[Tensor], Tensor], x_BND: Tensor, v_BND: Tensor) -> Tensor:
    """J(X) v of any function, differentiable in both X and v."""
    y_BND, pull, *_ = torch.func.vjp(function, x_BND)
    return _forward(pull, y_BND)(v_BND)[0]


def _ascend(
    value_and_gradient: "ValueAndGradient",
    x_BND: Tensor,
    steps: int,
    lr: float,
    record_every: int,
    mirrored_at: int | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
) -> Ascent:
    """Adam. mirrored_at: number of the token around which `mirrored` moves the others half-way; project: the way back
    into the set of allowed inputs after a step."""
    mean_BND, square_BND = torch.zeros_like(x_BND), torch.zeros_like(x_BND)
    best_B, best_BND = x_BND.new_full((len(x_BND),), -math.inf), x_BND.clone()
    recorded = {}
    for step in range(steps + 1):
        value_B, gradient_BND = value_and_gradient(x_BND)
        better_B = value_B > best_B
        best_B = torch.where(better_B, value_B, best_B)
        best_BND = torch.where(better_B[:, None, None], x_BND, best_BND)
        if step % record_every == 0 or step == steps:
            recorded[step] = best_B
        mean_BND = torch.lerp(gradient_BND, mean_BND, ADAM[0])
        square_BND = torch.lerp(gradient_BND.square(), square_BND, ADAM[1])
        root_BND = (square_BND / (1 - ADAM[1] ** (step + 1))).sqrt() + ADAM_EPSILON
        x_BND = x_BND + lr / (1 - ADAM[0] ** (step + 1)) * mean_BND / root_BND
        if mirrored_at is not None and step == steps // 2:
            x_BND, mean_BND = mirrored(x_BND, mirrored_at), torch.zeros_like(mean_BND)
        if project is not None:
            x_BND = project(x_BND)
    return Ascent(list(recorded), torch.stack(list(recorded.values())), best_BND)


ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]  # x_BND -> the value of each start (B,), its gradient


def _objective(layer: AttentionLayer, starts_BND: Tensor, p: str) -> ValueAndGradient:
    if p == "2":
        return _power_iteration(functools.partial(push, layer), starts_BND)
    if layer.kind == "l2" and layer.tied and layer.maps.w_q_HDK.shape == (1, 1, 1) and layer.seen_NM is None:
        return functools.partial(row_of_width_1, layer)
    return functools.partial(_largest_row, layer, widest_token(layer))


def _largest_row(layer: AttentionLayer, token: int, x_BND: Tensor) -> tuple[Tensor, Tensor]:
    x_BND = x_BND.detach().requires_grad_()
    value_B = rows_of_token(layer, x_BND, token).abs().sum((-2, -1)).amax(-1)
    return value_B.detach(), torch.autograd.grad(value_B.sum(), x_BND)[0]


def _power_iteration(push_through: Callable[[Tensor, Tensor], Tensor], starts_BND: Tensor) -> ValueAndGradient:
    """u^T J v, with one step of power iteration at each call. push_through: J(X) v from X and v."""
    v_BND = torch.ones_like(starts_BND) + starts_BND / (1 + starts_BND.abs().amax((1, 2), keepdim=True))
    v_BND = v_BND / v_BND.flatten(1).norm(dim=1)[:, None, None]

    def value_and_gradient(x_BND: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal v_BND
        x_BND, right_BND = x_BND.detach().requires_grad_(), v_BND.detach().requires_grad_()
        pushed_BND = push_through(x_BND, right_BND)
        length_B = pushed_BND.detach().flatten(1).norm(dim=1).clamp(min=torch.finfo(x_BND.dtype).tiny)
        left_BND = pushed_BND.detach() / length_B[:, None, None]
        gradient_BND, pulled_BND = torch.autograd.grad((left_BND * pushed_BND).sum(), (x_BND, right_BND))
        v_BND = pulled_BND / pulled_BND.flatten(1).norm(dim=1).clamp(min=1e-300)[:, None, None]
        return length_B, gradient_BND

    return value_and_gradient


def row_of_width_1(layer: AttentionLayer, x_BN1: Tensor) -> tuple[Tensor, Tensor]:
    """The absolute sum of one row of J for D = H = K = 1, tied l2, and its gradient, written out without autograd.

    With d = w (x - x_0) it is 1 + 2 F, F = sum_j P_j t_j, t_j = (2 d_j (d_j - m) - 1)^+, times |w^2 v o|.
    """
    w = layer.maps.w_q_HDK.item()
    factor = abs(layer.values_HDD.item())
    d_BN = w * (x_BN1 - x_BN1[:, :1])[..., 0]
    p_BN = (-d_BN.square()).softmax(-1)
    mean_B1 = (p_BN * d_BN).sum(-1, keepdim=True)
    raw_BN = 2 * d_BN * (d_BN - mean_B1) - 1
    counted_BN = (raw_BN > 0).to(d_BN)
    weighted_BN = p_BN * counted_BN
    f_B1 = (weighted_BN * raw_BN).sum(-1, keepdim=True)
    sum_B1 = (weighted_BN * d_BN).sum(-1, keepdim=True)
    gradient_BN = p_BN * (2 * d_BN * (f_B1 - counted_BN * raw_BN) + 2 * sum_B1 * raw_BN)
    gradient_BN += weighted_BN * (4 * d_BN - 2 * mean_B1)
    gradient_BN[:, 0] -= gradient_BN.sum(-1)
    return factor * (1 + 2 * f_B1[:, 0]), (2 * factor * w * gradient_BN)[..., None]


def mirrored(x_BN1: Tensor, token: int) -> Tensor:
    """Each token at its distance from the given one, on alternate sides in the order of the distances."""
    centre_B11 = x_BN1[:, token : token + 1]
    distance_BN = (x_BN1 - centre_B11).abs()[..., 0]
    order_BN = distance_BN.argsort(-1).argsort(-1)  # 0 is the given token itself
    return centre_B11 + (distance_BN * torch.where(order_BN % 2 == 1, 1.0, -1.0))[..., None]
