"""Residual coordinates: the distance of the tokens from their mean, followed far below floating point.

Attention alone shrinks the residual doubly exponentially (Dong et al. 2021, Theorem 2.2): after a few layers it is
less than the rounding of the tokens, and no forward pass shows it. So the tokens are held as

    x_i = exp(l) m + exp(l') r_i,    sum_i r_i = 0,    the largest entries of m and of all r_i of size 1,

and every part of the network is written as a map of these (rankbench.measures.residual_propagation), without a
difference of nearly equal numbers: float64 then follows a residual of 1e-1000000 as exactly as one of 1. Every formula
is exact, not an expansion: a limit is taken only where the next term is below rounding. What is lost is what float64
always loses: about 1e-16 of the largest entry of a layer's residual, or of its largest summand where heads, skip and
value maps cancel. If some tokens have merged and others have not, differences of the merged ones below that are lost,
and a later layer that merges the others shows too small a residual.

The mean is as exact, with one exception: if the terms that make it cancel (tokens that are mirror images of one
another), all that is left of it is rounding. A residual that collapses after that would seem small compared with a mean
that is not there. `residual_propagation.mean_errors` says how much of the mean can come from rounding.

Shapes: B batch, N token, D width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.measures.norms import composite_norm


class ScaledMatrix(NamedTuple):
    """exp(log) times a matrix whose largest entry is 1, for each sequence; a matrix of zeros has log -inf.

    -inf also stands for a logarithm that float64 cannot hold, after some 640 cubings.
    """

    log_B: Tensor  # natural
    matrix_BND: Tensor

    @property
    def value_BND(self) -> Tensor:
        """The matrix itself, as far as float64 holds it."""
        return self.log_B.exp()[:, None, None] * self.matrix_BND

    def by(self, factor: float) -> "ScaledMatrix":
        """The matrix times a number, in the same scale."""
        return ScaledMatrix(self.log_B, factor * self.matrix_BND)


class ResidualState(NamedTuple):
    """Tokens mean + rows. Absent tokens of a padded batch have rows of zero and enter no mean."""

    mean: ScaledMatrix  # (B, 1, D)
    rows: ScaledMatrix  # of mean zero


def residual_coordinates(x_BND: Tensor, present_BN: Tensor | None = None) -> ResidualState:
    """The tokens in residual coordinates."""
    present_BN1 = None if present_BN is None else present_BN[..., None]
    mean = scaled(_mean(x_BND if present_BN1 is None else torch.where(present_BN1, x_BND, 0), present_BN1))
    # as differences from the first token, so that equal tokens have residual 0 and not the rounding of their mean
    return ResidualState(mean, recentred(mean, x_BND.new_zeros(len(x_BND)), x_BND - x_BND[:, :1], present_BN).rows)


def tokens(state: ResidualState) -> Tensor:
    """The tokens X themselves, (B, N, D), as far as float64 holds them; absent ones are meaningless."""
    return state.mean.value_BND + state.rows.value_BND


def log_residual(state: ResidualState, counted_BN: Tensor | None = None) -> Tensor:
    """log ||R||_{1,inf}, natural; shape (B,); -inf for equal tokens. counted_BN: the tokens that R covers, about their
    own mean; None: all present tokens."""
    unit_BND = state.rows.matrix_BND
    if counted_BN is not None:
        kept_BN1 = counted_BN[..., None]
        mean_B1D = (unit_BND * kept_BN1).sum(1, keepdim=True) / kept_BN1.sum(1, keepdim=True)
        unit_BND = (unit_BND - mean_B1D) * kept_BN1
    return state.rows.log_B + composite_norm(unit_BND).log()


def log_size(state: ResidualState, counted_BN: Tensor | None = None, without_mean_B: Tensor | None = None) -> Tensor:
    """log ||X||_{1,inf}, natural; shape (B,). counted_BN: the tokens in X; None: all. without_mean_B: where
    true, X is without its mean."""
    kept_BN1 = 1 if counted_BN is None else counted_BN[..., None]

    def log_norm_B(x: ScaledMatrix) -> Tensor:
        return x.log_B + composite_norm(x.matrix_BND * kept_BN1).log()

    size_B = log_norm_B(scaled_sum(state.mean, state.rows))
    return size_B if without_mean_B is None else torch.where(without_mean_B, log_norm_B(state.rows), size_B)


def _mean(x_BND: Tensor, present_BN1: Tensor | None) -> Tensor:
    """Mean token (B, 1, D) in twice the digits (Knuth's two-sum), exact also if tokens nearly cancel."""
    total_BD, lost_BD = torch.zeros_like(x_BND[:, 0]), torch.zeros_like(x_BND[:, 0])
    for x_BD in x_BND.unbind(1):
        sum_BD = total_BD + x_BD
        added_BD = sum_BD - total_BD
        lost_BD = lost_BD + (total_BD - (sum_BD - added_BD)) + (x_BD - added_BD)
        total_BD = sum_BD
    number = x_BND.shape[1] if present_BN1 is None else present_BN1.sum(1, keepdim=True)
    return (total_BD + lost_BD)[:, None] / number


def recentred(mean: ScaledMatrix, log_scale_B: Tensor, rows_BND: Tensor, present_BN: Tensor | None) -> ResidualState:
    """Tokens mean + exp(log_scale) rows, whatever the mean of the rows."""
    if present_BN is None:
        average_B1D = rows_BND.mean(1, keepdim=True)
        rows_BND = rows_BND - average_B1D
    else:
        present_BN1 = present_BN[..., None]
        average_B1D = torch.where(present_BN1, rows_BND, 0).sum(1, keepdim=True) / present_BN1.sum(1, keepdim=True)
        rows_BND = torch.where(present_BN1, rows_BND - average_B1D, 0)
    return ResidualState(scaled_sum(mean, ScaledMatrix(log_scale_B, average_B1D)), scaled(rows_BND, log_scale_B))


def scaled(x_BND: Tensor, log_B: Tensor | float = 0.0) -> ScaledMatrix:
    """exp(log) X with the size of X moved into the logarithm."""
    size_B = x_BND.abs().amax((1, 2))
    return ScaledMatrix(log_B + size_B.log(), x_BND / torch.where(size_B > 0, size_B, 1)[:, None, None])


def scaled_sum(a: ScaledMatrix, b: ScaledMatrix) -> ScaledMatrix:
    """A + B, in the scale of the sum."""
    (log_a_B, a_BND), (log_b_B, b_BND) = (scaled(x_BND, log_B) for log_B, x_BND in (a, b))
    log_B = torch.maximum(log_a_B, log_b_B)
    finite_B = torch.where(log_B > -math.inf, log_B, 0)  # both are zero: any scale will do
    share_a_B11, share_b_B11 = ((x_B - finite_B).exp()[:, None, None] for x_B in (log_a_B, log_b_B))
    return scaled(share_a_B11 * a_BND + share_b_B11 * b_BND, log_B)


def times(x: ScaledMatrix, w: Tensor, bias: Tensor | None = None) -> ScaledMatrix:
    """X W^T + bias, as in torch.nn.Linear."""
    product = scaled(x.matrix_BND @ w.T, x.log_B)
    return product if bias is None else scaled_sum(product, scaled(bias.expand_as(product.matrix_BND)))
