"""Rank and collapse metrics of states: one formula for each CSV column.

A metric that is undefined for a sequence (0 / 0) is nan there, so that one all-zero sequence does not end an analysis.
Input of float32 or float64 gives output of the same dtype. Metrics are pure numbers unless a comment says otherwise.

Shapes: B batch, N token, D width, R singular value (R = min(N, D)).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rankbench.measures import norms
from rankbench.measures.norms import Spectrum

# The rounding error of a residual in its units, the same relative to the matrix, and whether the residual is no larger.
# Below its floor neither the residual nor any other metric in OF_RESIDUAL is a measurement.
STATE_FLOORS = ["noise_floor", "relative_noise_floor", "below_floor"]
ANTIPODAL = 0.9
COSINES_AT_A_TIME = 1 << 22
OF_RESIDUAL = ["residual", "relative_residual", "relative_residual_l1", "relative_residual_linf", "residual_frobenius"]
OF_RESIDUAL += ["relative_residual_frobenius", "high_frequency_energy", "effective_rank_centred"]
OF_RESIDUAL += ["effective_rank_squared_centred", "mean_cosine_centred", "attention_relative_residual"]


@dataclass(frozen=True)
class States:
    """A batch of sequences with what its metrics share: two singular value decompositions in all."""

    x_BND: Tensor
    residual_BND: Tensor
    spectrum: Spectrum
    spectrum_centred: Spectrum  # of the residual
    over_pairs: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, x_BND: Tensor) -> "States":
        residual_BND = norms.residual_matrix(x_BND)
        return cls(x_BND, residual_BND, Spectrum.of(x_BND), Spectrum.of(residual_BND), _over_pairs(x_BND))

    def relative(self, norm: Callable[[Tensor], Tensor]) -> Tensor:
        """||R|| / ||X||, (B,)."""
        return norm(self.residual_BND) / norm(self.x_BND)


def _high_frequency_energy(states: States) -> Tensor:
    """||R||_F / ||1 x^T||_F, all frequencies over the zero frequency; inf if the tokens' mean is zero."""
    of_mean_B = math.sqrt(states.x_BND.shape[-2]) * norms.euclidean_norm(states.x_BND.mean(-2))
    return norms.frobenius_norm(states.residual_BND) / of_mean_B


def _participation_ratio(states: States) -> Tensor:
    """(sum s^2)^2 / sum s^4, in [1, R], not centred: of the eigenvalues s^2 of X X^T."""
    energy_BR = states.spectrum.of_gram.relative
    return energy_BR.sum(-1).square() / energy_BR.square().sum(-1)


def _mean_cosine(x_BND: Tensor) -> Tensor:
    """Mean cosine over all pairs of distinct tokens, in [-1 / (N - 1), 1]; nan with fewer than two nonzero tokens.

    Pairs with a zero token have no angle and are left out.
    """
    norm_BN1 = norms.euclidean_norm(x_BND).unsqueeze(-1)
    unit_BND = x_BND / torch.where(norm_BN1 > 0, norm_BN1, 1)
    count_B = (norm_BN1 > 0).sum((-2, -1)).to(x_BND.dtype)
    # sum over i != j of u_i . u_j = ||sum_i u_i||^2 - sum_i ||u_i||^2: no N x N matrix.
    pairs_B = unit_BND.sum(-2).square().sum(-1) - unit_BND.square().sum((-2, -1))
    # One token leaves rounding error over 0, which would be infinite and not undefined.
    return torch.where(count_B > 1, pairs_B / (count_B * (count_B - 1)), math.nan)


