"""The linear maps of the blocks: plain, or with the spectral norm as a separate parameter."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rankbench.config import ModelConfig


class SigmaReparam(nn.Module):
    """W -> gamma W / ||W||_2 with a learned scalar gamma (Zhai et al. 2023, sigma-reparam).

    num_maps: number of maps that are stacked in the weight; each has its own gamma. The norm is exact, by singular
    value decomposition, while the paper runs a power iteration.
    """

    def __init__(self, num_maps: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_maps))

    def forward(self, weight: Tensor) -> Tensor:
        w_MOI = weight.unflatten(0, (len(self.gamma), -1))
        with torch.no_grad():
            left_MOR, _, right_MRI = torch.linalg.svd(w_MOI, full_matrices=False)
        # with u and v held fixed, u^T W v has the value and the gradient of the largest singular value
        sigma_M = (left_MOR[..., :, 0] * (w_MOI @ right_MRI[..., 0, :, None]).squeeze(-1)).sum(-1)
        return (w_MOI * (self.gamma / sigma_M)[:, None, None]).flatten(0, 1)


def linear(cfg: ModelConfig, num_inputs: int, num_outputs: int, num_maps: int = 1) -> nn.Linear:
    """Build a linear map of a block according to model.bias and model.weight_norm; num_maps as in SigmaReparam."""
    module = nn.Linear(num_inputs, num_outputs, bias=cfg.bias)
    if cfg.weight_norm == "sigma":
        parametrize.register_parametrization(module, "weight", SigmaReparam(num_maps), unsafe=True)
    return module


def free_weight(module: nn.Linear) -> Tensor:
    """The free parameter of a linear map's weight: the weight itself unless it is parametrised."""
    return module.parametrizations.weight.original if parametrize.is_parametrized(module, "weight") else module.weight
