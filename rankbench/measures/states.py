"""Rank and collapse metrics of states: one formula for each CSV column.

A metric that is undefined for a sequence (0 / 0) is nan there, so that one all-zero sequence does not end an analysis.
Input of float32 or float64 gives output of the same dtype. Metrics are pure numbers unless a comment says otherwise.

Shapes: B batch, N token, D width, R singular value (R = min(N, D)).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rankbench.measures import norms
from rankbench.measures.norms import Spectrum

# The rounding error of a residual in its units, the same relative to the matrix, and whether the residual is no larger.
# Below its floor neither the residual nor any other metric in OF_RESIDUAL is a measurement.
STATE_FLOORS = ["noise_floor", "relative_noise_floor", "below_floor"]
ANTIPODAL = 0.9
COSINES_AT_A_TIME = 1 << 22
NUMBERS_AT_A_TIME = 1 << 19  # of states on a CPU: those and what is made of them stay in its cache
OF_RESIDUAL = ["residual", "relative_residual", "relative_residual_l1", "relative_residual_linf", "residual_frobenius"]
OF_RESIDUAL += ["relative_residual_frobenius", "high_frequency_energy", "effective_rank_centred"]
OF_RESIDUAL += ["effective_rank_squared_centred", "mean_cosine_centred", "attention_relative_residual"]


@dataclass(frozen=True)
class Matrices:
    """A batch of matrices, with quantities that several metrics need, each computed once."""

    x_BND: Tensor
    spectrum: Spectrum

    @cached_property
    def one_norm_B(self) -> Tensor:
        return norms.one_norm(self.x_BND)

    @cached_property
    def inf_norm_B(self) -> Tensor:
        return norms.inf_norm(self.x_BND)

    @cached_property
    def composite_norm_B(self) -> Tensor:
        return self.one_norm_B.sqrt() * self.inf_norm_B.sqrt()

    @cached_property
    def length_BN1(self) -> Tensor:
        """Euclidean norm of each token."""
        return norms.euclidean_norm(self.x_BND)[..., None]

    @cached_property
    def frobenius_norm_B(self) -> Tensor:
        """norms.frobenius_norm, from the lengths of the tokens."""
        return norms.euclidean_norm(self.length_BN1.squeeze(-1))

    @cached_property
    def unit_BND(self) -> Tensor:
        """Tokens of length 1; a zero token stays zero."""
        return self.x_BND / torch.where(self.length_BN1 > 0, self.length_BN1, 1)


@dataclass(frozen=True)
class States:
    """A batch of sequences and their residuals from the token mean."""

    whole: Matrices
    residual: Matrices

    @classmethod
    def of(cls, x_BND: Tensor) -> "States":
        residual_BND = norms.residual_matrix(x_BND)
        return cls(*map(Matrices, (x_BND, residual_BND), Spectrum.of_whole_and_residual(x_BND, residual_BND)))

    def relative(self, norm: str) -> Tensor:
        """||R|| / ||X||, (B,)."""
        return getattr(self.residual, norm) / getattr(self.whole, norm)

    @cached_property
    def over_pairs(self) -> tuple[Tensor, Tensor]:
        """Mean |cosine| and share of antipodal pairs, over all pairs of distinct nonzero tokens; nan if there are
        none."""
        unit_BND, nonzero_BN1 = self.whole.unit_BND, self.whole.length_BN1 > 0
        above_NN = torch.ones(unit_BND.shape[1], unit_BND.shape[1], dtype=torch.bool, device=unit_BND.device).triu(1)
        at_a_time, parts = max(1, COSINES_AT_A_TIME // above_NN.numel()), []
        for units, nonzero in zip(unit_BND.split(at_a_time), nonzero_BN1.split(at_a_time), strict=True):
            counts_BNN, cosine_BNN = nonzero & nonzero.mT & above_NN, units @ units.mT
            total_B = counts_BNN.sum((1, 2))
            sums = (cosine_BNN.abs() * counts_BNN).sum((1, 2)), ((cosine_BNN < -ANTIPODAL) & counts_BNN).sum((1, 2))
            parts.append([sum_B / total_B.to(unit_BND.dtype) for sum_B in sums])  # 0 / 0 without a pair
        mean_B, share_B = (torch.cat(values) for values in zip(*parts, strict=True))
        return mean_B, share_B


def _high_frequency_energy(states: States) -> Tensor:
    """||R||_F / ||1 x^T||_F, all frequencies over the zero frequency; inf if the tokens' mean is zero."""
    x_BND = states.whole.x_BND
    of_mean_B = math.sqrt(x_BND.shape[-2]) * norms.euclidean_norm(x_BND.mean(-2))
    return states.residual.frobenius_norm_B / of_mean_B


