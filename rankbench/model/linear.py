"""The linear maps of the blocks: plain, or with the spectral norm as a separate parameter; and those of single heads.

Shapes: D width, H head, K head width; M map, O output, I input.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rankbench.config.model import ModelConfig

SQUARINGS = 30  # the norm's relative error is largest, 2e-10, where the two largest singular values nearly agree


class ReadOut(Protocol):
    """A map of each token. weight: of its last linear map, (O, I)."""

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


class LinearMap(ReadOut, Protocol):
    """x weight^T + bias, as in nn.Linear."""

    @property
    def bias(self) -> Tensor | None: ...


class HeadMaps(NamedTuple):
    """One layer's heads, each as its own linear maps: y_h = M_h (x W_V,h + b_V,h) W_O,h, and b_O once for the layer.

    M_h is the matrix that multiplies the values: P_h, or its mix with the identity and the average, or P_h with
    scaled columns. w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD; b_q_HK, b_k_HK, b_v_HK, b_o_D (zeros without biases). In w_v,
    w_o and b_v, K is the width of the values. Scores are products of w_q and w_k only if Heads.has_score_maps is true.
    """

    w_q_HDK: Tensor
    w_k_HDK: Tensor
    w_v_HDK: Tensor
    w_o_HKD: Tensor
    b_q_HK: Tensor
    b_k_HK: Tensor
    b_v_HK: Tensor
    b_o_D: Tensor


class SigmaReparam(nn.Module):
    """W -> gamma W / ||W||_2 with a learned scalar gamma (Zhai et al. 2023, sigma-reparam).

    num_maps: number of maps that are stacked in the weight; each has its own gamma. The norm is exact, by singular
    value decomposition, while the paper runs a power iteration.
    """

    def __init__(self, num_maps: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_maps))

    def forward(self, weight: Tensor) -> Tensor:
        if weight.is_meta:  # a shape alone, which autocast does not know
            return weight
        w_MOI = weight.unflatten(0, (len(self.gamma), -1))
        left_MO, right_MI = largest_pair(w_MOI.detach())
        with torch.autocast(weight.device.type, enabled=False):  # bfloat16 would spoil the norm's third digit
            # with u and v held fixed, u^T W v has the value and the gradient of the largest singular value
            sigma_M = (left_MO * (w_MOI @ right_MI[..., None]).squeeze(-1)).sum(-1)
        return (w_MOI * (self.gamma / sigma_M)[:, None, None]).flatten(0, 1)


def largest_pair(w_MOI: Tensor) -> tuple[Tensor, Tensor]:
    """The left and right singular vectors of the largest singular value of each matrix, (M, O) and (M, I).

    On CUDA, torch's decomposition takes one matrix after the other and makes the host wait. There, W^T W is squared
    repeatedly instead, until it has rank one: a power iteration of 2^SQUARINGS steps from every unit vector at once.
    """
    if w_MOI.device.type != "cuda":
        left_MOR, _, right_MRI = torch.linalg.svd(w_MOI, full_matrices=False)
        return left_MOR[..., :, 0], right_MRI[..., 0, :]
    with torch.autocast(w_MOI.device.type, enabled=False):
        power_MII = w_MOI.mT @ w_MOI
        for _ in range(SQUARINGS):
            power_MII = power_MII / power_MII.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
            power_MII = power_MII @ power_MII
        best_M1 = power_MII.diagonal(dim1=-2, dim2=-1).argmax(-1, keepdim=True)
        right_MI = power_MII.gather(-1, best_M1[..., None, :].expand(*power_MII.shape[:-1], 1)).squeeze(-1)
        right_MI = right_MI / right_MI.norm(dim=-1, keepdim=True)
        left_MO = (w_MOI @ right_MI[..., None]).squeeze(-1)
        return left_MO / left_MO.norm(dim=-1, keepdim=True), right_MI


class Linear(nn.Linear):
    """nn.Linear, but without a draw on the meta device, where drawing takes longer than all the rest."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


def linear(cfg: ModelConfig, num_inputs: int, num_outputs: int, num_maps: int = 1) -> nn.Linear:
    """Build a linear map of a block according to model.bias and model.weight_norm; num_maps as in SigmaReparam."""
    module = Linear(num_inputs, num_outputs, bias=cfg.bias)
    if cfg.weight_norm == "sigma":
        parametrize.register_parametrization(module, "weight", SigmaReparam(num_maps), unsafe=True)
    return module


def free_weight(module: nn.Linear) -> Tensor:
    """The free parameter of a linear map's weight: the weight itself unless it is parametrised."""
    is_parametrized = parametrize.is_parametrized(module, "weight")
    return module.get_parameter("parametrizations.weight.original") if is_parametrized else module.weight