def _over_pairs(x_BND: Tensor) -> tuple[Tensor, Tensor]:
    """Over all pairs of distinct nonzero tokens the mean |cosine| and the share of antipodal ones; nan without any."""
    above_NN = torch.ones(x_BND.shape[1], x_BND.shape[1], dtype=torch.bool, device=x_BND.device).triu(1)
    parts = []
    for sequences in x_BND.split(max(1, COSINES_AT_A_TIME // above_NN.numel())):
        norm_BN1 = norms.euclidean_norm(sequences).unsqueeze(-1)
        unit_BND = sequences / torch.where(norm_BN1 > 0, norm_BN1, 1)
        counts_BNN = (norm_BN1 > 0) & (norm_BN1 > 0).mT & above_NN
        cosine_BNN = unit_BND @ unit_BND.mT
        total_B = counts_BNN.sum((1, 2))
        sums = (cosine_BNN.abs() * counts_BNN).sum((1, 2)), ((cosine_BNN < -ANTIPODAL) & counts_BNN).sum((1, 2))
        parts.append([sum_B / total_B.to(x_BND.dtype) for sum_B in sums])  # 0 / 0 without a pair
    mean_B, share_B = (torch.cat(values) for values in zip(*parts, strict=True))
    return mean_B, share_B


def _mean_cosine_centred(states: States) -> Tensor:
    """Mean cosine of the tokens seen from their mean; -1 / (N - 1) when all are equally far from it."""
    norm_BN1 = norms.euclidean_norm(states.residual_BND).unsqueeze(-1)
    # A token at the mean is there up to rounding only, and rounding error has no direction: it is left out.
    rounding_B11 = states.x_BND.shape[-2] * torch.finfo(states.x_BND.dtype).eps * norm_BN1.amax(-2, keepdim=True)
    return _mean_cosine(states.residual_BND.masked_fill(norm_BN1 <= rounding_B11, 0))


# Column name -> formula, shape (B,). R = X - 1 x^T is the residual from the token mean x.
STATE_METRICS: dict[str, Callable[[States], Tensor]] = {
    "relative_residual": lambda states: states.relative(norms.composite_norm),  # Dong et al. 2021, sec. 2.2 and 4.1
    "residual": lambda states: norms.composite_norm(states.residual_BND),  # units of X; bounded by Dong et al., Thm 2.2
    "relative_residual_l1": lambda states: states.relative(norms.one_norm),  # the first factor of the composite norm
    "relative_residual_linf": lambda states: states.relative(norms.inf_norm),  # the second factor
    "relative_residual_frobenius": lambda states: states.relative(norms.frobenius_norm),  # in [0, 1]
    "residual_frobenius": lambda states: norms.frobenius_norm(states.residual_BND),  # units of X
    "high_frequency_energy": _high_frequency_energy,  # Wang et al. 2022, Anti-oversmoothing in vision transformers
    "stable_rank": lambda states: states.spectrum.stable_rank,
    "stable_rank_gram": lambda states: states.spectrum.of_gram.stable_rank,  # sum s^4 / s_1^4
    "effective_rank": lambda states: states.spectrum.effective_rank,
    "effective_rank_squared": lambda states: states.spectrum.of_gram.effective_rank,  # of s^2 / sum s^2
    "effective_rank_centred": lambda states: states.spectrum_centred.effective_rank,
    "effective_rank_squared_centred": lambda states: states.spectrum_centred.of_gram.effective_rank,  # the covariance's
    "participation_ratio": _participation_ratio,  # Bell & Dean 1970
    "numerical_rank": lambda states: states.spectrum.rank,
    "second_singular_ratio": lambda states: states.spectrum.second,
    "mean_cosine": lambda states: _mean_cosine(states.x_BND),  # Ethayarajh 2019
    "mean_cosine_centred": _mean_cosine_centred,
    # sign-blind, as second_singular_ratio is: rank one is no consensus where tokens are antipodal
    "mean_absolute_cosine": lambda states: states.over_pairs[0],
    "antipodal_share": lambda states: states.over_pairs[1],  # of pairs, cosine below -0.9
}


def state_metrics(x_BND: Tensor, lengths_B: Tensor | None = None, floor_B: Tensor | None = None) -> dict[str, Tensor]:
    """Every metric in STATE_METRICS by column name, each of shape (B,).

    lengths_B: how many tokens each sequence of a padded batch has; absent tokens are no part of any metric. floor_B:
    the error of each residual (rankbench.measures.rounding.noise_floors). With it the columns of STATE_FLOORS are there
    too; without it own_rounding, which knows nothing of the error of computing X.
    """
    values = per_length(_values, x_BND, lengths_B)
    return values if floor_B is None else with_floor(values, values["residual"], floor_B, "")


def _values(x_BND: Tensor) -> dict[str, Tensor]:
    check_floats("x_BND", x_BND, ("B", "N", "D"))
    states = States.of(x_BND)
    values = {name: formula(states) for name, formula in STATE_METRICS.items()}
    return values | {"own_rounding": norms.own_rounding(x_BND)}


def check_floats(name: str, x: Tensor, axes: tuple[str, ...]) -> None:
    """Raise ValueError unless x has these axes, none empty but the batch, and finite float32 or float64 entries."""
    if x.dim() != len(axes) or 0 in x.shape[1:]:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)}) with no empty axis but B")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: got {x.dtype}, allowed are torch.float32 and torch.float64; convert with .float()")
    if not x.isfinite().all():
        raise ValueError(f"{name}: got {(~x.isfinite()).sum().item()} nan or infinite entries, all must be finite")


def per_length(
    compute: Callable[[Tensor], dict[str, Tensor]], batch: Tensor, lengths_B: Tensor | None, axes: Sequence[int] = (1,)
) -> dict[str, Tensor]:
    """`compute` on a padded batch: the sequences of each length by themselves, their absent tokens cut off.

    lengths_B: how many tokens each sequence has, the absent ones behind them; None where all have all. axes: the token
    axes of `batch`.
    """
    if lengths_B is None:
        return compute(batch)
    values: dict[str, Tensor] = {}
    for length in lengths_B.unique().tolist():
        rows = (lengths_B == length).nonzero().squeeze(-1)
        sequences = batch[rows]
        for axis in axes:
            sequences = sequences.narrow(axis, 0, length)
        for name, value in compute(sequences).items():
            values.setdefault(name, value.new_empty(len(lengths_B), *value.shape[1:]))[rows] = value
    return values


def value_per_length(
    measure: Callable[[Tensor], Tensor], batch: Tensor, lengths_B: Tensor | None, axes: Sequence[int] = (1,)
) -> Tensor:
    """`per_length` of a single number for each sequence."""
    return per_length(lambda sequences: {"": measure(sequences)}, batch, lengths_B, axes)[""]


def with_floor(values: dict[str, Tensor], residual: Tensor, floor: Tensor, prefix: str) -> dict[str, Tensor]:
    """The values with the three columns of the noise floor in place of own_rounding."""
    own = values[f"{prefix}own_rounding"]
    size = own / torch.finfo(own.dtype).eps
    columns = {name: value for name, value in values.items() if name != f"{prefix}own_rounding"}
    columns[f"{prefix}noise_floor"] = floor
    columns[f"{prefix}relative_noise_floor"] = torch.where(size > 0, floor / size, math.nan)
    columns[f"{prefix}below_floor"] = residual <= floor
    return columns