def _participation_ratio(states: States) -> Tensor:
    """(sum s^2)^2 / sum s^4, in [1, R], not centred: of the eigenvalues s^2 of X X^T."""
    energy_BR = states.whole.spectrum.of_gram.relative
    return energy_BR.sum(-1).square() / energy_BR.square().sum(-1)


def _mean_cosine(unit_BND: Tensor, nonzero_BN1: Tensor) -> Tensor:
    """Mean cosine over all pairs of distinct nonzero tokens, in [-1 / (N - 1), 1]; nan if there are none."""
    count_B = nonzero_BN1.sum((-2, -1)).to(unit_BND.dtype)
    # sum over i != j of u_i . u_j = ||sum_i u_i||^2 - sum_i ||u_i||^2: no N x N matrix.
    pairs_B = unit_BND.sum(-2).square().sum(-1) - unit_BND.square().sum((-2, -1))
    # One token leaves rounding error over 0, which would be infinite and not undefined.
    return torch.where(count_B > 1, pairs_B / (count_B * (count_B - 1)), math.nan)


def _mean_cosine_centred(states: States) -> Tensor:
    """Mean cosine of the tokens seen from their mean; -1 / (N - 1) when all are equally far from it."""
    length_BN1, x_BND = states.residual.length_BN1, states.whole.x_BND
    # A token at the mean differs from it by rounding error alone, which has no direction: it is left out.
    rounding_B11 = x_BND.shape[-2] * torch.finfo(x_BND.dtype).eps * length_BN1.amax(-2, keepdim=True)
    has_angle_BN1 = length_BN1 > rounding_B11
    return _mean_cosine(states.residual.unit_BND.masked_fill(~has_angle_BN1, 0), has_angle_BN1)


# Column name -> formula, shape (B,). R = X - 1 x^T is the residual from the token mean x.
STATE_METRICS: dict[str, Callable[[States], Tensor]] = {
    "relative_residual": lambda states: states.relative("composite_norm_B"),  # Dong et al. 2021, sec. 2.2 and 4.1
    "residual": lambda states: states.residual.composite_norm_B,  # units of X; bounded by Dong et al., Thm 2.2
    "relative_residual_l1": lambda states: states.relative("one_norm_B"),  # the first factor of the composite norm
    "relative_residual_linf": lambda states: states.relative("inf_norm_B"),  # the second factor
    "relative_residual_frobenius": lambda states: states.relative("frobenius_norm_B"),  # in [0, 1]
    "residual_frobenius": lambda states: states.residual.frobenius_norm_B,  # units of X
    "high_frequency_energy": _high_frequency_energy,  # Wang et al. 2022, Anti-oversmoothing in vision transformers
    "stable_rank": lambda states: states.whole.spectrum.stable_rank,
    "stable_rank_gram": lambda states: states.whole.spectrum.of_gram.stable_rank,  # sum s^4 / s_1^4
    "effective_rank": lambda states: states.whole.spectrum.effective_rank,
    "effective_rank_squared": lambda states: states.whole.spectrum.of_gram.effective_rank,  # of s^2 / sum s^2
    "effective_rank_centred": lambda states: states.residual.spectrum.effective_rank,
    # the covariance's
    "effective_rank_squared_centred": lambda states: states.residual.spectrum.of_gram.effective_rank,
    "participation_ratio": _participation_ratio,  # Bell & Dean 1970
    "numerical_rank": lambda states: states.whole.spectrum.rank,
    "second_singular_ratio": lambda states: states.whole.spectrum.second,
    "mean_cosine": lambda states: _mean_cosine(states.whole.unit_BND, states.whole.length_BN1 > 0),  # Ethayarajh 2019
    "mean_cosine_centred": _mean_cosine_centred,
    # sign-blind, as second_singular_ratio is: rank one is not a consensus if tokens are antipodal
    "mean_absolute_cosine": lambda states: states.over_pairs[0],
    "antipodal_share": lambda states: states.over_pairs[1],  # of pairs, cosine below -0.9
}


