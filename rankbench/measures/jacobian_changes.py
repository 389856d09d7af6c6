"""Bounds on the change of an elementary operation's Jacobian while its input moves: norm, activation, softmax, product.

With z = z(x) an operation's input, G its Jacobian in x and z_0 its value at the centre of a ball, they bound
||(J(z) - J(z_0)) G||_2 from bounds on how far z moves and on ||G||_2. Each bound grows with these.

Shapes: N query token, M key token, H head.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.model.mlp import GATES, TANH_CUBE, TANH_RATE

# ||D^2 (y / ||y||)|| at ||y|| = 1: the maximum of sqrt((1 - a^2) (1 + 3 a^2)), a = y . u with u the direction
CURVATURE_OF_SPHERE = 2 / math.sqrt(3)
# where the derivative of an activation has its extrema: gelu'' = (2 - z^2) phi(z)
EXTREMA_OF_SLOPE = {"gelu": (-math.sqrt(2), math.sqrt(2))}
SLOPES: dict[str, Callable[[Tensor], Tensor]] = {  # derivatives of activations
    "relu": GATES["relu"],
    "gelu": lambda z: GATES["gelu"](z) + z * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi),
    "gelu_new": lambda z: (
        GATES["gelu_new"](z) * (1 + z * GATES["gelu_new"](-z) * (TANH_RATE * (1 + 3 * TANH_CUBE * z.square())))
    ),
}


class Reach(NamedTuple):
    """Bounds on ||dz/dx||_2 and ||z(x) - z(x_0)||_2 of a value z(x) on a ball: of all of it, or of its blocks."""

    slope: Tensor
    move: Tensor


def norm_change(length_N: Tensor, floor: float, gain: float, move_N: Tensor, shrinking_N: Tensor) -> Tensor:
    """Bound on ||J(c) - J(c_0)||_2 of c -> gain c / sqrt(||c||^2 + floor^2), a norm's, for ||c - c_0|| <= move; (N,).

    length_N: ||c_0||. shrinking_N: bound on the part of the move against c_0, without which no token gets shorter. With
    y = (c, floor), the map is the first part of y -> gain y / ||y||, whose second derivative has the norm gain
    (2 / sqrt 3) / ||y||^2. Along the way from y_0 its integral is at most that with ||y|| = ||y_0|| - t move, and at
    most the move times its value at the smallest ||y||. Both Jacobians have eigenvalues from 0 to gain / min ||y||.
    """
    first_N = (length_N.square() + floor**2).sqrt()
    least_N = ((length_N - torch.minimum(move_N, shrinking_N)).clamp(min=0).square() + floor**2).sqrt()
    straight_N = torch.where(move_N < first_N, move_N / (first_N * (first_N - move_N)), torch.inf)
    bent_N = CURVATURE_OF_SPHERE * torch.minimum(straight_N, move_N / least_N.square())
    return gain * torch.minimum(bent_N, 1 / least_N)


def activation_change(activation: str, z: Tensor, move: Tensor) -> Tensor:
    """Largest change of the activation's derivative from its value at z while z moves by at most `move`; exact."""
    if activation == "relu":
        return (z.abs() <= move).to(z)
    slope_of = SLOPES[activation]
    ends = [z - move, z + move]
    # an extremum that is out of reach counts as z itself, where the change is 0
    inside = [torch.where((z - at).abs() <= move, at, z) for at in EXTREMA_OF_SLOPE[activation]]
    changes = [(slope_of(u) - slope_of(z)).abs() for u in ends + inside]
    return torch.stack(changes).amax(0)


def softmax_change(p_HNM: Tensor, entries_HNM: Reach, rows_HN: Reach) -> tuple[Tensor, Tensor]:
    """Bounds on ||diag(P_0)^-1/2 (J(s) - J(s_0)) G||_2 of each row's softmax, P_0 = p_HNM; both (H, N).

    The first is the factor of the row's own slope (rows_HN.slope), so that the largest factor also bounds all rows
    together. The second is for each row alone, and at least as good. entries_HNM: of each centred score s - P_0 s, 0
    where the query does not see the key. rows_HN: of each row diag(P_0)^1/2 (s - P_0 s).

    Proof. D^2 p[u, v]_j = p_j (u_j v_j - sum_k p_k u_k v_k), u and v centred with p. Centred with P_0 they have sum_j
    P_0j e^u_j >= 1 (Jensen), so p / P_0 lies between E^-2 and E = exp(max |u_j|), and centring with p in place of P_0
    moves u and v by at most chi = max |p / P_0 - 1| times their weighted norms. The norm asked for is at most E^1/2
    sd_p(u v) <= E (sum_j P_0j u_j^2 v_j^2)^1/2, and with max |u_j| taken out E max |u_j| times the weighted norm of v.
    """
    largest_HN = entries_HNM.move.amax(-1)
    ratio_HN = largest_HN.exp()
    chi_HN = torch.maximum(ratio_HN - 1, 1 - ratio_HN**-2)
    factor_HN = ratio_HN * (largest_HN + chi_HN * rows_HN.move)
    u_HNM = entries_HNM.move + (chi_HN * rows_HN.move)[..., None]
    v_HNM = entries_HNM.slope + (chi_HN * rows_HN.slope)[..., None]
    by_entry_HN = ratio_HN * (p_HNM * (u_HNM * v_HNM).square()).sum(-1).sqrt()
    return factor_HN, torch.minimum(factor_HN * rows_HN.slope, by_entry_HN)


def product_change(a: Reach, b: Reach) -> Tensor:
    """Bound on the change of the Jacobian of a product that is linear in a and in b, such as q k^T or P v.

    It is (a - a_0) db + da (b - b_0), in Frobenius norms of the product.
    """
    return a.move * b.slope + a.slope * b.move
