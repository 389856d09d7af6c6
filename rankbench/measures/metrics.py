"""Rank and collapse metrics: pure functions on tensors, listed once under their CSV column names.

A metric is one formula on one view of its input: the sequence itself, its singular values, or the singular values of
its residual. The decorator turns the formula into a function of x_BND (or of p_BHNM) and lists it in STATE_METRICS (or
ATTENTION_METRICS). `state_metrics` and `attention_metrics` evaluate every formula and compute each view once.

Where a metric is undefined (0 / 0), its own function raises ValueError; the two functions that compute all metrics
return nan there instead, so that one all-zero sequence does not end an analysis. Input of float32 or float64 gives
output of the same dtype; metrics are pure numbers unless the docstring says otherwise.

Shapes: B batch, N query token, M key token, D width, H head, R singular value (R = min(N, D), largest first).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

STATE_METRICS: dict[str, Callable[..., Tensor]] = {}  # column name -> function of x_BND, shape (B,)
ATTENTION_METRICS: dict[str, Callable[..., Tensor]] = {}  # column name -> function of p_BHNM, visible_NM; shape (B, H)
# The rounding error of a residual, in its units and relative to the matrix, and whether the residual is no larger than
# it. What is below its floor is no measurement, nor is any other metric in OF_RESIDUAL.
STATE_FLOORS = ["noise_floor", "relative_noise_floor", "below_floor"]
ATTENTION_FLOORS = [f"attention_{name}" for name in STATE_FLOORS]
OF_RESIDUAL = ["residual", "relative_residual", "relative_residual_l1", "relative_residual_linf", "residual_frobenius"]
OF_RESIDUAL += ["relative_residual_frobenius", "high_frequency_energy", "effective_rank_centred"]
OF_RESIDUAL += ["effective_rank_squared_centred", "mean_cosine_centred", "attention_relative_residual"]

# ---------------------------------------------------------------------------------------------------------------------
# Norms, on (..., N, D)


def one_norm(x: Tensor) -> Tensor:
    """Operator norm ||X||_1, the largest column sum of |X|; shape (...)."""
    return x.abs().sum(-2).amax(-1)


def inf_norm(x: Tensor) -> Tensor:
    """Operator norm ||X||_inf, the largest row sum of |X|; shape (...)."""
    return x.abs().sum(-1).amax(-1)


def composite_norm(x: Tensor) -> Tensor:
    """Composite norm ||X||_{1,inf} = sqrt(||X||_1 ||X||_inf); shape (...). No triangle inequality. Dong et al. 2021."""
    # Two roots, because the product of two small norms underflows: sqrt(1e-200 * 1e-200) is 0 in float64.
    return one_norm(x).sqrt() * inf_norm(x).sqrt()


def frobenius_norm(x: Tensor) -> Tensor:
    """Frobenius norm sqrt(sum X_ij^2); shape (...)."""
    return _euclidean_norm(x.flatten(-2))


def _euclidean_norm(x: Tensor) -> Tensor:
    # Scaled first, because a collapsed residual is small enough for its squares to underflow (1e-23 in float32).
    scale = x.abs().amax(-1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    return scale.squeeze(-1) * torch.linalg.vector_norm(x / scale, dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Residual


def residual_matrix(x: Tensor, minimiser: str = "mean") -> Tensor:
    """Residual R = X - 1 x^T of each matrix; shape (..., N, D), units of X. Dong et al. 2021, sec. 2.2.

    The row x is what the minimiser says:
    - "mean", the mean of the tokens, minimises ||R||_F. Every registered metric uses it.
    - "l1", the median of each column, minimises ||R||_1: the median minimises each column sum, so also the largest.
    - "linf", a centre of the smallest l1 ball that holds all tokens, minimises ||R||_inf. One linear program per
      matrix, solved to about 1e-9 of ||R||_inf: slow (seconds for hundreds of tokens).
    "l1" and "linf" can have several minimisers, all of the same norm; in another norm they may differ.
    """
    centres = {"mean": _mean_token, "l1": _median_token, "linf": _chebyshev_token}
    if minimiser not in centres:
        raise ValueError(f"minimiser={minimiser!r}: allowed are {', '.join(map(repr, centres))}")
    # Differences from the first token come first: in a nearly collapsed sequence they are exact (Sterbenz), so equal
    # tokens have residual 0 and not the rounding error of their mean.
    differences = x - x[..., :1, :]
    return differences - centres[minimiser](differences)


def _mean_token(x: Tensor) -> Tensor:
    return x.mean(-2, keepdim=True)


def _median_token(x: Tensor) -> Tensor:
    # Middle of the median interval. torch.median would take its lower end, and then -X would not mirror X.
    ordered, num_tokens = x.sort(-2).values, x.shape[-2]
    low, high = (num_tokens - 1) // 2, num_tokens // 2
    return (ordered[..., low : low + 1, :] + ordered[..., high : high + 1, :]) / 2


def _chebyshev_token(x: Tensor) -> Tensor:
    rows = [_solve_chebyshev(matrix) for matrix in x.detach().flatten(0, -3)] if x.dim() > 2 else [_solve_chebyshev(x)]
    return torch.stack(rows).reshape(*x.shape[:-2], 1, x.shape[-1])


def _solve_chebyshev(x_ND: Tensor) -> Tensor:
    """Minimises t over x, u, t subject to |X_id - x_d| <= u_id and sum_d u_id <= t: the l1-Chebyshev centre; (D,)."""
    from scipy import sparse
    from scipy.optimize import linprog

    # The solver's tolerances are absolute: give it a problem of size 1.
    scale = x_ND.abs().max()
    if scale == 0:
        return x_ND[0]
    points = (x_ND / scale).double().cpu().numpy()
    num_tokens, width = points.shape
    each_entry = sparse.identity(num_tokens * width)
    x_of_entry = sparse.kron([[1]] * num_tokens, sparse.identity(width))
    entries_of_token = sparse.kron(sparse.identity(num_tokens), [[1] * width])
    constraints = sparse.bmat(
        [
            [-x_of_entry, -each_entry, None],  # X - x <= u
            [x_of_entry, -each_entry, None],  # x - X <= u
            [None, entries_of_token, sparse.csr_matrix([[-1]] * num_tokens)],  # sum u <= t
        ],
        format="csr",
    )
    upper = [*-points.ravel(), *points.ravel(), *[0] * num_tokens]
    cost = [0] * (width + num_tokens * width) + [1]
    tight = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}  # the tightest HiGHS takes
    solution = linprog(cost, A_ub=constraints, b_ub=upper, bounds=(None, None), method="highs", options=tight)
    if not solution.success:
        raise RuntimeError(f'minimiser="linf": the linear program was not solved: {solution.message}')
    return torch.as_tensor(solution.x[:width], dtype=x_ND.dtype, device=x_ND.device) * scale


# ---------------------------------------------------------------------------------------------------------------------
# Spectrum


@dataclass(frozen=True)
class Spectrum:
    """Singular values s of a batch of matrices, relative to the largest because every rank is a function of s / s_1."""

    largest: Tensor  # (...), s_1
    relative: Tensor  # (..., R), s / s_1; nan for a zero matrix
    tolerance: float  # max(N, D) eps: a relative singular value below it is rounding error

    @classmethod
    def of(cls, x: Tensor) -> "Spectrum":
        # Of X and not of the smaller X X^T, which loses every s / s_1 below the square root of eps.
        s = torch.linalg.svdvals(x)
        return cls(s[..., 0], s / s[..., :1], max(x.shape[-2:]) * torch.finfo(x.dtype).eps)

    @property
    def second(self) -> Tensor:
        """s_2 / s_1; 0 for a single row or column. Shape (...)."""
        return self.relative[..., 1] if self.relative.shape[-1] > 1 else self.relative[..., 0] * 0


def _stable_rank(weights: Tensor) -> Tensor:
    return weights.square().sum(-1)  # the weights are relative to the largest: no denominator


def _exponential_of_entropy(weights: Tensor) -> Tensor:
    return torch.special.entr(weights / weights.sum(-1, keepdim=True)).sum(-1).exp()


# ---------------------------------------------------------------------------------------------------------------------
# States: the view of a sequence, the decorator, the metrics


def _sequence(x_BND: Tensor) -> Tensor:
    return x_BND


def _spectrum_of_sequence(x_BND: Tensor) -> Spectrum:
    return Spectrum.of(x_BND)


def _spectrum_of_residual(x_BND: Tensor) -> Spectrum:
    return Spectrum.of(residual_matrix(x_BND))


_STATE_FORMULAS: dict[str, tuple[Callable, Callable]] = {}  # column name -> view, formula on that view


def _state_metric(view: Callable, undefined_if: str | None = None) -> Callable:
    """Registers a formula on a view; its name becomes a function of x_BND that raises where the formula gives nan."""

    def register(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = formula.__name__

        def metric(x_BND: Tensor, **options) -> Tensor:
            _check_states(x_BND)
            value_B = formula(view(x_BND), **options)
            if undefined_if and value_B.isnan().any():
                index = value_B.isnan().nonzero()[0].item()
                raise ValueError(f"{name}: undefined if {undefined_if}, as sequence {index}; state_metrics gives nan")
            return value_B

        metric.__name__, metric.__qualname__, metric.__doc__ = name, name, formula.__doc__
        _STATE_FORMULAS[name], STATE_METRICS[name] = (view, formula), metric
        return metric

    return register


def _check_states(x_BND: Tensor) -> None:
    _check_floats("x_BND", x_BND, ("B", "N", "D"))


def _check_floats(name: str, x: Tensor, axes: tuple[str, ...]) -> None:
    if x.dim() != len(axes) or 0 in x.shape[1:]:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, wanted ({', '.join(axes)}) with no empty axis but B")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name}: got {x.dtype}, allowed are torch.float32 and torch.float64; convert with .float()")
    if not x.isfinite().all():
        raise ValueError(f"{name}: got {(~x.isfinite()).sum().item()} nan or infinite entries, all must be finite")


@_state_metric(_sequence, undefined_if="all entries are zero")
def relative_residual(x_BND: Tensor, minimiser: str = "mean") -> Tensor:
    """Distance of each sequence to its nearest rank-one matrix 1 x^T, relative to the sequence; shape (B,).

    Composite norm sqrt(||.||_1 ||.||_inf); x is the token mean. Dong et al. 2021, sec. 2.2 and 4.1.
    Option: minimiser, see residual_matrix. Raises ValueError if a sequence is all zero: the ratio is undefined.
    """
    return composite_norm(residual_matrix(x_BND, minimiser)) / composite_norm(x_BND)


@_state_metric(_sequence)
def residual(x_BND: Tensor, minimiser: str = "mean") -> Tensor:
    """Composite norm of the residual, in the units of X; shape (B,).

    The quantity that Dong et al. 2021, theorem 2.2 bounds. Option: minimiser, see residual_matrix.
    """
    return composite_norm(residual_matrix(x_BND, minimiser))


@_state_metric(_sequence, undefined_if="all entries are zero")
def relative_residual_l1(x_BND: Tensor, minimiser: str = "mean") -> Tensor:
    """||R||_1 / ||X||_1, the norm being the largest column sum; shape (B,). x is the token mean.

    The first factor of Dong et al. 2021's composite norm. Option: minimiser, see residual_matrix; "l1" is exact here.
    """
    return one_norm(residual_matrix(x_BND, minimiser)) / one_norm(x_BND)


@_state_metric(_sequence, undefined_if="all entries are zero")
def relative_residual_linf(x_BND: Tensor, minimiser: str = "mean") -> Tensor:
    """||R||_inf / ||X||_inf, the norm being the largest row sum; shape (B,). x is the token mean.

    The other factor of Dong et al. 2021's composite norm. Option: minimiser, see residual_matrix; "linf" is exact here.
    """
    return inf_norm(residual_matrix(x_BND, minimiser)) / inf_norm(x_BND)


@_state_metric(_sequence, undefined_if="all entries are zero")
def relative_residual_frobenius(x_BND: Tensor, minimiser: str = "mean") -> Tensor:
    """||R||_F / ||X||_F, in [0, 1] for the token mean, which minimises it; shape (B,)."""
    return frobenius_norm(residual_matrix(x_BND, minimiser)) / frobenius_norm(x_BND)


@_state_metric(_sequence)
def residual_frobenius(x_BND: Tensor, minimiser: str = "mean") -> Tensor:
    """||R||_F, in the units of X; shape (B,). x is the token mean, which minimises it."""
    return frobenius_norm(residual_matrix(x_BND, minimiser))


@_state_metric(_sequence, undefined_if="all entries are zero")
def high_frequency_energy(x_BND: Tensor) -> Tensor:
    """||R||_F / ||1 x^T||_F, all frequencies over the zero frequency; shape (B,). inf if the tokens' mean is zero.

    Wang et al. 2022, Anti-oversmoothing in deep vision transformers via the Fourier domain analysis.
    """
    mean_BD = x_BND.mean(-2)
    return frobenius_norm(residual_matrix(x_BND)) / (math.sqrt(x_BND.shape[-2]) * _euclidean_norm(mean_BD))


@_state_metric(_spectrum_of_sequence, undefined_if="all entries are zero")
def stable_rank(spectrum: Spectrum) -> Tensor:
    """sum s^2 / s_1^2 = ||X||_F^2 / ||X||_2^2, in [1, R]; shape (B,). Rudelson & Vershynin 2007."""
    return _stable_rank(spectrum.relative)


@_state_metric(_spectrum_of_sequence, undefined_if="all entries are zero")
def stable_rank_gram(spectrum: Spectrum) -> Tensor:
    """sum s^4 / s_1^4, the stable rank of the Gram matrix X X^T, in [1, R]; shape (B,)."""
    return _stable_rank(spectrum.relative.square())


@_state_metric(_spectrum_of_sequence, undefined_if="all entries are zero")
def effective_rank(spectrum: Spectrum) -> Tensor:
    """exp of the entropy of s / sum s, in [1, R]; shape (B,). Roy & Vetterli 2007."""
    return _exponential_of_entropy(spectrum.relative)


@_state_metric(_spectrum_of_sequence, undefined_if="all entries are zero")
def effective_rank_squared(spectrum: Spectrum) -> Tensor:
    """exp of the entropy of s^2 / sum s^2, in [1, R]; shape (B,). Roy & Vetterli 2007's, of the Gram matrix."""
    return _exponential_of_entropy(spectrum.relative.square())


