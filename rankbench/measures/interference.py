"""Interference of the paths of a length: ||sum of the paths||^2 over the sum of their squares, 1 for orthogonal paths.

Shapes: P path, B batch, N token, D width, L layer, H head, K path length, S draw of signs, G group of paths.
"""

import numpy as np
import torch
from torch import Tensor

from rankbench.measures.frozen_network import FrozenNetwork, with_signs
from rankbench.measures.norms import without_absent
from rankbench.measures.paths import chunks_of, paths_as, sums_of_groups
from rankbench.model.network import Network
from rankbench.progress import counted


def squares_of_paths(model: Network, scheme: str, inputs: Tensor, groups: list[np.ndarray]) -> Tensor:
    """sum_p ||Y_p||_F^2 over the paths of each group and all sequences, shape (G,); every path is run."""
    paths_PL = np.concatenate(groups)
    squares_P = torch.zeros(len(paths_PL), dtype=torch.float64, device=inputs.device)
    for chunk_BN in chunks_of(inputs, len(paths_PL) * inputs.shape[1] * model.width):
        outputs_PBND = sums_of_groups(paths_as(scheme, model, chunk_BN), list(paths_PL[:, None]))
        squares_P += without_absent(outputs_PBND, model.counted(chunk_BN)).flatten(1).double().square().sum(1)
    return torch.stack([part_P.sum() for part_P in squares_P.split([len(group) for group in groups])])


def squares_by_signs(model: Network, inputs: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Unbiased estimates (S, K) of sum_p ||Y_p||_F^2 for each length, one from each draw of signs (`with_signs`)."""
    signs_SLH = torch.randint(2, (draws, model.num_layers, model.num_heads), generator=generator) * 2 - 1
    signs_SLH = signs_SLH.to(inputs.device, model.read_out.weight.dtype)
    squares_SK = torch.zeros(draws, model.num_layers + 1, dtype=torch.float64, device=inputs.device)
    chunks = chunks_of(inputs, inputs.shape[1] * model.width * (model.num_layers + 2))
    for chunk_BN in counted(chunks, len(inputs), "independence: sequences with signs", len):
        network = FrozenNetwork(model, chunk_BN)
        for draw, signs_LH in enumerate(signs_SLH):
            sums_KBND = with_signs(network, signs_LH).by_length().by_length_KBND
            squares_SK[draw] += without_absent(sums_KBND, model.counted(chunk_BN)).flatten(1).double().square().sum(1)
    return squares_SK


def interference(square_of_sum: Tensor, estimates_S: Tensor) -> tuple[float, float]:
    """||sum_p Y_p||^2 over the mean of the estimates of sum_p ||Y_p||^2, with its standard error, of the same
    relative size as the mean's; 0 for a single, exact estimate. nan if the mean is 0."""
    mean = estimates_S.mean()
    share = torch.where(mean == 0, torch.nan, square_of_sum / mean).item()
    if len(estimates_S) == 1:
        return share, 0.0
    return share, (share * estimates_S.std() / len(estimates_S) ** 0.5 / mean).item()
