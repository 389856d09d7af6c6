"""The curse of depth: the variance of a pre-norm network's states, and LayerNorm scaling (Sun et al., NeurIPS 2025).

The states become x + s_l f(norm(x)), twice per layer. If the branches f of normed tokens have variance 1 and are
independent of the states, as with fresh weights, variances add up to 1 + 2 sum over l of s_l^2. The growth is linear
for s_l = 1, so that the last layers change their state little; it is logarithmic for the source's s_l = 1/sqrt(l),
LayerNorm scaling. The source bounds the variance; the sum for fresh weights is derived here.

Control: post-norm, which resets the variance in every layer.
"""

import torch

from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import BY_ITSELF, drawn_network
from rankbench.model.network import run

SCALES = {"s = 1": ("none", 0.0), "s = 1/sqrt(l)": ("depth", -0.5)}  # model.norm_scale, and the power of l
# Branches of variance 1, of MLPs too: ReLU halves the mean square, which grows as the gain's 4th power.
KEYS = BY_ITSELF | {"mlp": True, "mlp_skip": True, "mlp_gain": 2**0.25}


def variance(layers: int, power: float = 0.0) -> float:
    """Variance after this many layers of two branches each, for s_l = l^power."""
    return 1 + 2 * sum(layer ** (2 * power) for layer in range(1, layers + 1))


def predicted(layers: int, **_: int) -> Predicted:
    """The variance after each layer, by scale."""
    for name, (_name, power) in SCALES.items():
        yield from ((name, layer, variance(layer, power)) for layer in range(1, layers + 1))


def network(generator: torch.Generator, tokens: int, layers: int, width: int) -> Measured:
    """The same for networks on random tokens: mean square of the states' entries. model.norm_scale sets s_l."""
    x_1ND = torch.randn(1, tokens, width, dtype=torch.float64, generator=generator)
    for setup, norm in ((CLAIMED, "pre"), (CONTROL, "post")):
        for name, (scale, _) in SCALES.items():
            keys = {"width": width, "layers": layers, "norm": norm, "norm_scale": scale}
            for step in run(drawn_network(generator, tokens, **keys, **KEYS), x_1ND):
                if step.sublayer.kind == "mlp":
                    yield setup, name, step.sublayer.layer, step.output_BND.square().mean().item()


PAPERS = {"Sun et al. 2025": "The curse of depth in large language models"}
LAWS = {
    "depth_curse": Law(
        sizes={"tokens": 16, "layers": 64, "width": 128},
        predicted=predicted,
        network=network,
        x_label="layer",
        value_label="variance of the states",
        log_x=True,
        log_value=True,
    )
}
CLAIMS = {
    # threshold: twice the random error of one network, whose early layers err by sqrt(2/128) of themselves
    "law_depth_curse": agrees(
        law="depth_curse",
        line=0.25,
        statement="The variance of a fresh pre-norm network grows as 1 + 2 sum of s_l^2: linearly, and with LayerNorm "
        "scaling, s_l = 1/sqrt(l), logarithmically",
        source="Sun et al. 2025, The curse of depth in large language models; closed form derived here",
        control="norms behind the branches in place of before them",
        relative=True,
    ),
}
