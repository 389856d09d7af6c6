"""Causal uniform attention is the Cesaro matrix, whose powers are Hausdorff matrices.

Token i averages the tokens 1..i, so the attention is C with C_ij = 1/i for j <= i. A Hausdorff matrix with moments mu
has the entries H_ij = binom(i-1, j-1) sum_k (-1)^k binom(i-j, k) mu_(j-1+k) (Hausdorff 1921; Hardy, Divergent Series,
ch. 11). C has mu_k = 1/(k+1), the identity has mu_k = 1, and products of Hausdorff matrices have the products of the
moments. With a share a of attention beside the skip, (1 - a) 1 + a C, t layers thus have the moments
(1 - a + a/(k+1))^t, exactly, and the first token's weight tends to 1. That causal attention sinks to the first token is
known; the form is derived here.

Control: no mask. Then all tokens have the same weight after any number of layers.
"""

from fractions import Fraction
from math import comb

import torch

from rankbench.config import ModelConfig
from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import UNIFORM, drawn_network, with_identity_values
from rankbench.model.network import run

SHARES = {"no skip": Fraction(1), "a = 0.3": Fraction(3, 10)}


def weight_of_first(tokens: int, layers: int, share: Fraction = SHARES["no skip"]) -> float:
    """Weight of token 1 in the last token after so many layers; exact sums, because their terms cancel."""
    moments = ((1 - share + share / (k + 1)) ** layers for k in range(tokens))
    return float(sum((-1) ** k * comb(tokens - 1, k) * moment for k, moment in enumerate(moments)))


def predicted(tokens: int, layers: int) -> Predicted:
    """The weight after each layer, by share of attention."""
    for name, share in SHARES.items():
        yield from ((name, layer, weight_of_first(tokens, layer, share)) for layer in range(1, layers + 1))


def network(cfg: ModelConfig, generator: torch.Generator, tokens: int, layers: int) -> Measured:
    """The same of networks with W_V W_O = 1: the weights that give their states from random tokens."""
    x_NN = torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)
    for setup, mask in ((CLAIMED, "causal"), (CONTROL, "none")):
        for name, share in SHARES.items():
            keys = {"width": tokens, "layers": layers, "mask": mask, "skip": share < 1}
            keys |= {"skip_scale": float(1 - share), "branch_scale": float(share)}
            drawn = with_identity_values(drawn_network(cfg, generator, tokens, **keys, **UNIFORM))
            for layer, step in enumerate(run(drawn, x_NN[None]), 1):
                weights_NN = torch.linalg.solve(x_NN, step.output_BND[0], left=False)
                yield setup, name, layer, weights_NN[-1, 0].item()


LAW = Law({"tokens": 8, "layers": 10}, predicted, "layer", "weight of the first token", network=network)
