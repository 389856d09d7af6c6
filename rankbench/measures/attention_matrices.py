"""Rank and collapse metrics of attention matrices P: one formula for each CSV column.

As in rankbench.measures.states, a metric is nan where it is undefined, and keeps the dtype of P. Where the rows of P
are not probabilities, metrics are those of its `shares`.

Shapes: B batch, H head, N query token, M key token.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rankbench.measures.norms import Spectrum, composite_norm, residual_matrix
from rankbench.measures.states import STATE_FLOORS, check_floats, floor_columns, per_kind

ATTENTION_METRICS = ["attention_entropy", "attention_stable_rank", "attention_effective_rank"]
ATTENTION_METRICS += ["attention_relative_residual", "attention_gap_eigenvalue", "attention_gap_singular"]
# Error of a row's sum up to which it counts as 1: a softmax computed in bfloat16 has 8 bits.
SUM_ERROR = 0.01
ATTENTION_FLOORS = [f"attention_{name}" for name in STATE_FLOORS]
Rows = Tensor | slice


def shares(p_BHNM: Tensor) -> Tensor:
    """P with each row divided by its sum, which says where a query reads, not how much. A row of zeros stays as it is,
    and so does a P with a negative entry."""
    sums_BHN1 = p_BHNM.sum(-1, keepdim=True)
    return torch.where(is_signed(p_BHNM)[..., None, None] | (sums_BHN1 == 0), p_BHNM, p_BHNM / sums_BHN1)


def is_signed(p_BHNM: Tensor) -> Tensor:
    """Whether P has a negative entry, (B, H) bool."""
    return (p_BHNM < 0).flatten(-2).any(-1)


def is_chain(p_BHNM: Tensor) -> Tensor:
    """Whether the shares of P are probabilities in every row, (B, H) bool."""
    return p_BHNM.any(-1).all(-1) & ~is_signed(p_BHNM)


def mean_of_rows(x: Tensor, p_BHNM: Tensor) -> Tensor:
    """Mean of x, (B, H, ..., N), over the rows of P that are not zero: the queries that read; nan if there is none."""
    reads = p_BHNM.any(-1).view(*p_BHNM.shape[:2], *[1] * (x.dim() - 3), p_BHNM.shape[-2])
    return x.mean(-1) if reads.all() else x.where(reads, math.nan).nanmean(-1)


def _entropy(p_BHNM: Tensor, visible: Tensor | None) -> Tensor:
    """Row entropy (nats) over log of the number of visible keys, its maximum; mean over rows, in [0, 1].

    1 for uniform attention over the visible keys, whatever the mask; 0 for attention to one key. A row that sees one
    key is left out: its entropy 0 is also its maximum log 1. nan if no query sees two keys.
    """
    visible = torch.ones_like(p_BHNM, dtype=torch.bool) if visible is None else visible
    num_visible = visible.sum(-1)
    relative_BHN = torch.special.entr(p_BHNM).sum(-1) / num_visible.to(p_BHNM.dtype).log()
    return relative_BHN.where((num_visible > 1) & p_BHNM.any(-1), math.nan).nanmean(-1)


def spectral_gap(p_BHNM: Tensor) -> Tensor:
    """1 - |lambda_2| of square P, the Markov chain's spectral gap, in [0, 1]; 1 for a single token. Shape (B, H).

    Equals the gap of singular values for symmetric P, not in general. nan for N != M.
    """
    if p_BHNM.shape[-2] != p_BHNM.shape[-1]:
        return torch.full_like(p_BHNM[..., 0, 0], math.nan)
    # The eigenvalues of causal P are its diagonal. A solver would cost more and be inexact: P is far from normal.
    is_causal = (p_BHNM.triu(1) == 0).all()
    modulus_BHN = p_BHNM.diagonal(dim1=-2, dim2=-1) if is_causal else _eigenvalue_moduli(p_BHNM)
    if modulus_BHN.shape[-1] == 1:
        return torch.ones_like(modulus_BHN[..., 0])
    return 1 - modulus_BHN.sort(-1, descending=True).values[..., 1]


def gap_eigenvalue(p_BHNM: Tensor, stochastic: bool) -> Tensor:
    """`spectral_gap` of P if its rows are probabilities, else of its shares; nan if these are none. Shape (B, H)."""
    return spectral_gap(p_BHNM) if stochastic else spectral_gap(shares(p_BHNM)).where(is_chain(p_BHNM), math.nan)


def beside_independent(p_BHNM: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Second values of P, without a mask, over the law's for independent weights with the same s; (B, H).

    For independent weights before rows are divided by their sums sqrt(N) sigma_2 tends to 2 s and sqrt(N) |lambda_2| to
    s, s^2 the variance of the weights over the square of their mean (Bordenave, Caputo and Chafai 2012).

    s^2: M times the mean over rows of sum_j (P_ij - 1/M)^2. singular_over_law: sigma_2 over s (1/sqrt(M) + sqrt(N)/M),
    which is 2 s/sqrt(N) for N = M. eigenvalue_over_law: |lambda_2| over s/sqrt(N), nan for N != M. shuffled_over_law:
    singular_over_law with the weights of each row in a random order, which makes them independent of one another. Its
    distance from 1 shows the effect of a finite N and of heavy tails on the law. nan if all weights are equal.
    """
    num_queries, num_keys = p_BHNM.shape[-2:]
    deviation_BH = (p_BHNM - 1 / num_keys).square().sum(-1).mean(-1).mul(num_keys).sqrt()
    unequal_BH = torch.where(deviation_BH > 0, deviation_BH, math.nan)
    edge_BH = unequal_BH * (num_keys**-0.5 + num_queries**0.5 / num_keys)
    order = torch.rand(p_BHNM.shape, generator=generator).argsort(-1).to(p_BHNM.device)
    second_BH, shuffled_BH = (torch.linalg.svdvals(w)[..., 1] for w in (p_BHNM, p_BHNM.gather(-1, order)))
    return {
        "singular_over_law": second_BH / edge_BH,
        "shuffled_over_law": shuffled_BH / edge_BH,
        "eigenvalue_over_law": (1 - spectral_gap(p_BHNM)) * num_queries**0.5 / unequal_BH,
    }


