"""Hyper-connections: how far the streams of a token have become equal, and what their mixing matrices do to them.

A sub-layer turns the streams X (S, D) of a token into M X plus what it writes; M is its mixing matrix, with the factor
of the skip. Near M = I the streams keep apart; M = 1 1^T / S makes them equal at once. Distances are spectral norms:
I and 1 1^T / S are 1 apart.

Shapes: B sequence, N token, D width, S stream.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankbench.model.network import Network


def stream_residual(x_BNSD: Tensor, counted_BN: Tensor | None = None) -> Tensor:
    """Distance of the streams of a token to their mean over their size, 0 to 1, in the Frobenius norm; mean over the
    tokens that count, (B,). nan if a token's streams are zero."""
    rest_BNSD = x_BNSD - x_BNSD.mean(-2, keepdim=True)
    ratio_BN = rest_BNSD.flatten(-2).norm(dim=-1) / x_BNSD.flatten(-2).norm(dim=-1)
    if counted_BN is None:
        return ratio_BN.mean(-1)
    return ratio_BN.where(counted_BN, 0).sum(-1) / counted_BN.sum(-1)


def mixing_metrics(mix_SS: Tensor, product_SS: Tensor) -> dict[str, float]:
    """Spectral norms of M - I and M - 1 1^T / S, and of the product of all mixing matrices up to this one."""
    num_streams = len(mix_SS)
    identity_SS = torch.eye(num_streams, dtype=mix_SS.dtype, device=mix_SS.device)
    matrices = {
        "mixing_from_identity": mix_SS - identity_SS,
        "mixing_from_mean": mix_SS - 1 / num_streams,
        "mixing_gain": product_SS,
    }
    return {name: torch.linalg.matrix_norm(matrix_SS.double(), 2).item() for name, matrix_SS in matrices.items()}


@torch.no_grad()
def streams_by_layer(
    network: Network, inputs: Tensor, without: str | None = None
) -> Iterator[tuple[tuple[int, str], tuple[Tensor, dict[str, float]]]]:
    """Yield layer and kind of each sub-layer, with `stream_residual` (B,) of the streams after it and `mixing_metrics`.
    Nothing for a network without hyper-connections. without: as in Network.counted."""
    streams = [sublayer.streams for sublayer in network.sublayers if sublayer.streams is not None]
    mixes = [each.mix for each in streams if isinstance(each.mix, Tensor)]
    if len(mixes) < len(network.sublayers):
        return
    x_BND, counted_BN = network.enter(network.embed(inputs)), network.counted(inputs, without)
    present_BN, product_SS = network.present(inputs), None
    for sublayer, mix_SS in zip(network.sublayers, mixes, strict=True):
        x_BND = sublayer(x_BND, present_BN)
        product_SS = mix_SS if product_SS is None else mix_SS @ product_SS
        x_BNSD = x_BND.unflatten(-1, (len(mix_SS), -1))
        place = sublayer.layer, sublayer.kind
        yield place, (stream_residual(x_BNSD, counted_BN), mixing_metrics(mix_SS, product_SS))
