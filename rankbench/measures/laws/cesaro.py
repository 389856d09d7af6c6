"""Causal uniform attention is the Cesaro matrix, whose powers are Hausdorff matrices.

Token i averages the tokens 1..i, so the attention is C with C_ij = 1/i for j <= i. A Hausdorff matrix with moments mu
has the entries H_ij = binom(i-1, j-1) sum_k (-1)^k binom(i-j, k) mu_(j-1+k) (Hausdorff 1921; Hardy, Divergent Series,
ch. 11). C has mu_k = 1/(k+1), the identity has mu_k = 1, and products of Hausdorff matrices have the products of the
moments. With a share a of attention next to the skip, (1 - a) 1 + a C, t layers thus have exactly the moments
(1 - a + a/(k+1))^t, and the first token's weight tends to 1. That causal attention sinks to the first token is known;
the closed form is derived here.

The law `position_bias` compares it with networks with pre-norm and random queries, keys and values: the same weight of
token 1, where each layer counts as (1 - a) 1 + a P with P the mean of its heads. Wu et al. 2025 prove that it tends to
1 for any bounded scores, and read this as a bias to the first positions that grows with depth and that skips slow down.

Control: no mask. Then all tokens have the same weight after any number of layers.

Shapes: B sequence, H head, N query token, M key token, D width, L layer.
"""

from fractions import Fraction
from math import comb
from typing import Any

import torch
from torch import Tensor

from rankbench.config import ModelConfig
from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import UNIFORM, drawn_network, with_identity_values
from rankbench.model.network import attention_steps, run
from rankbench.model.transformer import Transformer

HEADS = 4
MASKS = {CLAIMED: "causal", CONTROL: "none"}
SHARES = {"no skip": Fraction(1), "a = 0.3": Fraction(3, 10)}


def weight_of_first(tokens: int, layers: int, share: Fraction = SHARES["no skip"]) -> float:
    """Weight of token 1 in the last token after this many layers, summed exactly, because the terms cancel."""
    moments = ((1 - share + share / (k + 1)) ** layers for k in range(tokens))
    return float(sum((-1) ** k * comb(tokens - 1, k) * moment for k, moment in enumerate(moments)))


def predicted(tokens: int, layers: int, **_: int) -> Predicted:
    """The weight after each layer, by share of attention."""
    for name, share in SHARES.items():
        yield from ((name, layer, weight_of_first(tokens, layer, share)) for layer in range(1, layers + 1))


def network(cfg: ModelConfig, generator: torch.Generator, tokens: int, layers: int) -> Measured:
    """The same for networks with W_V W_O = 1: the weights that turn random tokens into their states."""
    x_NN = torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)
    for setup, mask in MASKS.items():
        for name, share in SHARES.items():
            drawn = _drawn(cfg, generator, tokens, share, width=tokens, layers=layers, mask=mask, **UNIFORM)
            for layer, step in enumerate(run(with_identity_values(drawn), x_NN[None]), 1):
                weights_NN = torch.linalg.solve(x_NN, step.output_BND[0], left=False)
                yield setup, name, layer, weights_NN[-1, 0].item()


def with_scores(
    cfg: ModelConfig, generator: torch.Generator, tokens: int, layers: int, width: int, samples: int
) -> Measured:
    """The same for networks with random queries and keys, mean over `samples` networks."""
    for setup, mask in MASKS.items():
        for name, share in SHARES.items():
            keys = {"width": width, "layers": layers, "mask": mask, "heads": HEADS, "norm": "pre"}
            sums_L = torch.zeros(layers, dtype=torch.float64)
            for _ in range(samples):
                drawn = _drawn(cfg, generator, tokens, share, **keys)
                x_1ND = torch.randn(1, tokens, width, dtype=torch.float64, generator=generator)
                sums_L += accumulated(drawn, x_1ND, float(share))
            yield from ((setup, name, layer, value / samples) for layer, value in enumerate(sums_L.tolist(), 1))


def accumulated(drawn: Transformer, x_1ND: Tensor, share: float) -> Tensor:
    """Weight of the first token in the last by layer, (L,); a layer is (1 - share) 1 + share P, P the heads' mean."""
    weights_NN = torch.eye(x_1ND.shape[1], dtype=x_1ND.dtype)
    of_first = []
    for step in attention_steps(drawn, x_1ND):
        weights_NN = (1 - share) * weights_NN + share * step.weights_BHNM[0].mean(0) @ weights_NN
        of_first.append(weights_NN[-1, 0])
    return torch.stack(of_first)


def _drawn(cfg: ModelConfig, generator: torch.Generator, tokens: int, share: Fraction, **keys: Any) -> Transformer:
    scales = {"skip": share < 1, "skip_scale": float(1 - share), "branch_scale": float(share)}
    return drawn_network(cfg, generator, tokens, **scales, **keys)


LAW = Law({"tokens": 8, "layers": 10}, predicted, "layer", "weight of the first token", network=network)
POSITION_BIAS = Law(
    {"tokens": 8, "layers": 10, "width": 64, "samples": 16},
    predicted,
    "layer",
    "accumulated weight of the first token",
    network=with_scores,
)