@_state_metric(_spectrum_of_residual, undefined_if="all tokens are equal")
def effective_rank_centred(spectrum: Spectrum) -> Tensor:
    """effective_rank of the residual X - 1 x^T, in [1, R]; shape (B,)."""
    return _exponential_of_entropy(spectrum.relative)


@_state_metric(_spectrum_of_residual, undefined_if="all tokens are equal")
def effective_rank_squared_centred(spectrum: Spectrum) -> Tensor:
    """effective_rank_squared of the residual X - 1 x^T, that is of the tokens' covariance, in [1, R]; shape (B,)."""
    return _exponential_of_entropy(spectrum.relative.square())


@_state_metric(_spectrum_of_sequence, undefined_if="all entries are zero")
def participation_ratio(spectrum: Spectrum) -> Tensor:
    """(sum s^2)^2 / sum s^4, in [1, R], not centred; shape (B,). Bell & Dean 1970; on eigenvalues s^2 of X X^T."""
    energy = spectrum.relative.square()
    return energy.sum(-1).square() / energy.square().sum(-1)


@_state_metric(_spectrum_of_sequence)
def numerical_rank(spectrum: Spectrum, tau: float | None = None) -> Tensor:
    """Number of singular values s > tau s_1; shape (B,). 0 for an all-zero sequence.

    Option: tau, max(N, D) eps of the dtype unless given, as in MATLAB and NumPy's matrix_rank.
    """
    threshold = spectrum.tolerance if tau is None else tau
    return (spectrum.relative > threshold).sum(-1).to(spectrum.relative.dtype)


