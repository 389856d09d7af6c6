"""Causal uniform attention is the Cesaro matrix, a Hausdorff matrix (rankbench.measures.causal_averages).

Control: no mask. Then all tokens have the same weight after any number of layers.

Shapes: N query token, M key token, D width, L layer.
"""

import torch

from rankbench.judging.of_laws import agrees
from rankbench.measures.causal_averages import MASKS, SHARES, drawn_with, predicted
from rankbench.measures.law import Law, Measured
from rankbench.model.bare import UNIFORM, with_identity_values
from rankbench.model.network import run


def network(generator: torch.Generator, tokens: int, layers: int) -> Measured:
    """The weight for networks with W_V W_O = 1: the weights that turn random tokens into their states."""
    x_NN = torch.randn(tokens, tokens, dtype=torch.float64, generator=generator)
    for setup, mask in MASKS.items():
        for name, share in SHARES.items():
            drawn = drawn_with(generator, tokens, share, width=tokens, layers=layers, mask=mask, **UNIFORM)
            for layer, step in enumerate(run(with_identity_values(drawn), x_NN[None]), 1):
                weights_NN = torch.linalg.solve(x_NN, step.output_BND[0], left=False)
                yield setup, name, layer, weights_NN[-1, 0].item()


PAPERS = {"Hausdorff 1921": "Summation methods and moment sequences"}
LAWS = {"cesaro": Law({"tokens": 8, "layers": 10}, predicted, "layer", "weight of the first token", network=network)}
CLAIMS = {
    # threshold: rounding of a random 8 x 8 system that is solved, with a condition of up to 1e5
    "law_cesaro": agrees(
        law="cesaro",
        line=1e-9,
        statement="Causal uniform attention is a Hausdorff matrix with any skip: the first token's weight in token n "
        "is sum_k (-1)^k binom(n-1, k) (1 - a + a/(k+1))^t after t layers",
        source="Hausdorff 1921; derived here",
        control="attention without a mask",
        exact=True,
    ),
}
