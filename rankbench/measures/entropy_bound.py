"""The lower bound on the entropy of a row of attention, which is attained (Zhai et al. 2023, Theorem 3.1).

Among T scores of norm at most sigma (in the source, a bound on the spectral norms of the weights and the tokens' norms)
the least entropy has one score ahead of T - 1 equal ones. All of the norm is then in a gap of
d = sigma sqrt(T/(T-1)), and with b = exp(-d) the entropy is log(1 + (T-1) b) + (T-1) b d / (1 + (T-1) b). The source
states this bound; it falls like sigma exp(-sigma).

`of_heads` gives the theorem's bound for the heads of a network, from the spectral norms of their maps and tokens.

Shapes: N query token, M key token, D width, H head, K head width.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.measures.lipschitz_of_networks import layer_of
from rankbench.model.network import Network, attention_steps
from rankbench.model.sublayers import AttentionSublayer


def least_entropy(tokens: int, sigma: float) -> float:
    """Least entropy, in nats, of the softmax of this many scores of norm sigma."""
    if tokens == 1:
        return 0.0
    gap = sigma * math.sqrt(tokens / (tokens - 1))
    others = (tokens - 1) * math.exp(-gap)
    return math.log1p(others) + others * gap / (1 + others)


@torch.no_grad()
def of_heads(network: Network, sequence: Tensor) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield each layer with the numbers below for its heads at one sequence, each (H,). Leaves out layers that have a
    mask, or whose scores are not dot products.

    entropy_nats and least_entropy_nats: mean and least entropy of the rows of P. score_norm_bound: sigma, the spectral
    norm of W_QK times the square of the tokens' spectral norm. A bias of the queries is one more row of W_Q, which a
    token reads by an entry of 1. entropy_bound_nats: no row has less entropy (Zhai et al. 2023, Theorem 3.1).
    """
    for step, x_ND in zip(attention_steps(network, sequence[None]), _read(network, sequence), strict=True):
        sublayer = step.sublayer
        layer = layer_of(sublayer.part, len(sequence))
        if layer is None or layer.kind != "dot" or layer.seen_NM is not None:
            continue
        w = layer.maps
        w_q_HDK, read_ND = w.w_q_HDK, x_ND
        if w.b_q_HK.any():
            w_q_HDK, read_ND = torch.cat([w_q_HDK, w.b_q_HK[:, None]], 1), F.pad(x_ND, (0, 1), value=1.0)
        of_maps_H = torch.linalg.matrix_norm(w_q_HDK @ w.w_k_HDK.mT, 2) / layer.scale
        sigma_H = of_maps_H * torch.linalg.matrix_norm(x_ND, 2) * torch.linalg.matrix_norm(read_ND, 2)
        entropy_HN = torch.special.entr(step.weights_BHNM[0]).sum(-1)
        bounds = [least_entropy(len(sequence), sigma) for sigma in sigma_H.tolist()]
        values = {"entropy_nats": entropy_HN.mean(-1), "least_entropy_nats": entropy_HN.amin(-1)}
        values |= {"score_norm_bound": sigma_H, "entropy_bound_nats": sigma_H.new_tensor(bounds)}
        yield sublayer.layer, values


def _read(network: Network, sequence: Tensor) -> Iterator[Tensor]:
    """The tokens that queries and keys of each layer are made from, (N, D)."""
    x_1ND = network.enter(network.embed(sequence[None]))
    for sublayer in network.sublayers:
        if isinstance(sublayer, AttentionSublayer):
            read_1ND = x_1ND if sublayer.streams is None else sublayer.streams.gathered(x_1ND)
            yield sublayer.before(read_1ND, sublayer.norm)[0]
        x_1ND = sublayer(x_1ND)