@_state_metric(_spectrum_of_sequence, undefined_if="all entries are zero")
def second_singular_ratio(spectrum: Spectrum) -> Tensor:
    """s_2 / s_1, in [0, 1]; shape (B,). 0 for one token or width 1: there is no s_2."""
    return spectrum.second


@_state_metric(_sequence, undefined_if="fewer than two tokens are nonzero")
def mean_cosine(x_BND: Tensor) -> Tensor:
    """Mean cosine over all pairs of distinct tokens, in [-1 / (N - 1), 1]; shape (B,). Ethayarajh 2019.

    Pairs with a zero token have no angle and are left out.
    """
    return _mean_cosine(x_BND)


@_state_metric(_sequence, undefined_if="fewer than two tokens differ from the mean")
def mean_cosine_centred(x_BND: Tensor) -> Tensor:
    """mean_cosine of the residual's rows x_i - x, so of the tokens seen from their mean; shape (B,).

    -1 / (N - 1) when all tokens are equally far from the mean. A token at the mean itself is left out.
    """
    residual_BND = residual_matrix(x_BND)
    norm_BN1 = _euclidean_norm(residual_BND).unsqueeze(-1)
    # A token at the mean is there up to rounding only, and rounding error has no direction.
    rounding_B11 = x_BND.shape[-2] * torch.finfo(x_BND.dtype).eps * norm_BN1.amax(-2, keepdim=True)
    return _mean_cosine(residual_BND.masked_fill(norm_BN1 <= rounding_B11, 0))


