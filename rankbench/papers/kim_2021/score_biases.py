"""Biases of queries and keys do not make dot-product attention Lipschitz (Kim et al. 2021, app. D).

Without biases a token at 0 attends to all tokens alike, and its derivative by itself has their variance, which nothing
bounds. With biases this happens where x W_Q + b_Q = 0. One head of width 1 with W_Q = W_K = W_V = W_O = 1: a token at
-b_Q among n - 1 others, in turn at s and at -s, has the derivative dy/dx = variance + 1/n whatever b_K is, where the
variance is that of all n tokens. It grows as s^2 (derived here from eq. 14 there).

Control: the same inputs without biases, where the token attends to one end alone as s grows.

Shapes: N token.
"""

import torch

from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import bare_network, with_identity_maps

SIZES = (1.0, 10.0, 100.0, 1000.0)
BIAS = 0.5  # of the queries


def derivative(size: float, tokens: int) -> float:
    """The token's derivative by itself, for others at this distance from 0."""
    unpaired = (tokens - 1) % 2
    mean, mean_square = (unpaired * size - BIAS) / tokens, ((tokens - 1) * size**2 + BIAS**2) / tokens
    return mean_square - mean**2 + 1 / tokens


def predicted(tokens: int) -> Predicted:
    """The derivative by the others' distance from 0."""
    yield from (("one head of width 1", size, derivative(size, tokens)) for size in SIZES)


def network(generator: torch.Generator, tokens: int) -> Measured:
    """The same by automatic differentiation of a layer, with a random bias of the keys."""
    key_bias = torch.randn(1, dtype=torch.float64, generator=generator).item()
    layer = with_identity_maps(bare_network(1, 1, tokens, width=1, layers=1, bias=True)).attentions[0]
    layer.out.bias.zero_()
    signs_N = torch.tensor([0.0] + [1.0, -1.0] * (tokens // 2), dtype=torch.float64)[:tokens]
    for setup, biases in ((CLAIMED, [BIAS, key_bias, 0.0]), (CONTROL, [0.0, 0.0, 0.0])):
        layer.qkv.bias.copy_(torch.tensor(biases))
        for size in SIZES:
            x_1N1 = (size * signs_N)[None, :, None]
            x_1N1[0, 0] = -BIAS
            with torch.enable_grad():
                jacobian = torch.autograd.functional.jacobian(layer, x_1N1)
            yield setup, "one head of width 1", size, jacobian[0, 0, 0, 0, 0, 0].item()


LAW = Law(
    {"tokens": 9},
    predicted,
    "distance of the other tokens",
    "derivative of a token by itself",
    network=network,
    log_x=True,
    log_value=True,
)
