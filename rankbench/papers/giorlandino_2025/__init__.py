"""Cosines through fresh Transformers, and temperatures that keep tokens apart (Giorlandino and Goldt, ICLR 2026).

The closed form is rankbench.measures.signal_propagation. One network scatters more above beta_c, where few scores
decide, so the measurements are means over networks.

Control: values that are the identity. Then a branch's direction is not independent of its skip.

Shapes: N token, D width.
"""

import math

import torch

from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import left_along, left_at
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted, mean_cosine
from rankbench.measures.signal_propagation import BIAS_VARIANCE, FIRST_COSINE, WEIGHT_VARIANCE, cosines
from rankbench.model.bare import drawn_network, with_identity_values
from rankbench.model.network import run
from rankbench.model.transformer import Transformer

# norm, centred, beta
VARIANTS = {
    "post": ("post", False, 0.1),
    "pre": ("pre", False, 0.1),
    "post, centred": ("post", True, 0.1),
    "post, beta = 3": ("post", False, 3.0),
    "post, beta = 6": ("post", False, 6.0),
    "pre, beta = 6": ("pre", False, 6.0),
}


def predicted(tokens: int, layers: int, **_: int) -> Predicted:
    """The cosine after each layer."""
    for name, variant in VARIANTS.items():
        yield from ((name, layer, c) for layer, c in zip(range(layers + 1), cosines(*variant, tokens), strict=False))


def network(generator: torch.Generator, tokens: int, layers: int, width: int, samples: int) -> Measured:
    """The same for networks on random tokens: mean cosine of two tokens, mean over `samples` networks."""
    for name, variant in VARIANTS.items():
        sums = {setup: [0.0] * (layers + 1) for setup in (CLAIMED, CONTROL)}
        for _ in range(samples):
            noise_ND = torch.randn(tokens + 1, width, dtype=torch.float64, generator=generator)
            x_ND = math.sqrt(FIRST_COSINE) * noise_ND[:1] + math.sqrt(1 - FIRST_COSINE) * noise_ND[1:]
            drawn = _drawn(generator, tokens, *variant, layers=layers, width=width)
            for setup, sum_by_layer in sums.items():
                used = drawn if setup == CLAIMED else with_identity_values(drawn)
                sum_by_layer[0] += mean_cosine(x_ND)
                for step in run(used, x_ND[None]):
                    if step.sublayer.kind == "mlp":
                        sum_by_layer[step.sublayer.layer] += mean_cosine(step.output_BND[0])
        for setup, sum_by_layer in sums.items():
            yield from ((setup, name, layer, total / samples) for layer, total in enumerate(sum_by_layer))


def _drawn(generator: torch.Generator, tokens: int, norm: str, centred: bool, beta: float, **sizes: int) -> Transformer:
    keys = {"norm": norm, "mix_uniform": -float(centred), "temperature": 1 / (beta * math.sqrt(math.log(tokens)))}
    keys |= {"skip": True, "mlp": True, "mlp_skip": True, "mlp_gain": math.sqrt(WEIGHT_VARIANCE), "bias": True}
    drawn = drawn_network(generator, tokens, **sizes, **keys)
    for block in drawn.blocks:
        for linear in (block.attention.qkv, block.attention.out):
            linear.bias.zero_()
        for linear in (block.mlp.up, block.mlp.down):
            linear.bias.normal_(0, math.sqrt(BIAS_VARIANCE), generator=generator)
    return drawn


PAPERS = {"Giorlandino and Goldt 2025": "Two failure modes of deep transformers"}
LAWS = {
    "signal_propagation": Law(
        sizes={"tokens": 512, "layers": 20, "width": 256, "samples": 4},
        predicted=predicted,
        network=network,
        x_label="layer",
        value_label="cosine of two tokens",
    )
}
GIORLANDINO = "Giorlandino and Goldt 2025, Two failure modes of deep transformers"

CLAIMS = {
    "knob_temperature": left_along(
        key="model.temperature", side=-1, statement="The lower the temperature, the more is left", source=GIORLANDINO
    ),
    "knob_temperature_enough": left_at(
        key="model.temperature", end=0, statement="At a temperature that is low enough", source=GIORLANDINO
    ),
    # threshold: twice 1/sqrt(256), by which products of one network's tokens err; it can grow where cosines do. Above
    # the critical beta, where few scores decide, the mean over 4 networks errs by as much
    "law_signal_propagation": agrees(
        law="signal_propagation",
        line=0.12,
        statement="The cosine of two tokens in a fresh Transformer follows the map of (q, p): to 1 with post-norm, "
        "more slowly with pre-norm, and hardly away from its start with centred attention; above the critical beta the "
        "more slowly the larger beta is",
        source="Giorlandino and Goldt 2025, Two failure modes of deep transformers; mean for n tokens derived here",
        control="values that are the identity in place of random ones",
    ),
}
