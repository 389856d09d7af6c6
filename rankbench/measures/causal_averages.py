"""Causal uniform attention is the Cesaro matrix, whose powers are Hausdorff matrices.

Token i averages the tokens 1..i, so the attention is C with C_ij = 1/i for j <= i. A Hausdorff matrix with moments mu
has the entries H_ij = binom(i-1, j-1) sum_k (-1)^k binom(i-j, k) mu_(j-1+k) (Hausdorff 1921; Hardy, Divergent Series,
ch. 11). C has mu_k = 1/(k+1), the identity has mu_k = 1, and products of Hausdorff matrices have the products of the
moments. With a share a of attention next to the skip, (1 - a) 1 + a C, t layers thus have exactly the moments
(1 - a + a/(k+1))^t, and the first token's weight tends to 1. That causal attention sinks to the first token is known;
the closed form is derived here.
"""

from fractions import Fraction
from math import comb
from typing import Any

import torch

from rankbench.measures.law import CLAIMED, CONTROL, Predicted
from rankbench.model.bare import drawn_network
from rankbench.model.transformer import Transformer

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


def drawn_with(generator: torch.Generator, tokens: int, share: Fraction, **keys: Any) -> Transformer:
    """A network drawn for these keys whose layers are (1 - share) x + share attention(x)."""
    scales = {"skip": share < 1, "skip_scale": float(1 - share), "branch_scale": float(share)}
    return drawn_network(generator, tokens, **scales, **keys)
