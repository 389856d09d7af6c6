"""The linear maps of the blocks: plain, or with their spectral norm as a parameter of its own."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from rankbench.config import ModelConfig


class SigmaReparam(nn.Module):
    """W -> gamma W / ||W||_2 with a learned scalar gamma (Zhai et al. 2023, sigma-reparam).

    num_maps: how many maps, one below the other, the weight holds; each has a gamma of its own. The norm is exact, by
    singular value decomposition, and not the running power iteration of the paper.
    """

    def __init__(self, num_maps: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(num_maps))

    def forward(self, weight: Tensor) -> Tensor:
        w_MOI = weight.unflatten(0, (len(self.gamma), -1))
        with torch.no_grad():
            left_MOR, _, right_MRI = torch.linalg.svd(w_MOI, full_matrices=False)
        # u^T W v with u and v held fixed has the value and the gradient of the largest singular value
        sigma_M = (left_MOR[..., :, 0] * (w_MOI @ right_MRI[..., 0, :, None]).squeeze(-1)).sum(-1)
        return (w_MOI * (self.gamma / sigma_M)[:, None, None]).flatten(0, 1)


def linear(cfg: ModelConfig, num_inputs: int, num_outputs: int, num_maps: int = 1) -> nn.Linear:
    """A linear map of a block, as model.bias and model.weight_norm say; num_maps as in SigmaReparam."""
    module = nn.Linear(num_inputs, num_outputs, bias=cfg.bias)
    if cfg.weight_norm == "sigma":
        parametrize.register_parametrization(module, "weight", SigmaReparam(num_maps), unsafe=True)
    return module


def free_weight(module: nn.Linear) -> Tensor:
    """The parameter behind a linear map's weight: the weight itself unless it is parametrised."""
    return module.parametrizations.weight.original if parametrize.is_parametrized(module, "weight") else module.weight
