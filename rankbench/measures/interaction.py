"""What paths do together: the interaction of recomputed ones, which are not additive, and whether it is rounding; the
interference of those of one length, ||sum of the paths||^2 over the sum of their squares, 1 for orthogonal paths.

Shapes: P path or output, B batch, N token, D width, L layer, H head, K path length, S draw of signs, G group of paths.
"""

import functools
from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import torch
from torch import Tensor

from rankbench.measures.frozen_network import FrozenNetwork, with_signs
from rankbench.measures.norms import frobenius_norm, without_absent
from rankbench.measures.paths import chunks_of, joint_network, paths_as, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.measures.rounding import FLOOR_SEQUENCES, MARGIN, RandomRounding, num_passes, side_by_side
from rankbench.model.network import Network
from rankbench.model.norm import plain_norm
from rankbench.progress import counted


def interaction(model: Network, joint_BND: Tensor, sum_BND: Tensor, present_BN: Tensor | None) -> Tensor:
    """||n(joint) - n(sum)||_F / ||n(joint)||_F of each sequence, n the norm before the read-out; nan for
    0 / 0. Inputs (..., B, N, D), result (..., B)."""
    norm = functools.partial(plain_norm, model.norm_kind)
    joint_BND, sum_BND = (without_absent(norm(x_BND), present_BN) for x_BND in (joint_BND, sum_BND))
    size_B = frobenius_norm(joint_BND)
    return torch.where(size_B > 0, frobenius_norm(joint_BND - sum_BND) / size_B, torch.nan)


def share_below_floor(
    model: Network,
    inputs: Tensor,
    joint_PBND: Tensor,
    sum_PBND: Tensor,
    joint_and_sum: Callable[[Tensor], tuple[Tensor, Tensor]],
    generator: torch.Generator,
) -> list[float]:
    """Share of the first sequences whose interaction is at most the change that random rounding makes to its two sides.

    joint_PBND, sum_PBND: P outputs each, which joint_and_sum(inputs) returned. generator: on the CPU.
    """
    joint_PBND, sum_PBND = (x_PBND[:, :FLOOR_SEQUENCES] for x_PBND in (joint_PBND, sum_PBND))
    inputs = inputs[:FLOOR_SEQUENCES]
    passes, present_BN = num_passes(inputs.shape[1], model.width), model.counted(inputs)
    with RandomRounding(generator):
        perturbed = [x.split(len(inputs), dim=1) for x in joint_and_sum(side_by_side(inputs, passes))]
    floor_PB = torch.zeros_like(joint_PBND[..., 0, 0])
    distance = functools.partial(interaction, model, present_BN=present_BN)
    for joint, total in zip(*perturbed, strict=True):
        floor_PB = torch.maximum(floor_PB, MARGIN * (distance(joint_PBND, joint) + distance(sum_PBND, total)))
    return (distance(joint_PBND, sum_PBND) <= floor_PB).double().mean(1).tolist()


def interactions_of_pairs(
    model: Network, inputs: Tensor, paths_PL: np.ndarray, max_paths: int, generator: torch.Generator
) -> dict[tuple[int, int], dict[str, float]]:
    """Interaction of each pair of paths (rows of paths_PL) and whether it is rounding; pairs with too many combined
    paths are left out. generator: of random rounding."""
    choices_of_pair = {}
    for j, k in combinations(range(len(paths_PL)), 2):
        if 2 ** int((paths_PL[j] != paths_PL[k]).sum()) <= max_paths:
            choices_of_pair[j, k] = [sorted({int(a), int(b)}) for a, b in zip(paths_PL[j], paths_PL[k], strict=True)]
    if not choices_of_pair:
        return {}
    groups = [np.array(list(product(*choices)), dtype=np.int64) for choices in choices_of_pair.values()]

    def joint_and_sum(inputs: Tensor) -> tuple[Tensor, Tensor]:
        network = RecomputedNetwork(model, inputs)
        joint = [joint_network(network, choices) for choices in choices_of_pair.values()]
        return torch.stack(joint), sums_of_groups(network, groups)

    chunks = chunks_of(inputs, len(groups) * inputs.shape[1] * model.width)
    parts = []
    for number, chunk_BN in enumerate(chunks):
        sides = joint_and_sum(chunk_BN)
        parts.append(interaction(model, *sides, model.counted(chunk_BN)))
        if number == 0:
            below = share_below_floor(model, chunk_BN, *sides, joint_and_sum, generator)
    columns = zip(torch.cat(parts, dim=1).mean(1).tolist(), below, strict=True)
    named = ({"interaction": mean, "interaction_below_floor": share} for mean, share in columns)
    return dict(zip(choices_of_pair, named, strict=True))


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
