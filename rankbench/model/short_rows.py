"""Whole layers of attention on short sequences, with derivatives written by hand, for training on a CPU.

With few tokens, calling a matrix product costs more than the product itself. This module runs a third of the operations
that autograd runs for the same layer.

Shapes: S seed, B batch, N query token, M key token, D width, H head, K head width, O and I widths of a linear map.
"""

import torch
from torch import Tensor


def attention_of_short_rows(
    x_BND: Tensor,
    qkv: tuple[Tensor, Tensor | None],
    out: tuple[Tensor, Tensor | None],
    heads: int,
    scale: float,
    seen_NM: Tensor | None = None,
    dropout_BHNM: Tensor | None = None,
    side_by_side: bool = False,
) -> Tensor:
    """softmax(scale q k^T) v of every head, and the map back to the width; (B, N, D).

    qkv: weight and bias (or None) of the map to all heads' queries, then all heads' keys, then all heads' values. out:
    the same for the map from the heads back to the width. seen_NM: bool, the keys that each query sees; None for all.
    dropout_BHNM: factors of the attention weights. side_by_side: only for networks under vmap, whose axis becomes part
    of the products. Second derivatives are not available.
    """
    layer = _SideBySide if side_by_side else _ShortRows
    return layer.apply(x_BND, *qkv, *out, dropout_BHNM, seen_NM, heads, scale)


class _ShortRows(torch.autograd.Function):
    """The layer of one network, or of several if x, weights and dropout have a leading axis S."""

    @staticmethod
    def forward(ctx, x, w_qkv, b_qkv, w_out, b_out, dropout, seen_NM, heads: int, scale: float) -> Tensor:
        num_tokens, inner = x.shape[-2], w_out.shape[-1]
        x_TD = x.flatten(-3, -2)
        qkv_TO = _affine(x_TD, w_qkv, b_qkv)
        by_head = (-1, num_tokens, 3, heads, inner // heads)
        qkv = qkv_TO.view(by_head).permute(2, 0, 3, 1, 4).reshape(3, -1, num_tokens, inner // heads)
        q, k, v = qkv
        q.mul_(scale)
        p = torch.bmm(q, k.mT)
        if seen_NM is not None:
            p.masked_fill_(~seen_NM, float("-inf"))
        p.sub_(p.amax(-1, keepdim=True)).exp_()
        p.div_(p.sum(-1, keepdim=True))
        kept = p if dropout is None else p * dropout.reshape(p.shape)
        mixed_TI = _concatenated(torch.bmm(kept, v), heads, x_TD.shape[:-1])
        ctx.save_for_backward(x_TD, w_qkv, w_out, qkv, p, mixed_TI, dropout)
        ctx.heads, ctx.scale, ctx.shape = heads, scale, x.shape
        ctx.biases = b_qkv is not None, b_out is not None
        return _affine(mixed_TI, w_out, b_out).view(x.shape)

    @staticmethod
    def backward(ctx, slope):
        if torch.is_grad_enabled():  # what is saved is not part of the graph, so a second derivative would lack terms
            raise RuntimeError("attention_of_short_rows: has no second derivative; use the kernel `table`")
        x_TD, w_qkv, w_out, qkv, p, mixed_TI, dropout = ctx.saved_tensors
        (q, k, v), num_tokens = qkv, p.shape[-1]
        slope_TD = slope.reshape(x_TD.shape)
        slope_TI = slope_TD @ w_out
        by_head = (-1, num_tokens, ctx.heads, q.shape[-1])
        slope_y = slope_TI.view(by_head).transpose(1, 2).reshape(q.shape)
        slopes, kept = torch.empty_like(qkv), p if dropout is None else p * dropout.reshape(p.shape)
        torch.bmm(kept.mT, slope_y, out=slopes[2])
        slope_s = torch.bmm(slope_y, v.mT).mul_(kept)  # the slope of P, times P
        slope_s.addcmul_(p, slope_s.sum(-1, keepdim=True), value=-1)
        torch.bmm(slope_s.mT, q, out=slopes[1])
        torch.bmm(slope_s, k, out=slopes[0])
        slopes[0].mul_(ctx.scale)
        slope_TO = slopes.view(3, -1, ctx.heads, num_tokens, q.shape[-1]).permute(1, 3, 0, 2, 4)
        slope_TO = slope_TO.reshape(*x_TD.shape[:-1], -1)
        slope_x = (slope_TO @ w_qkv).view(ctx.shape) if ctx.needs_input_grad[0] else None
        biases = [part.sum(-2) if has else None for part, has in zip((slope_TO, slope_TD), ctx.biases, strict=True)]
        return slope_x, slope_TO.mT @ x_TD, biases[0], slope_TD.mT @ mixed_TI, biases[1], *[None] * 4


class _SideBySide(torch.autograd.Function):
    """The layer under vmap. Autograd, beneath vmap, records what the vmap rule calls, so no backward is needed."""

    @staticmethod
    def forward(*arguments) -> Tensor:
        raise RuntimeError("side_by_side: called outside vmap; leave it out for one network")

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info, in_dims: tuple, *arguments) -> tuple[Tensor, int]:
        def stacked(x: Tensor, mapped_dim: int | None) -> Tensor:
            return x.expand(info.batch_size, *x.shape) if mapped_dim is None else x.movedim(mapped_dim, 0)

        tensors = [None if x is None else stacked(x, at) for x, at in zip(arguments[:6], in_dims[:6], strict=True)]
        return _ShortRows.apply(*tensors, *arguments[6:]), 0


def _affine(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    if bias_O is None:
        return x_TI @ weight_OI.mT
    if x_TI.ndim == 2:
        return torch.addmm(bias_O, x_TI, weight_OI.mT)
    return torch.baddbmm(bias_O[:, None], x_TI, weight_OI.mT)


def _concatenated(y: Tensor, heads: int, lead: torch.Size) -> Tensor:
    """Outputs of the heads, (.. H, N, K), side by side: (*lead, H K)."""
    return y.view(-1, heads, *y.shape[1:]).transpose(1, 2).reshape(*lead, -1)
