"""Norms, residual and singular values of matrices (..., N, D), such as sequences of tokens and attention matrices.

Input of float32 or float64 gives output of the same dtype.

Shapes: N row, D column, R singular value (R = min(N, D), largest first).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """x, in float32 if it has a coarser dtype, for which torch has no singular values."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def one_norm(x: Tensor) -> Tensor:
    """Operator norm ||X||_1, the largest column sum of |X|; shape (...)."""
    return x.abs().sum(-2).amax(-1)


def inf_norm(x: Tensor) -> Tensor:
    """Operator norm ||X||_inf, the largest row sum of |X|; shape (...)."""
    return x.abs().sum(-1).amax(-1)


def composite_norm(x: Tensor) -> Tensor:
    """Composite norm ||X||_{1,inf} = sqrt(||X||_1 ||X||_inf); shape (...). No triangle inequality. Dong et al. 2021."""
    # Two roots, because the product of two small norms can underflow: sqrt(1e-200 * 1e-200) is 0 in float64.
    return one_norm(x).sqrt() * inf_norm(x).sqrt()


def frobenius_norm(x: Tensor) -> Tensor:
    """Frobenius norm sqrt(sum X_ij^2); shape (...)."""
    return euclidean_norm(x.flatten(-2))


def euclidean_norm(x: Tensor) -> Tensor:
    """Euclidean norm over the last axis."""
    # Scaled first, because a collapsed residual is small enough for its squares to underflow (1e-23 in float32).
    scale = x.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    return scale.squeeze(-1) * torch.linalg.vector_norm(x / scale, dim=-1)


def cosine(x: Tensor, y: Tensor) -> Tensor:
    """<x, y> / (||x|| ||y||) over the last axis; nan if one of them is zero."""

    def usual(x: Tensor) -> Tensor:
        # torch's own cosine replaces norms below 1e-8 by 1e-8, and squares of large numbers overflow
        scale = x.abs().amax(-1, keepdim=True)
        return torch.where((scale > 1e-6) & (scale < 1e15), x, x / scale)

    return torch.cosine_similarity(usual(x), usual(y), dim=-1)


def without_absent(x: Tensor, present_BN: Tensor | None) -> Tensor:
    """x, (..., B, N, D), with zeros where there is no token; None: all tokens are present."""
    return x if present_BN is None else x * present_BN[..., None]


def spectral_norm(x: Tensor) -> Tensor:
    """||X||_2, the largest singular value by an exact SVD; shape (...). Power iteration would underestimate it."""
    return torch.linalg.matrix_norm(x, 2)


def residual_matrix(x: Tensor) -> Tensor:
    """Residual R = X - 1 x^T of each matrix, x its mean row, which minimises ||R||_F; shape (..., N, D), units of X.
    Dong et al. 2021, sec. 2.2."""
    differences = _from_first_row(x)
    return differences - differences.mean(-2, keepdim=True)


def residual_from_median(x: Tensor) -> Tensor:
    """Residual R = X - 1 x^T of each matrix, x the median of each column, which minimises each column sum, so also the
    largest, ||R||_1; shape (..., N, D), units of X."""
    differences = _from_first_row(x)
    # Middle of the median interval. torch.median would take its lower end, and then -X would not mirror X.
    ordered, num_rows = differences.sort(-2).values, x.shape[-2]
    low, high = (num_rows - 1) // 2, num_rows // 2
    return differences - (ordered[..., low : low + 1, :] + ordered[..., high : high + 1, :]) / 2


def _from_first_row(x: Tensor) -> Tensor:
    # In a nearly collapsed sequence these differences are exact (Sterbenz), so equal tokens have residual 0 instead of
    # the rounding error of their mean.
    return x - x[..., :1, :]


def own_rounding(x: Tensor) -> Tensor:
    """eps of x's dtype times ||X||_{1,inf}: the error that storing X can add to its residual, in units of X; (...).

    The error of computing X is larger: rankbench.measures.rounding.floor_of.
    """
    return torch.finfo(x.dtype).eps * composite_norm(x)


@dataclass(frozen=True)
class Spectrum:
    """Singular values s of a batch of matrices, relative to the largest because every rank is a function of s / s_1."""

    largest: Tensor  # (...), s_1
    relative: Tensor  # (..., R), s / s_1; nan for a zero matrix
    tolerance: float  # max(N, D) eps: a relative singular value below it is rounding error

    @classmethod
    def of(cls, x: Tensor) -> "Spectrum":
        # of X and not of the smaller X X^T, in which every s / s_1 below the square root of eps is lost
        s = torch.linalg.svdvals(x)
        return cls(s[..., 0], s / s[..., :1], max(x.shape[-2:]) * torch.finfo(x.dtype).eps)

    @classmethod
    def of_whole_and_residual(cls, x: Tensor, residual: Tensor) -> tuple["Spectrum", "Spectrum"]:
        """The spectra of X and of its `residual_matrix` R, in less time than one of them takes if X is wide.

        R^T and the mean row x in one QR decomposition: R^T = Q T and x = Q t. Then X^T = R^T + x 1^T = Q (T + t 1^T),
        so T and T + t 1^T, with one row more than columns, have the singular values of R and X. A Householder
        decomposition is as exact for each column as if it were alone, so a large x does not spoil those of a small R.
        """
        num_rows = x.shape[-2]
        if x.shape[-1] <= num_rows:
            return cls.of(x), cls.of(residual)
        t = torch.linalg.qr(torch.cat([residual, x.mean(-2, keepdim=True)], -2).mT, mode="r").R
        triangle = t[..., :num_rows]
        tolerance = x.shape[-1] * torch.finfo(x.dtype).eps
        spectra = map(torch.linalg.svdvals, (triangle + t[..., num_rows:], triangle))
        of_x, of_residual = (cls(s[..., 0], s / s[..., :1], tolerance) for s in spectra)
        return of_x, of_residual

    @property
    def second(self) -> Tensor:
        """s_2 / s_1; 0 for a single row or column. Shape (...)."""
        return self.relative[..., 1] if self.relative.shape[-1] > 1 else self.relative[..., 0] * 0

    @property
    def rank(self) -> Tensor:
        """Number of singular values above the tolerance, as NumPy's matrix_rank; 0 for a zero matrix. Shape (...)."""
        return (self.relative > self.tolerance).sum(-1).to(self.relative.dtype)

    @property
    def stable_rank(self) -> Tensor:
        """sum s^2 / s_1^2 = ||X||_F^2 / ||X||_2^2, in [1, R]; shape (...). Rudelson & Vershynin 2007."""
        return self.relative.square().sum(-1)

    @property
    def effective_rank(self) -> Tensor:
        """exp of the entropy of s / sum s, in [1, R]; shape (...). Roy & Vetterli 2007."""
        return torch.special.entr(self.relative / self.relative.sum(-1, keepdim=True)).sum(-1).exp()

    @property
    def of_gram(self) -> "Spectrum":
        """The spectrum of the Gram matrix X X^T, whose singular values are s^2."""
        return Spectrum(self.largest.square(), self.relative.square(), self.tolerance)
