"""Power iteration underestimates a spectral norm (Kim et al. 2021, app. B).

From a random start b it takes b to W^T W b k times and gives |W b| / |b|. With singular values s_i and parts c_i of the
start this is the root of sum c_i^2 s_i^(4k+2) / sum c_i^2 s_i^(4k), a weighted mean of the s_i^2, so at most the norm.
Derived here for n x n independent entries of variance 1/n, as n grows: the c_i^2 are alike on average, the mean of
s^(2j) is the j-th Catalan number, and the norm is 2. C_(2k+1) / C_2k = 2 (4k + 1)/(2k + 2) leaves the share sqrt((4k +
1)/(4k + 4)) of the norm: .935 after the five iterations that the source quotes as enough.

Control: matrices with one singular value far above the others, which the iteration finds.

Shapes: D width.
"""

import math
from functools import partial

import torch
from torch import Tensor

from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted

ITERATIONS = (0, 1, 2, 5, 10)
SPIKE = 8.0  # the singular value that the control adds, four times the norm of the others


def share_of_norm(iterations: int) -> float:
    """The estimate over the norm, in the limit of large matrices."""
    return math.sqrt((4 * iterations + 1) / (4 * iterations + 4))


def predicted(**_: int) -> Predicted:
    """The share by number of iterations."""
    yield from (("square matrix", iterations, share_of_norm(iterations)) for iterations in ITERATIONS)


def simulated(generator: torch.Generator, width: int, samples: int) -> Measured:
    """The same for random matrices, mean over `samples` of them."""
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    sums = {setup: torch.zeros(len(ITERATIONS), dtype=torch.float64) for setup in (CLAIMED, CONTROL)}
    for _ in range(samples):
        w_DD = draw(width, width) / math.sqrt(width)
        left_D, right_D, start_D = draw(3, width)
        spiked_DD = w_DD + SPIKE * torch.outer(left_D / left_D.norm(), right_D / right_D.norm())
        for setup, matrix_DD in ((CLAIMED, w_DD), (CONTROL, spiked_DD)):
            sums[setup] += estimates(matrix_DD, start_D) / torch.linalg.matrix_norm(matrix_DD, 2)
    for setup, sum_of_shares in sums.items():
        shares = (sum_of_shares / samples).tolist()
        yield from ((setup, "square matrix", k, share) for k, share in zip(ITERATIONS, shares, strict=True))


def estimates(matrix_DD: Tensor, start_D: Tensor) -> Tensor:
    """The estimates of the norm after each of ITERATIONS."""
    norms = []
    for iteration in range(max(ITERATIONS) + 1):
        start_D = start_D / start_D.norm()
        if iteration in ITERATIONS:
            norms.append((matrix_DD @ start_D).norm())
        start_D = matrix_DD.T @ (matrix_DD @ start_D)
    return torch.stack(norms)


LAW = Law({"width": 400, "samples": 8}, predicted, "iteration", "estimate over the spectral norm", simulated=simulated)
