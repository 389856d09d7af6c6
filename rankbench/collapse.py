"""Residual coordinates: the distance of the tokens from their mean, followed far below floating point.

Attention alone shrinks the residual doubly exponentially (Dong et al. 2021, Theorem 2.2): after a few layers it is
less than the rounding of the tokens, and no forward pass shows it. So the tokens are held as

    x_i = mean + exp(log_scale) unit_i,    sum_i unit_i = 0,  largest |unit| = 1,

and every part of the network is written as a map of these three, without a difference of nearly equal numbers: float64
then follows a residual of 1e-1000000 as exactly as one of 1. Every formula is exact, not an expansion: a limit is taken
only where the next term is below rounding. What is lost is what float64 always loses: about 1e-16 of the largest entry
of a layer's residual, or of its largest summand where heads, skip and value maps cancel. So of tokens that have merged
while others have not, no difference below that is followed: a later layer that merges the others shows too little.

Shapes: B batch, N query token, M key token, D width, H head, K head width, F hidden width of the MLP.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.config import ConfigError
from rankbench.metrics import composite_norm, one_norm
from rankbench.model.attention import Attention
from rankbench.model.network import Network, Sublayer
from rankbench.model.transformer import MLP, Norm

NORMS = ("layernorm", "rmsnorm")  # whose kinds are followed; likewise of attention
ATTENTIONS = ("dot", "l2")


class State(NamedTuple):
    """Tokens mean + exp(log_scale) unit. mean_BD, log_scale_B (natural log), unit_BND.

    Equal tokens have log_scale -inf and unit 0; -inf also stands for a logarithm that float64 cannot hold, after some
    640 cubings. Absent tokens of a padded batch have unit 0 and are in no mean.
    """

    mean_BD: Tensor
    log_scale_B: Tensor
    unit_BND: Tensor


def propagate(network: Network, inputs: Tensor) -> list[State]:
    """The state that enters the first layer and those that leave each layer, in float64; L + 1 in all.

    The last norm of a pre-norm network and the read-out are no part of it, and dropout is off. The network's weights
    must be float64. ConfigError for a part without a rule here, and where the tokens themselves overflow.
    """
    check(network)
    present_BN = network.present(inputs)
    with torch.no_grad():
        states = [residual_coordinates(network.embed(inputs), present_BN)]
        for number, sublayers in enumerate(network.layers, 1):
            state = states[-1]
            for its in sublayers:
                state = sublayer(state, its, present_BN)
            states.append(state)
            if not state.mean_BD.isfinite().all() or state.log_scale_B.isnan().any():
                raise ConfigError(
                    f"model.layers={network.num_layers}: the tokens overflow float64 in layer {number}; "
                    "use fewer layers, a lower model.init_gain, or a norm"
                )
    return states


def check(network: Network) -> None:
    """ConfigError if the network has a part that no rule here follows."""
    for its in network.sublayers:
        if its.norm is not None and its.norm.kind not in NORMS:
            raise _not_followed("norm_kind", its.norm.kind, NORMS)
        if its.kind == "mlp" and its.part.activation_name not in CHANGES:
            raise _not_followed("activation", its.part.activation_name, CHANGES)
        if its.kind == "attention":
            if its.part.score_name not in ATTENTIONS:
                raise _not_followed("attention", its.part.score_name, ATTENTIONS)
            if its.part.mixes:
                raise _not_followed("mix_*", its.part.mix, ["P alone"])


def _not_followed(key: str, got: object, allowed: Iterable[object]) -> ConfigError:
    return ConfigError(
        f"model.{key}={got}: residual coordinates follow {', '.join(map(str, allowed))} alone; "
        "measure this network with analysis=[residual]"
    )


def log_residual(state: State) -> Tensor:
    """log ||R||_{1,inf}, natural, in the units of X; shape (B,). -inf for equal tokens."""
    return state.log_scale_B + composite_norm(state.unit_BND).log()


def tokens(state: State) -> Tensor:
    """The tokens X themselves, (B, N, D), as far as float64 holds them; absent ones mean nothing."""
    return state.mean_BD[:, None] + state.log_scale_B.exp()[:, None, None] * state.unit_BND


def log_lemma_constant(its: Sublayer) -> float:
    """log(4 beta H / sqrt(K)), natural, of one layer; beta = max_h ||W_QK,h||_1 ||W_V,h W_O,h||_{1,inf}.

    Dong et al. 2021, Lemma A.2: ||R'|| is at most this constant times ||R||^3 in an unmasked layer of attention alone.
    Its proof has gaps (it drops the absolute values of R), so it is a number to compare with and not a certificate. L2
    attention has 2 W_QK in the place of W_QK, and A_h W_V,h in that of W_V,h.
    """
    w, module = its.part.maps_as_applied(), its.part
    w_qk_HDD = (2 if module.is_l2 else 1) * w.w_q_HDK @ w.w_k_HDK.mT / module.temperature
    w_vo_HDD = its.branch * w.w_v_HDK @ w.w_o_HKD
    beta = (one_norm(w_qk_HDD) * composite_norm(w_vo_HDD)).max()
    return (4 * beta * module.heads / math.sqrt(module.head_width)).log().item()


# ---------------------------------------------------------------------------------------------------------------------
# Into residual coordinates, and sums in them


def residual_coordinates(x_BND: Tensor, present_BN: Tensor | None = None) -> State:
    """The tokens in residual coordinates."""
    first_BD = x_BND[:, 0]
    zeros_B = x_BND.new_zeros(len(x_BND))
    # from the first token on, so that equal tokens have residual 0 and not the rounding of their mean
    return _recentred(first_BD, zeros_B, x_BND - first_BD[:, None], present_BN)


def _recentred(mean_BD: Tensor, log_scale_B: Tensor, rows_BND: Tensor, present_BN: Tensor | None) -> State:
    """Tokens mean + exp(log_scale) rows, whatever the mean of the rows."""
    if present_BN is None:
        average_BD = rows_BND.mean(1)
        rows_BND = rows_BND - average_BD[:, None]
    else:
        present_BN1 = present_BN[..., None]
        average_BD = torch.where(present_BN1, rows_BND, 0).sum(1) / present_BN1.sum(1)
        rows_BND = torch.where(present_BN1, rows_BND - average_BD[:, None], 0)
    return State(mean_BD + log_scale_B.exp()[:, None] * average_BD, *_normalised(log_scale_B, rows_BND))


def _normalised(log_scale_B: Tensor, x_BND: Tensor) -> tuple[Tensor, Tensor]:
    size_B = x_BND.abs().amax((1, 2))
    return log_scale_B + size_B.log(), x_BND / torch.where(size_B > 0, size_B, 1)[:, None, None]


def _sum(log_a_B: Tensor, a_BND: Tensor, log_b_B: Tensor, b_BND: Tensor) -> tuple[Tensor, Tensor]:
    """exp(log_a) A + exp(log_b) B in the scale of the larger."""
    (log_a_B, a_BND), (log_b_B, b_BND) = _normalised(log_a_B, a_BND), _normalised(log_b_B, b_BND)
    log_B = torch.maximum(log_a_B, log_b_B)
    finite_B = torch.where(log_B > -math.inf, log_B, 0)  # both are zero: any scale will do
    share_a_B11, share_b_B11 = ((one_B - finite_B).exp()[:, None, None] for one_B in (log_a_B, log_b_B))
    return log_B, share_a_B11 * a_BND + share_b_B11 * b_BND


# ---------------------------------------------------------------------------------------------------------------------
# The parts of a network


def sublayer(state: State, its: Sublayer, present_BN: Tensor | None = None) -> State:
    """One sub-layer of the network, run on residual coordinates."""
    part = attention if its.kind == "attention" else mlp
    return its.apply(
        state,
        part=lambda read: part(read, its.part, present_BN),
        norm=lambda tokens: norm(tokens, its.norm, present_BN),
        add=weighted_sum,
    )


def weighted_sum(a: float, x: State, b: float, y: State) -> State:
    """a X + b Y."""
    log_B, rows_BND = _sum(x.log_scale_B, a * x.unit_BND, y.log_scale_B, b * y.unit_BND)
    return State(a * x.mean_BD + b * y.mean_BD, *_normalised(log_B, rows_BND))


def attention(state: State, module: Attention, present_BN: Tensor | None = None) -> State:
    """Multi-head attention, with biases, any of our masks, and absent tokens.

    With x_i = x + R_i and t = sqrt(K) temperature the scores are, up to terms that are constant along a row and drop
    out of the softmax (b_K is in these alone),

        r_j + E_ij,    r_j = (x W_Q + b_Q) (R_j W_K)^T / t,    E_ij = (R_i W_Q) (R_j W_K)^T / t,

    and in L2 attention, from -||q_i - k_j||^2 = 2 q_i k_j - ||k_j||^2 - ||q_i||^2 (tied keys leave r its last term)

        r_j = (2 (x W_Q + b_Q - x W_K - b_K) (R_j W_K)^T - ||R_j W_K||^2) / t,    E_ij = 2 (R_i W_Q) (R_j W_K)^T / t.

    Q_i is the softmax of r over the keys that i sees, and P_i, of r + E, differs from it by
    Q_ij expm1(E_ij - lse_i), lse_i = log1p(sum_j Q_ij expm1 E_ij): of second order in R. Then

        P X W + b = 1 (x W + b) + Q R W + (P - Q) R W,    W = W_V W_O, summed over heads.

    Where all tokens see the same keys, Q R is the same row for all of them: it moves the mean, and the residual is the
    last term, of third order. Where they do not (causal and window masks) the rows of Q R differ, the residual is of
    first order in R, and its decay is no faster than exponential. Sequences with an |E| above 1/2 are far from collapse
    and use P R as it is. Values are taken relative to those of the key that is attended to most, so that attention to
    next to nothing but one key loses no digits either.
    """
    w = module.maps_as_applied()
    mean_BD, log_B, unit_BND = state
    scale_B111, factor = log_B.exp()[:, None, None, None], module.head_width**-0.5 / module.temperature
    seen = _seen(module, present_BN, unit_BND)
    unit_B1ND = unit_BND[:, None]
    key_BHMK, value_BHMK = unit_B1ND @ w.w_k_HDK, unit_B1ND @ w.w_v_HDK
    query_BH1K = mean_BD[:, None, None] @ w.w_q_HDK + w.b_q_HK[:, None]
    if module.is_l2:
        query_BH1K = query_BH1K - (mean_BD[:, None, None] @ w.w_k_HDK + w.b_k_HK[:, None])
        factor = 2 * factor
    r_BH1M = scale_B111 * factor * (query_BH1K @ key_BHMK.mT)  # one row: the same for all queries
    if module.is_l2:
        r_BH1M = r_BH1M - scale_B111.square() * factor / 2 * key_BHMK.square().sum(-1)[..., None, :]
    r_BHNM = _hidden(r_BH1M, seen, -math.inf)
    e_BHNM = _hidden(factor * (unit_B1ND @ w.w_q_HDK) @ key_BHMK.mT, seen, 0.0)
    far_B111 = (scale_B111.square() * e_BHNM).abs().amax((1, 2, 3), keepdim=True) > 0.5
    q_BHNM = (r_BHNM + torch.where(far_B111, scale_B111.square() * e_BHNM, 0)).softmax(-1)
    log_change_B, change_BHNM = _change_of_softmax(q_BHNM, 2 * log_B, e_BHNM)
    change_BHNM = torch.where(far_B111, 0, change_BHNM)

    most_BH11 = q_BHNM.mean(-2, keepdim=True).argmax(-1, keepdim=True)
    reference_BH1K = value_BHMK.take_along_dim(most_BH11, -2)
    value_BHMK = value_BHMK - reference_BH1K
    mean_BH1K = mean_BD[:, None, None] @ w.w_v_HDK + w.b_v_HK[:, None] + scale_B111 * reference_BH1K
    mean_BD = (mean_BH1K @ w.w_o_HKD).sum((1, 2)) + w.b_o_D
    first_order_BND = ((q_BHNM @ value_BHMK) @ w.w_o_HKD).sum(1)
    third_order_BND = ((change_BHNM @ value_BHMK) @ w.w_o_HKD).sum(1)
    moved = _recentred(mean_BD, log_B, first_order_BND, present_BN)
    same_B11 = _all_see_the_same(seen, present_BN, unit_BND)[:, None, None] & ~far_B111[:, 0]
    first_order_BND = torch.where(same_B11, 0.0, moved.unit_BND)  # rounding, where it is exactly zero
    rows = _sum(moved.log_scale_B, first_order_BND, log_B + log_change_B, third_order_BND)
    return _recentred(moved.mean_BD, *rows, present_BN)


def _change_of_softmax(q_BHNM: Tensor, log_B: Tensor, e_BHNM: Tensor) -> tuple[Tensor, Tensor]:
    """P - Q for P proportional to Q exp(exp(log) E), as exp(log') times a matrix about 1 in size; |exp(log) E| < 1.

    Rows whose largest |exp(log) E| is below 1e-17 use the limit Q (E - sum_j Q_ij E_ij), exact to rounding there.
    """
    size_B = e_BHNM.abs().amax((1, 2, 3))
    log_B = log_B + size_B.log()
    e_BHNM = e_BHNM / torch.where(size_B > 0, size_B, 1)[:, None, None, None]
    scale_B111 = log_B.exp()[:, None, None, None]
    small_BHNM = scale_B111 * e_BHNM
    limit_BHNM = q_BHNM * (e_BHNM - (q_BHNM * e_BHNM).sum(-1, keepdim=True))
    lse_BHN1 = (q_BHNM * small_BHNM.expm1()).sum(-1, keepdim=True).log1p()
    exact_BHNM = q_BHNM * (small_BHNM - lse_BHN1).expm1() / scale_B111
    return log_B, torch.where(small_BHNM.abs().amax(-1, keepdim=True) < 1e-17, limit_BHNM, exact_BHNM)


def _seen(module: Attention, present_BN: Tensor | None, unit_BND: Tensor) -> Tensor | None:
    """Which keys each query sees, (B or 1, 1, N or 1, M); None when it sees all of them."""
    seen = module.seen(present_BN, unit_BND.shape[1], unit_BND.device)
    if seen is None:
        return None
    return seen[:, None] if seen.dim() == 3 else seen[None, None]


def _hidden(x_BHNM: Tensor, seen: Tensor | None, value: float) -> Tensor:
    return x_BHNM if seen is None else torch.where(seen, x_BHNM, value)


def _all_see_the_same(seen: Tensor | None, present_BN: Tensor | None, unit_BND: Tensor) -> Tensor:
    """Whether all tokens of a sequence see the same keys, (B,) bool."""
    if seen is None:
        return torch.ones(len(unit_BND), dtype=torch.bool, device=unit_BND.device)
    alike_BN = (seen == seen[:, :, :1]).all(-1)[:, 0]
    if present_BN is not None:
        alike_BN = alike_BN | ~present_BN
    return alike_BN.all(-1).expand(len(unit_BND))


def norm(state: State, module: Norm, present_BN: Tensor | None = None) -> State:
    """LayerNorm or RMSNorm of each token, with the token's own scale.

    c: the mean token, for LayerNorm centred over the width; d: R_i likewise; s^2 and s'^2: epsilon plus the mean square
    over the width of c and of c + d. The token moves by

        (c + d)/s' - c/s = d/s' + c (1/s' - 1/s),    1/s' - 1/s = -mean(2 c d + d d) / (s s' (s + s')),

    times the learned scale. Loses digits only as far as all of R points along c, which a norm takes out.
    """
    scale_B11 = state.log_scale_B.exp()[:, None, None]
    c_B1D, d_BND = state.mean_BD[:, None], state.unit_BND
    if module.kind == "layernorm":
        c_B1D, d_BND = (x - x.mean(-1, keepdim=True) for x in (c_B1D, d_BND))
    s_B11, moved_BN1 = (module.scale(x).reciprocal() for x in (c_B1D, c_B1D + scale_B11 * d_BND))
    tilt_BN1 = (2 * c_B1D * d_BND + scale_B11 * d_BND.square()).mean(-1, keepdim=True)
    rows_BND = d_BND / moved_BN1 - c_B1D * tilt_BN1 / (s_B11 * moved_BN1 * (s_B11 + moved_BN1))
    if module.weight is not None:
        rows_BND = rows_BND * module.weight
    return _recentred(module(state.mean_BD), state.log_scale_B, rows_BND, present_BN)


def mlp(state: State, module: MLP, present_BN: Tensor | None = None) -> State:
    """The MLP of each token: how its hidden units differ from the mean token's, then the second linear map."""
    z_B1F, d_BNF = module.up(state.mean_BD)[:, None], state.unit_BND @ module.up.weight.T
    rows_BNF = CHANGES[module.activation_name](z_B1F, state.log_scale_B[:, None, None], d_BNF)
    mean_BD = module(state.mean_BD)
    return _recentred(mean_BD, state.log_scale_B, rows_BNF @ module.down.weight.T, present_BN)


def _gelu_change(z: Tensor, log_scale: Tensor, d: Tensor) -> Tensor:
    """(gelu(z + e d) - gelu(z)) / e, e = exp(log_scale).

    For |e d| <= 1 it is d times the mean of gelu' between the two, by Gauss and Legendre's rule on ten points: its
    error is below 1e-20, from (10!)^4 / (21 (20!)^3) |e d|^20 and |gelu's 21st derivative| < 1e10. Else as it stands.
    """
    scale = log_scale.exp()
    points, weights = np.polynomial.legendre.leggauss(10)
    slope = sum(
        weight / 2 * _gelu_slope(z + (1 + point) / 2 * scale * d) for point, weight in zip(points, weights, strict=True)
    )
    return torch.where((scale * d).abs() <= 1, d * slope, (F.gelu(z + scale * d) - F.gelu(z)) / scale)


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-z * math.sqrt(0.5)) + z * (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)


def _relu_change(z: Tensor, log_scale: Tensor, d: Tensor) -> Tensor:
    """(relu(z + e d) - relu(z)) / e, e = exp(log_scale): exact, with tokens on both sides of the kink too.

    On which side a mean token lies is known if z is not within rounding of 0 by chance; z = 0 itself is exact.
    """
    z = torch.where(z == 0, 0, z * (-log_scale).exp())  # infinite where d cannot reach the kink
    return torch.where(z > 0, torch.maximum(d, -z), (d + z).clamp(min=0))


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"gelu": _gelu_change, "relu": _relu_change}
