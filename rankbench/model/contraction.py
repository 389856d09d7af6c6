"""The bound that contractive L2 attention is divided by (Kim et al. 2021, Theorem 3.2).

Shapes: D width, H head, K head width (in W_V and W_O, the width of the values).
"""

import math
from functools import lru_cache

import scipy
import torch
from torch import Tensor


def inverse_phi(num_keys: int) -> float:
    """phi^-1(N - 1) = W_0((N - 1) / e) for phi(x) = x exp(x + 1), N keys and Lambert's function W_0.

    It is the largest variance of a softmax over N keys, one of which is the query itself (Lemma F.2). The paper's
    W_0(N / e) is a misprint, because x e^x = (N - 1) / e.
    """
    return float(scipy.special.lambertw((num_keys - 1) / math.e).real)


@lru_cache
def inverse_phis(most: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`inverse_phi` of 1 to `most` keys, (most,). Kept on the device, as a CUDA graph copies nothing from the host."""
    by_num_keys = torch.tensor([inverse_phi(number) for number in range(1, most + 1)], dtype=dtype)
    return by_num_keys.to(device, non_blocking=True)


def l2_bound_inf(
    w_q_HDK: Tensor,
    w_v_HDK: Tensor,
    w_o_HKD: Tensor,
    inverse: float | Tensor,
    attention: float = 1.0,
    others: float = 0.0,
) -> Tensor:
    """Upper bound on the Lipschitz constant of tied L2 attention in the infinity norm; the shape of `inverse`.

    (4 phi^-1(N - 1) + 1 / s) max_h ||W_Q||_inf ||W_Q^T||_inf  max_h ||W_V^T||_inf  ||W_O^T||_inf, s = sqrt(K),
    where `inverse` is inverse_phi of the number of keys and W_V is the map before A_h. If the values are mixed by
    a P + b I + c U, then attention = |a| and others = |b| + |c|: I and U are constant and stochastic, so each adds
    ||A||_inf <= ||W_Q||_inf ||W_Q^T||_inf / s. The bound holds at every temperature T, which divides the scores and not
    A: with y = x W_Q / sqrt(s T) the Jacobian's covariance term is 2 sqrt(A) Cov(y) sqrt(A)^T, as without T.
    """
    rows_H, columns_H = w_q_HDK.abs().sum(-1).amax(-1), w_q_HDK.abs().sum(-2).amax(-1)
    queries, values = (rows_H * columns_H).amax(-1), w_v_HDK.abs().sum(-2).amax((-2, -1))
    way_back = w_o_HKD.abs().sum((-3, -2)).amax(-1)
    return (attention * 4 * inverse + (attention + others) * w_q_HDK.shape[-1] ** -0.5) * queries * values * way_back
