"""The bound on attention's Jacobian at given inputs, from which the bounds on balls come.

Shapes: B batch, H head, N query token, M key token, D and E width, K head width.
"""

import torch
from torch import Tensor

from rankbench.measures.attention_layer import AttentionLayer, weights
from rankbench.measures.norms import spectral_norm


def local_2(layer: AttentionLayer, x_BND: Tensor) -> Tensor:
    """Bound on ||J(X)||_2 at these inputs alone, (B,); dot or l2, tied or not, masked or not.

    The three terms that lipschitz_bounds.softmax_ball_2 then bounds on a ball, times ||V||, summed over the heads.
    """
    p_BHNM = weights(layer, x_BND)
    q_BHNK, k_BHMK = layer.queries_keys(x_BND)
    # from centred tokens: second moments less squared means lose all digits where tokens are far out or equal
    centred_BHNMD = x_BND[:, None, None] - (p_BHNM @ x_BND[:, None])[..., None, :]
    covariance_BHNDE = (p_BHNM[..., None] * centred_BHNMD).mT @ centred_BHNMD
    spread_BHN = covariance_BHNDE.diagonal(dim1=-2, dim2=-1).sum(-1)
    widest_BH = torch.linalg.eigvalsh(covariance_BHNDE)[..., -1].amax(-1)
    pulled_BHND = q_BHNK @ layer.maps.w_k_HDK.mT / layer.scale
    if layer.kind == "l2":
        keys_BHMD = k_BHMK @ layer.maps.w_k_HDK.mT / layer.scale
        squared_BHNM = torch.cdist(pulled_BHND, keys_BHMD, compute_mode="donot_use_mm_for_euclid_dist").square()
    else:
        squared_BHNM = pulled_BHND.square().sum(-1, keepdim=True)
    columns_BH = (p_BHNM * spread_BHN[..., None] * squared_BHNM).sum(-2).amax(-1)
    inner_BH = spectral_norm(p_BHNM) + layer.slope * (spectral_norm(layer.a_HDD) * widest_BH + columns_BH.sqrt())
    return (inner_BH * spectral_norm(layer.values_HDD)).sum(-1)