def _mean_cosine(x_BND: Tensor) -> Tensor:
    norm_BN1 = _euclidean_norm(x_BND).unsqueeze(-1)
    unit_BND = x_BND / torch.where(norm_BN1 > 0, norm_BN1, 1)
    count_B = (norm_BN1 > 0).sum((-2, -1)).to(x_BND.dtype)
    # sum over i != j of u_i . u_j = ||sum_i u_i||^2 - sum_i ||u_i||^2: no N x N matrix.
    pairs_B = unit_BND.sum(-2).square().sum(-1) - unit_BND.square().sum((-2, -1))
    # One token leaves rounding error over 0, which would be infinite and not undefined.
    return torch.where(count_B > 1, pairs_B / (count_B * (count_B - 1)), math.nan)


def own_rounding(x: Tensor) -> Tensor:
    """eps of x's dtype times ||X||_{1,inf}: what storing X can put into its residual, in units of X; (...).

    The error of computing X is larger: rankbench.measures.rounding.noise_floors.
    """
    return torch.finfo(x.dtype).eps * composite_norm(x)


def per_length(
    compute: Callable[[Tensor], dict[str, Tensor]], values: Tensor, lengths_B: Tensor, axes: tuple[int, ...] = (1,)
) -> dict[str, Tensor]:
    """`compute` on a padded batch, sequences of each length by themselves with their absent tokens cut off.

    lengths_B: how many tokens each sequence has, the absent ones behind them. axes: the token axes of `values`.
    """
    found: dict[str, Tensor] = {}
    for length in lengths_B.unique().tolist():
        rows = (lengths_B == length).nonzero().squeeze(-1)
        part = values[rows]
        for axis in axes:
            part = part.narrow(axis, 0, length)
        for name, value in compute(part).items():
            found.setdefault(name, value.new_empty(len(lengths_B), *value.shape[1:]))[rows] = value
    return found


