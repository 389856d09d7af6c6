"""Causal attention leads to the first token as causal averages do (Wu et al. 2025; rankbench.measures.causal_averages).

Networks with pre-norm and random queries, keys and values are compared with causal uniform attention: the weight of
token 1, where each layer counts as (1 - a) 1 + a P with P the mean of its heads. Wu et al. 2025 prove that it tends to
1 for any bounded scores, and read this as a bias to the first positions that grows with depth and that skips slow down.

Control: no mask. Then all tokens have the same weight after any number of layers.

Shapes: B sequence, H head, N query token, M key token, D width, L layer.
"""

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.judging.of_laws import agrees
from rankbench.measures.causal_averages import MASKS, SHARES, drawn_with, predicted
from rankbench.measures.law import Law, Measured
from rankbench.model.network import attention_steps
from rankbench.model.transformer import Transformer

HEADS = 4


def network(generator: torch.Generator, tokens: int, layers: int, width: int, samples: int) -> Measured:
    """The weight for networks with random queries and keys, mean over `samples` networks."""
    if width < HEADS:
        raise ConfigError(f"analysis.laws.width={width}: law=position_bias has {HEADS} heads; use a width from {HEADS}")
    for setup, mask in MASKS.items():
        for name, share in SHARES.items():
            keys = {"width": width, "layers": layers, "mask": mask, "heads": HEADS, "norm": "pre"}
            sums_L = torch.zeros(layers, dtype=torch.float64)
            for _ in range(samples):
                drawn = drawn_with(generator, tokens, share, **keys)
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


PAPERS = {"Wu et al. 2025": "On the emergence of position bias in transformers"}
LAWS = {
    "position_bias": Law(
        {"tokens": 8, "layers": 10, "width": 64, "samples": 16},
        predicted,
        "layer",
        "accumulated weight of the first token",
        network=network,
    )
}
CLAIMS = {
    # threshold: the random error of 16 networks of 4 heads, .02 to .03, and what norms and tokens that become alike add
    "law_position_bias": agrees(
        law="position_bias",
        line=0.1,
        statement="Causal attention with random queries and keys leads to the first token as uniform causal attention "
        "does: its weight in the last token grows with depth to 1, and with a skip more slowly",
        source="Wu et al. 2025, On the emergence of position bias in transformers; closed form derived here",
        control="attention without a mask",
    ),
}