def state_metrics(x_BND: Tensor, lengths_B: Tensor | None = None, floor_B: Tensor | None = None) -> dict[str, Tensor]:
    """Every metric in STATE_METRICS by column name, each of shape (B,).

    lengths_B: number of tokens of each sequence of a padded batch; absent tokens enter no metric. floor_B: the error of
    each residual (rankbench.measures.rounding.floor_of), for the columns STATE_FLOORS.
    """
    values = per_length(_values, x_BND, lengths_B)
    size_B = values.pop("size")
    return values if floor_B is None else values | floor_columns(values["residual"], size_B, floor_B, "")


def _values(x_BND: Tensor) -> dict[str, Tensor]:
    check_floats("x_BND", x_BND, ("B", "N", "D"))
    at_a_time = NUMBERS_AT_A_TIME if x_BND.device.type == "cpu" else x_BND.numel()
    parts = []
    for sequences in x_BND.split(max(1, at_a_time // x_BND[:1].numel())) if len(x_BND) else [x_BND]:
        states = States.of(sequences)
        parts.append({name: formula(states) for name, formula in STATE_METRICS.items()})
        parts[-1]["size"] = states.whole.composite_norm_B
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


class NotFinite(ValueError):
    """Numbers of a network that have overflowed, or that nothing defines."""


def check_floats(name: str, x: Tensor, axes: tuple[str, ...]) -> None:
    """Raise ValueError unless x has these axes, none empty but the batch, and float32 or float64 entries; NotFinite
    if one of them is not finite: the network's numbers have overflowed."""
    if x.dim() != len(axes) or 0 in x.shape[1:]:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)}) with no empty axis but B")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: got {x.dtype}, allowed are torch.float32 and torch.float64; convert with .float()")
    if not x.isfinite().all():
        count = (~x.isfinite()).sum().item()
        raise NotFinite(f"{name}: got {count} nan or infinite entries, all must be finite; check inputs and weights")


def per_length(
    compute: Callable[[Tensor], dict[str, Tensor]], x_BND: Tensor, lengths_B: Tensor | None
) -> dict[str, Tensor]:
    """Run `compute` on the sequences of each length separately, with their absent tokens, which come last, cut off.
    lengths_B: number of tokens that are present; None: all. Sequences without a token have nan."""
    if lengths_B is None:
        return compute(x_BND)
    return per_kind(lambda rows, length: compute(x_BND[rows, :length]) if length else {}, lengths_B[:, None])


def value_per_length(measure: Callable[[Tensor], Tensor], x_BND: Tensor, lengths_B: Tensor | None) -> Tensor:
    """`per_length` of a single number for each sequence."""
    return per_length(lambda sequences: {"": measure(sequences)}, x_BND, lengths_B)[""]


def per_kind(compute: Callable[..., dict[str, Tensor]], kinds_BC: Tensor) -> dict[str, Tensor]:
    """Values of all sequences, (B, ...), from `compute(rows, *kind)` for each set of rows with the same C numbers; nan
    where it has none."""
    values: dict[str, Tensor] = {}
    kinds, kind_B = kinds_BC.unique(dim=0, return_inverse=True)
    for number, kind in enumerate(kinds.tolist()):
        rows = (kind_B == number).nonzero().squeeze(-1)
        for name, value in compute(rows, *kind).items():
            nothing = math.nan if value.is_floating_point() else 0
            values.setdefault(name, value.new_full((len(kinds_BC), *value.shape[1:]), nothing))[rows] = value
    return values


def floor_columns(residual: Tensor, size: Tensor, floor: Tensor, prefix: str) -> dict[str, Tensor]:
    """STATE_FLOORS of matrices of this size."""
    columns = (floor, torch.where(size > 0, floor / size, math.nan), residual <= floor)
    return {f"{prefix}{name}": column for name, column in zip(STATE_FLOORS, columns, strict=True)}