def state_metrics(x_BND: Tensor, lengths_B: Tensor | None = None, floor_B: Tensor | None = None) -> dict[str, Tensor]:
    """Every metric in STATE_METRICS by column name, each of shape (B,); nan for a sequence where it is undefined.

    Two singular value decompositions in all. lengths_B: how many tokens each sequence has, in a padded batch; absent
    tokens are no part of any metric. floor_B: the error of each residual (rankbench.measures.rounding.noise_floors).
    With it the columns of STATE_FLOORS are there too; without it own_rounding, which knows nothing of the error of
    computing X.
    """
    values = _state_values(x_BND) if lengths_B is None else per_length(_state_values, x_BND, lengths_B)
    return values if floor_B is None else _with_floor(values, values["residual"], floor_B, "")


def _state_values(x_BND: Tensor) -> dict[str, Tensor]:
    _check_states(x_BND)
    views = {view: view(x_BND) for view in {view for view, _ in _STATE_FORMULAS.values()}}
    values = {name: formula(views[view]) for name, (view, formula) in _STATE_FORMULAS.items()}
    return values | {"own_rounding": own_rounding(x_BND)}


def _with_floor(values: dict[str, Tensor], residual: Tensor, floor: Tensor, prefix: str) -> dict[str, Tensor]:
    """own_rounding replaced by the noise floor, by its size relative to the matrix, and by who is below it."""
    own = values[f"{prefix}own_rounding"]
    size = own / torch.finfo(own.dtype).eps
    columns = {name: value for name, value in values.items() if name != f"{prefix}own_rounding"}
    columns[f"{prefix}noise_floor"] = floor
    columns[f"{prefix}relative_noise_floor"] = torch.where(size > 0, floor / size, math.nan)
    columns[f"{prefix}below_floor"] = residual <= floor
    return columns


