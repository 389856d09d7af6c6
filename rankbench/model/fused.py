"""Attention by the fused kernel, without an N x N table, for one network or for many side by side.

Shapes: B batch, H head, N query token, M key token, E and V widths.
"""

from itertools import repeat

import torch
import torch.nn.functional as F
from torch import Tensor

MOST_SEQUENCES = 65_535  # in one launch: the limit of a CUDA grid's second and third axis
MULTIPLE = 8  # widths that must be padded are padded to a multiple of this


def fused_mixing(
    q_BHNE: Tensor,
    k_BHME: Tensor,
    v_BHMV: Tensor,
    seen_NM: Tensor | None,
    causal: bool,
    scale: float,
    side_by_side: bool = False,
) -> Tensor:
    """softmax(scale q k^T) v over the keys that each query sees; (B, H, N, V).

    seen_NM: bool, (N, M) or (B, 1, N or 1, M); None: all keys, or with `causal` those up to the query's own.
    side_by_side: only for networks under vmap; their axis becomes part of the batch. No second derivatives.
    """
    width = v_BHMV.shape[-1]
    if q_BHNE.shape[-1] != width:  # the kernels need equal widths
        common = -(-max(q_BHNE.shape[-1], width) // MULTIPLE) * MULTIPLE
        q_BHNE, k_BHME, v_BHMV = (F.pad(x, (0, common - x.shape[-1])) for x in (q_BHNE, k_BHME, v_BHMV))
    mixing = _Folded.apply if side_by_side else _kernel
    return mixing(q_BHNE, k_BHME, v_BHMV, seen_NM, causal, scale)[..., :width]


def _kernel(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, causal: bool, scale: float) -> Tensor:
    if len(q) > MOST_SEQUENCES and q.device.type == "cuda":
        seen_of = repeat(seen) if seen is None or seen.ndim == 2 or len(seen) == 1 else seen.split(MOST_SEQUENCES)
        pieces = zip(*(x.split(MOST_SEQUENCES) for x in (q, k, v)), seen_of, strict=False)
        return torch.cat([_kernel(q, k, v, seen, causal, scale) for q, k, v, seen in pieces])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=scale)


class _Folded(torch.autograd.Function):
    """The kernel under vmap: the mapped axis becomes part of the batch; torch's own vmap rule would build the tables.
    Autograd, beneath vmap, records what the vmap rule calls, so no backward is needed."""

    forward = staticmethod(_kernel)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims: tuple, q, k, v, seen, causal: bool, scale: float) -> tuple[Tensor, int]:
        def folded(x: Tensor, mapped_dim: int | None) -> Tensor:
            x = x.expand(info.batch_size, *x.shape) if mapped_dim is None else x.movedim(mapped_dim, 0)
            return x.flatten(0, -4)

        if seen is not None and seen.ndim - (in_dims[3] is not None) > 2:
            seen = folded(seen, in_dims[3])
        batched = q.ndim - (in_dims[0] is not None) > 3
        q, k, v = map(folded, (q, k, v), in_dims[:3])
        mixed = _kernel(q, k, v, seen, causal, scale)
        return mixed.unflatten(0, (info.batch_size, -1)) if batched else mixed, 0
