"""Norms of a token: LayerNorm, RMSNorm and the Euclidean length, with a scale that can be frozen.

Shapes: B batch, N token, D width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankbench.config.model import ModelConfig

NORM_EPSILON = 1e-5  # torch's default for LayerNorm; the same for RMSNorm, so that the two can be compared


class Norm(nn.Module):
    """LayerNorm, RMSNorm or x / ||x|| (l2norm) over the width, as scale(x) times a linear map plus a shift.

    The learned weight has one entry per coordinate; for l2norm it is a single number (Amsel et al.). With its scale
    frozen, the norm is affine; the path sums of a frozen network rely on that. factor: fixed multiplier of the whole
    output, shift included; not learned.
    """

    factor = 1.0

    def __init__(self, cfg: ModelConfig, affine: bool, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.kind, self.width, self.epsilon = cfg.norm_kind, cfg.width, NORM_EPSILON
        self.weight = nn.Parameter(torch.ones(1 if cfg.norm_kind == "l2norm" else cfg.width)) if affine else None
        self.shift = nn.Parameter(torch.zeros(cfg.width)) if affine and cfg.norm_kind == "layernorm" else None

    def scale(self, x_BND: Tensor) -> Tensor:
        """The `norm_scale` of this kind, (B, N, 1)."""
        return norm_scale(self.kind, x_BND, self.epsilon)

    def linear(self, x_BND: Tensor, scale_BN1: Tensor) -> Tensor:
        """The norm with frozen scale and without shift; linear in x."""
        factor = scale_BN1 if self.factor == 1 else scale_BN1 * self.factor
        factor = factor if self.weight is None else factor * self.weight
        if self.kind == "layernorm":
            return (x_BND - x_BND.mean(-1, keepdim=True)).mul_(factor)
        return x_BND * factor

    def with_scale(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """The normed tokens and their `scale`."""
        if self.kind == "layernorm":  # the kernel returns the scale
            learned = (self.weight, self.shift)
            normed_BND, _, scale_BN1 = torch.native_layer_norm(x_BND, (self.width,), *learned, self.epsilon)
            return self._scaled(normed_BND), scale_BN1
        return self(x_BND), self.scale(x_BND)

    def forward(self, x_BND: Tensor) -> Tensor:
        return self._scaled(_normed(self.kind, x_BND, self.weight, self.shift, self.epsilon))

    def _scaled(self, normed_BND: Tensor) -> Tensor:
        return normed_BND if self.factor == 1 else normed_BND * self.factor


def norm_scale(kind: str, x_BND: Tensor, epsilon: float = NORM_EPSILON) -> Tensor:
    """One over the token's standard deviation (layernorm), root mean square (rmsnorm) or norm (l2norm); (B, N, 1)."""
    if kind == "l2norm":
        return (x_BND.square().sum(-1, keepdim=True) + epsilon).rsqrt()
    centred = x_BND - x_BND.mean(-1, keepdim=True) if kind == "layernorm" else x_BND
    return (centred.square().mean(-1, keepdim=True) + epsilon).rsqrt()


def _normed(
    kind: str, x_BND: Tensor, weight: Tensor | None, shift: Tensor | None, epsilon: float = NORM_EPSILON
) -> Tensor:
    if kind == "l2norm":
        scale_BN1 = norm_scale(kind, x_BND, epsilon)
        return x_BND * (scale_BN1 if weight is None else scale_BN1 * weight)
    if kind == "layernorm":
        return F.layer_norm(x_BND, x_BND.shape[-1:], weight, shift, epsilon)
    return F.rms_norm(x_BND, x_BND.shape[-1:], weight, epsilon)


def plain_norm(kind: str, x_BND: Tensor) -> Tensor:
    """A norm of this kind without a learned scale or shift."""
    # an explicit scale of 1 and shift of 0 select torch's fast kernel of LayerNorm, which takes half the time
    ones_D = x_BND.new_ones(x_BND.shape[-1])
    return _normed(kind, x_BND, ones_D, torch.zeros_like(ones_D))
