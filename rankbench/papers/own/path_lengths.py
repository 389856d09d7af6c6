"""Lengths of the paths of a fresh pre-norm network, in closed form.

The states become x + f(norm(x)), once per layer. If the branches of normed tokens have variance 1 and are independent
of the states, as with fresh weights, the states before layer l have variance l, and layer l moves the share 1/l of the
squared norm of every sum of paths on to paths that are longer by one. The squared norms of the sums by length are then
the coefficients of the product over l of (1 + z/l): of z^k, the number of permutations of L + 1 things with k + 1
cycles (Stirling numbers of the first kind), over L!. Together they are L + 1, and the mean length, the sum over l of
1/(l + 1), grows by 1 for each factor e of depth.

Control: post-norm, where each layer halves what there is, so that lengths are those of L throws of a coin.
"""

import torch

from rankbench.measures.frozen_network import sums_by_length
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import BY_ITSELF, drawn_network


def shares(layers: int) -> list[float]:
    """Share of the squared norms of the sums of paths that paths of length 0, 1, ..., layers have."""
    masses = [1.0]
    for layer in range(1, layers + 1):
        masses = [a + b / layer for a, b in zip([*masses, 0.0], [0.0, *masses], strict=True)]
    return [mass / (layers + 1) for mass in masses]


def predicted(layers: int, **_: int) -> Predicted:
    """The shares by length, at this depth and at a quarter of it."""
    for depth in _depths(layers):
        yield from ((f"{depth} layers", length, share) for length, share in enumerate(shares(depth)))


def network(generator: torch.Generator, tokens: int, layers: int, width: int) -> Measured:
    """The same for the exact sums of paths of networks on random tokens."""
    x_1ND = torch.randn(1, tokens, width, dtype=torch.float64, generator=generator)
    for setup, norm in ((CLAIMED, "pre"), (CONTROL, "post")):
        for depth in _depths(layers):
            drawn = drawn_network(generator, tokens, width=width, layers=depth, norm=norm, **BY_ITSELF)
            mass_K = sums_by_length(drawn, x_1ND).by_length_KBND.square().sum((1, 2, 3))
            for length, share in enumerate((mass_K / mass_K.sum()).tolist()):
                yield setup, f"{depth} layers", length, share


def _depths(layers: int) -> list[int]:
    return sorted({max(1, layers // 4), layers})


LAW = Law(
    sizes={"tokens": 16, "layers": 64, "width": 128},
    predicted=predicted,
    network=network,
    x_label="path length (heads)",
    value_label="share of squared norm",
)