# ---------------------------------------------------------------------------------------------------------------------
# Attention matrices: the views of P, the decorator, the metrics


def _weights_and_visible(p_BHNM: Tensor, visible_NM: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return p_BHNM, visible_NM


def _weights(p_BHNM: Tensor, visible_NM: Tensor | None) -> Tensor:
    return p_BHNM


def _spectrum_of_weights(p_BHNM: Tensor, visible_NM: Tensor | None) -> Spectrum:
    return Spectrum.of(p_BHNM)


_ATTENTION_FORMULAS: dict[str, tuple[Callable, Callable]] = {}  # column name -> view, formula on that view


def _attention_metric(view: Callable, undefined_if: str | None = None) -> Callable:
    """Registers a formula on a view; its name becomes a function of p_BHNM, visible_NM that raises on nan."""

    def register(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
        name = formula.__name__

        def metric(p_BHNM: Tensor, visible_NM: Tensor | None = None) -> Tensor:
            _check_attention(p_BHNM, visible_NM)
            value_BH = formula(view(p_BHNM, visible_NM))
            if undefined_if and value_BH.isnan().any():
                raise ValueError(f"{name}: undefined if {undefined_if}; attention_metrics gives nan")
            return value_BH

        metric.__name__, metric.__qualname__, metric.__doc__ = name, name, formula.__doc__
        _ATTENTION_FORMULAS[name], ATTENTION_METRICS[name] = (view, formula), metric
        return metric

    return register


def _check_attention(p_BHNM: Tensor, visible_NM: Tensor | None) -> None:
    _check_floats("p_BHNM", p_BHNM, ("B", "H", "N", "M"))
    # Looks for scores passed as weights; a softmax computed in bfloat16 (8 bits) must pass, so 1% and not rounding.
    error = (p_BHNM.sum(-1) - 1).abs()
    if (p_BHNM < 0).any() or (error > 0.01).any():
        raise ValueError("p_BHNM: got rows that are no probabilities, wanted entries >= 0 with row sums 1 (within 1%)")
    if visible_NM is None:
        return
    if visible_NM.dtype != torch.bool or visible_NM.shape != p_BHNM.shape[-2:]:
        got, wanted = tuple(visible_NM.shape), tuple(p_BHNM.shape[-2:])
        raise ValueError(f"visible_NM: got {visible_NM.dtype} of shape {got}, wanted torch.bool of shape {wanted}")
    if (p_BHNM.masked_fill(visible_NM, 0).sum(-1) > 0.01).any():
        raise ValueError(
            "visible_NM: got a mask that hides keys which p_BHNM attends to, wanted the mask P was made with"
        )


@_attention_metric(_weights_and_visible, undefined_if="no query sees two keys")
def attention_entropy(weights_and_visible: tuple[Tensor, Tensor | None]) -> Tensor:
    """Row entropy (nats) over log of the number of visible keys, its maximum; mean over rows, in [0, 1]; shape (B, H).

    1 for uniform attention over the visible keys, whatever the mask; 0 for attention to one key. Without visible_NM
    every query sees all M keys. A row that sees one key is left out: its entropy 0 is also its maximum log 1.
    """
    p_BHNM, visible_NM = weights_and_visible
    entropy_BHN = torch.special.entr(p_BHNM).sum(-1)
    if visible_NM is None:
        visible_NM = p_BHNM.new_ones(p_BHNM.shape[-2:], dtype=torch.bool)
    num_visible_N = visible_NM.sum(-1)
    has_choice_N = num_visible_N > 1
    maximum_N = num_visible_N[has_choice_N].to(p_BHNM.dtype).log()
    return (entropy_BHN[..., has_choice_N] / maximum_N).mean(-1)


@_attention_metric(_spectrum_of_weights)
def attention_stable_rank(spectrum: Spectrum) -> Tensor:
    """stable_rank of P; shape (B, H)."""
    return _stable_rank(spectrum.relative)


@_attention_metric(_spectrum_of_weights)
def attention_effective_rank(spectrum: Spectrum) -> Tensor:
    """effective_rank of P, of s / sum s; shape (B, H)."""
    return _exponential_of_entropy(spectrum.relative)


@_attention_metric(_weights)
def attention_relative_residual(p_BHNM: Tensor) -> Tensor:
    """||P - 1 q^T|| / ||P|| in the composite norm, q the mean row; shape (B, H). Zero if all queries attend alike."""
    return composite_norm(residual_matrix(p_BHNM)) / composite_norm(p_BHNM)


@_attention_metric(_weights, undefined_if="N != M")
def attention_gap_eigenvalue(p_BHNM: Tensor) -> Tensor:
    """1 - |lambda_2| of square P, the Markov chain's spectral gap, in [0, 1]; shape (B, H). Levin et al. 2009, ch. 12.

    Equals attention_gap_singular for symmetric P, not in general. 1 if there is a single token.
    """
    if p_BHNM.shape[-2] != p_BHNM.shape[-1]:
        return torch.full_like(p_BHNM[..., 0, 0], math.nan)
    # causal: the eigenvalues are the diagonal. Exact where a solver need not be (P is far from normal), and free
    is_causal = (p_BHNM.triu(1) == 0).all()
    modulus_BHN = p_BHNM.diagonal(dim1=-2, dim2=-1) if is_causal else _eigenvalue_moduli(p_BHNM)
    if modulus_BHN.shape[-1] == 1:
        return torch.ones_like(modulus_BHN[..., 0])
    return 1 - modulus_BHN.sort(-1, descending=True).values[..., 1]


def _eigenvalue_moduli(p_BHNM: Tensor) -> Tensor:
    """|lambda| of each matrix, (B, H, N); nan for one on which the solver does not converge."""
    try:
        return torch.linalg.eigvals(p_BHNM).abs()
    except torch.linalg.LinAlgError:
        if p_BHNM[..., 0, 0].numel() == 1:
            return torch.full_like(p_BHNM[..., 0], math.nan)
        each = [_eigenvalue_moduli(p_NM[None, None])[0, 0] for p_NM in p_BHNM.flatten(0, 1)]
        return torch.stack(each).view(p_BHNM.shape[:-1])


@_attention_metric(_spectrum_of_weights)
def attention_gap_singular(spectrum: Spectrum) -> Tensor:
    """s_1 - s_2 of P, the gap of P as a matrix; shape (B, H). s_1 if there is no s_2; s_1 itself can exceed 1."""
    return spectrum.largest * (1 - spectrum.second)


def attention_metrics(
    p_BHNM: Tensor,
    visible_NM: Tensor | None = None,
    lengths_B: Tensor | None = None,
    floor_BH: Tensor | None = None,
) -> dict[str, Tensor]:
    """Every metric in ATTENTION_METRICS by column name, each of shape (B, H), nan where undefined.

    lengths_B: how many tokens each sequence has, in a padded batch. floor_BH: the error of each P's residual
    (rankbench.measures.rounding.noise_floors). With it the columns of ATTENTION_FLOORS are there too; without it
    attention_own_rounding.
    """

    def of_one_length(p_BHNM: Tensor) -> dict[str, Tensor]:
        length = p_BHNM.shape[-1]
        return _attention_values(p_BHNM, None if visible_NM is None else visible_NM[:length, :length])

    if lengths_B is None:
        values = _attention_values(p_BHNM, visible_NM)
    else:
        values = per_length(of_one_length, p_BHNM, lengths_B, axes=(2, 3))
    residual_BH = values.pop("attention_residual")
    return values if floor_BH is None else _with_floor(values, residual_BH, floor_BH, "attention_")


def _attention_values(p_BHNM: Tensor, visible_NM: Tensor | None) -> dict[str, Tensor]:
    _check_attention(p_BHNM, visible_NM)
    views = {view: view(p_BHNM, visible_NM) for view in {view for view, _ in _ATTENTION_FORMULAS.values()}}
    values = {name: formula(views[view]) for name, (view, formula) in _ATTENTION_FORMULAS.items()}
    residual_BH = composite_norm(residual_matrix(p_BHNM))
    return values | {"attention_own_rounding": own_rounding(p_BHNM), "attention_residual": residual_BH}
