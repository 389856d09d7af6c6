"""Rank collapse with scaled skips, x + a f(x), under uniform attention and random values (Noci et al. 2022).

The source gives the expectations of a network at initialisation with uniform attention; the closed form is derived
here. With m the mean of the tokens and independent values W of variance 1/d, every token becomes x_i + a m W. Over the
draw of W, each layer multiplies E|m|^2 by 1 + a^2 and adds a^2 |m|^2 to E<x_i, x_j>, also for i = j. Orthonormal tokens
begin with |m|^2 = 1/n, so that E<x_i, x_j> after L layers is ((1 + a^2)^L - 1) / n, and E|x_i|^2 is 1 more.

Control: values that are the identity. Then the branches add up in one direction, which a = 1/sqrt(L) does not prevent.

Shapes: N token, D width.
"""

import math

import pandas as pd
import torch
from torch import Tensor

from rankbench.judging.claim import Claim, above, require
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import TENTH, keeps, kept_followed, left_along
from rankbench.judging.sweeps import from_other_end, rows_by_value
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import UNIFORM, drawn_network, with_identity_values
from rankbench.model.network import run
from rankbench.model.transformer import Transformer

WIDTH = 4  # of the networks, in tokens: orthonormal tokens need 1; the scatter of one network falls as its square root


def cosine(scale: float, tokens: int, layers: int) -> float:
    """E<x_i, x_j> over E|x_i|^2 after this many layers, for different i and j."""
    grown = (1 + scale**2) ** layers - 1
    return grown / (tokens + grown)


def _scales(layers: int) -> dict[str, float]:
    return {"a = 1": 1.0, "a = 1/sqrt(L)": layers**-0.5}


def predicted(tokens: int, layers: int, **_: int) -> Predicted:
    """The cosine after each layer, by scale."""
    for name, scale in _scales(layers).items():
        yield from ((name, layer, cosine(scale, tokens, layer)) for layer in range(layers + 1))


def network(generator: torch.Generator, tokens: int, layers: int, samples: int) -> Measured:
    """The same for networks: mean product of two tokens over mean square of one, each over `samples` networks."""
    for name, scale in _scales(layers).items():
        for setup in (CLAIMED, CONTROL):
            sums_2L = torch.zeros(2, layers + 1, dtype=torch.float64)
            for _ in range(samples):
                keys = {"width": WIDTH * tokens, "layers": layers, "skip": True, "branch_scale": scale}
                drawn = drawn_network(generator, tokens, **keys, **UNIFORM)
                sums_2L += _products(drawn if setup == CLAIMED else with_identity_values(drawn), tokens)
            cosine_L = sums_2L[0] / sums_2L[1]
            yield from ((setup, name, layer, value) for layer, value in enumerate(cosine_L.tolist()))


def _products(drawn: Transformer, tokens: int) -> Tensor:
    """Mean product of two different tokens and mean square of a token, by layer, for orthonormal inputs; (2, L + 1)."""
    x_1ND = torch.eye(tokens, drawn.width, dtype=torch.float64)[None]
    states = [x_1ND, *(step.output_BND for step in run(drawn, x_1ND))]
    grams = [x_1ND[0] @ x_1ND[0].T for x_1ND in states]
    squares = [gram_NN.trace() for gram_NN in grams]
    pairs = [(gram_NN.sum() - square) / (tokens - 1) for gram_NN, square in zip(grams, squares, strict=True)]
    return torch.tensor([pairs, squares], dtype=torch.float64) / tokens


PAPERS = {"Noci et al. 2022": "Signal propagation in transformers"}
LAWS = {
    "residual_scale": Law(
        {"tokens": 32, "layers": 12, "samples": 16}, predicted, "layer", "cosine of two tokens", network=network
    )
}
NOCI = "Noci et al. 2022, Signal propagation in transformers"


def _kept_with_scaled_branches(rows: pd.DataFrame) -> float:
    """Share that is left at the largest branch scale of at most 1/sqrt(layers), up to its printed digits."""
    largest = 1.01 / math.sqrt(rows.layer.max())
    small = [of_value for value, of_value in rows_by_value(rows, "model.branch_scale").items() if value <= largest]
    require(small, "the sweep has no model.branch_scale of 1/sqrt(model.layers) or less")
    return kept_followed(small[-1])


CLAIMS: dict[str, Claim] = {
    "knob_residual_scale": left_along(
        key="model.branch_scale",
        side=-1,
        statement="The smaller the scale of the branches beside the skips, the more is left",
        source=NOCI,
    ),
    "knob_residual_scale_root": keeps(
        statement="With branches scaled by 1/sqrt(layers) more than a tenth of the embedding's relative residual is "
        "left after the last layer (the share that is left).",
        source=NOCI,
        table="collapse",
        measure=_kept_with_scaled_branches,
        claimed=above(TENTH),
        along="model.branch_scale",
        control=from_other_end("model.branch_scale", 0),
    ),
    # threshold: below .048, the cosine that is left of 1 at a = 1/sqrt(12); the mean over 16 networks errs by .02
    "law_residual_scale": agrees(
        law="residual_scale",
        line=0.04,
        statement="With skips, uniform attention and random values, the cosine of two tokens after L layers is (g - "
        "1)/(n + g - 1), g = (1 + a^2)^L, for branches scaled by a",
        source="Noci et al. 2022, Signal propagation in transformers; closed form derived here",
        control="values that are the identity in place of random ones",
    ),
}