def _eigenvalue_moduli(p_BHNM: Tensor) -> Tensor:
    """|lambda| of each matrix, (B, H, N); nan for one on which the solver does not converge."""
    try:
        return torch.linalg.eigvals(p_BHNM).abs()
    except torch.linalg.LinAlgError:
        if p_BHNM[..., 0, 0].numel() == 1:
            return torch.full_like(p_BHNM[..., 0], math.nan)
        moduli = [_eigenvalue_moduli(p_NM[None, None])[0, 0] for p_NM in p_BHNM.flatten(0, 1)]
        return torch.stack(moduli).view(p_BHNM.shape[:-1])


def attention_metrics(
    p_BHNM: Tensor,
    visible: Tensor | None = None,
    lengths_B: Tensor | None = None,
    counted_BN: Tensor | None = None,
    floor_BH: Tensor | None = None,
    stochastic: bool = True,
) -> dict[str, Tensor]:
    """Every metric in ATTENTION_METRICS by column name, each of shape (B, H).

    visible: which keys each query sees, (N, M) or (B, H, N, M); None: all. lengths_B: number of tokens of each sequence
    of a padded batch, which are queries and keys. counted_BN: queries over whose rows metrics are taken; None: all.
    attention_gap_eigenvalue needs a square P and takes all rows. floor_BH: the error of each P's residual
    (rankbench.measures.rounding.floor_of_weights), for the columns ATTENTION_FLOORS. stochastic: whether rows are
    probabilities; if not, all this is about the shares of P, and entropy and gaps are nan where it has none.
    """

    def of_queries(rows: Rows, length: int, queries: Rows) -> dict[str, Tensor]:
        last = p_BHNM.shape[-2] if lengths_B is None else length
        seen = None if visible is None else visible[..., :last, :length][..., queries, :]
        return _values(p_BHNM[rows][..., :last, :length], queries, seen, stochastic)

    values = per_queries(of_queries, p_BHNM.shape[-1], lengths_B, counted_BN)
    residual_BH, size_BH = values.pop("residual"), values.pop("size")
    return values if floor_BH is None else values | floor_columns(residual_BH, size_BH, floor_BH, "attention_")


def per_queries(
    compute: Callable[[Rows, int, Rows], dict[str, Tensor]],
    num_tokens: int,
    lengths_B: Tensor | None,
    counted_BN: Tensor | None,
    num_queries: int | None = None,
) -> dict[str, Tensor]:
    """Run `compute(rows, length, queries)` for each group of sequences with one length and the same counted tokens.

    lengths_B: number of tokens of each sequence, before any absent ones; None: all have num_tokens. counted_BN: mask of
    the tokens that count; None: all present ones. queries: slice(None) if all tokens of the sequence count.
    num_queries: of cross-attention, whose tokens are its keys: the number of its queries, about which counted_BN is.
    Sequences without a key or a query, as windows of padding alone, have nan.
    """
    if lengths_B is None:
        if counted_BN is None:
            return compute(slice(None), num_tokens, slice(None))
        lengths_B = counted_BN.new_full(counted_BN.shape[:1], num_tokens, dtype=torch.long)
    if counted_BN is None:
        counted_BN = lengths_B.new_empty(len(lengths_B), 0)

    def of_kind(rows: Tensor, length: int, *is_counted: int) -> dict[str, Tensor]:
        queries = [query for query, counts in enumerate(is_counted[: num_queries or length]) if counts]
        if not length or (is_counted and not queries):
            return {}
        are_all = not is_counted or len(queries) == (num_queries or length)
        return compute(rows, length, slice(None) if are_all else torch.tensor(queries, device=rows.device))

    return per_kind(of_kind, torch.cat([lengths_B[:, None], counted_BN.long()], dim=1))


def _values(square_BHNM: Tensor, queries: Rows, visible: Tensor | None, stochastic: bool) -> dict[str, Tensor]:
    p_BHNM = square_BHNM[..., queries, :]
    check_floats("p_BHNM", p_BHNM, ("B", "H", "N", "M"))
    shares_BHNM = p_BHNM if stochastic else shares(p_BHNM)
    residual_BH, size_BH = composite_norm(residual_matrix(shares_BHNM)), composite_norm(shares_BHNM)
    spectrum = Spectrum.of(shares_BHNM)
    values = {
        "attention_entropy": _entropy(shares_BHNM, visible),
        "attention_stable_rank": spectrum.stable_rank,
        "attention_effective_rank": spectrum.effective_rank,
        "attention_relative_residual": residual_BH / size_BH,  # 0 if all queries attend alike
        "attention_gap_eigenvalue": gap_eigenvalue(square_BHNM, stochastic),  # Levin et al. 2009, ch. 12
        # s_1 - s_2; s_1 if there is no s_2. s_1 itself can exceed 1. Without shares it would measure how much is read.
        "attention_gap_singular": spectrum.largest * (1 - spectrum.second),
    }
    if not stochastic:
        for name in ("attention_entropy", "attention_gap_singular"):  # the others are defined for any matrix
            values[name] = values[name].masked_fill(is_signed(p_BHNM), math.nan)
    return values | {"residual": residual_BH, "size": size_BH}
