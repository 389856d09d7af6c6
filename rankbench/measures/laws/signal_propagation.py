"""Signal propagation of cosines through fresh Transformers (Giorlandino and Goldt, ICLR 2026).

q: mean square of a token's entries; p: mean product of the entries of two tokens. Random queries and keys, with scores
of variance beta^2 log(n) q^2, make the energies of a Random Energy Model: among many tokens a query attends to all
alike below beta_c = sqrt(2/(q(q-p))), and above it the sum of its squared weights is Y = 1 - beta_c/beta. Attention and
its skip thus turn (q, p) into

    (q + p + (q - p) Y, 2 p),    or, with the average of all tokens subtracted (centred),    (q + (q - p) Y, p).

A ReLU MLP whose maps have weights of variance w / fan-in and biases of variance b, and its skip, then add (q', p') with
q' = w z/2 + b, p' = w z k(c)/2 + b, z = w q + b, c the cosine of two hidden tokens and k Cho and Saul's arc-cosine
kernel. Norms divide both by q. w = .2, b = .0004 and a first cosine of .2 are those of the source's figure 4.

Control: values that are the identity. Then a branch is no independent direction beside its skip.

Shapes: N token, D width.
"""

import math
from collections.abc import Iterator

import torch

from rankbench.config import ModelConfig
from rankbench.measures.laws.law import CLAIMED, CONTROL, Law, Measured, Predicted, mean_cosine
from rankbench.model.bare import drawn_network, with_identity_values
from rankbench.model.network import run
from rankbench.model.transformer import Transformer

FIRST_COSINE, WEIGHT_VARIANCE, BIAS_VARIANCE = 0.2, 0.2, 0.02**2
# norm, centred, beta
VARIANTS = {
    "post": ("post", False, 0.1),
    "pre": ("pre", False, 0.1),
    "post, centred": ("post", True, 0.1),
}


def critical_beta(q: float, p: float) -> float:
    """beta_c."""
    return math.sqrt(2 / (q * (q - p)))


def after_attention(q: float, p: float, beta: float, centred: bool) -> tuple[float, float]:
    """(q, p) of attention's output, from those of its input."""
    alike = q - p <= 0 or beta <= critical_beta(q, p)
    condensed = 0.0 if alike else (q - p) * (1 - critical_beta(q, p) / beta)
    return (condensed, 0.0) if centred else (p + condensed, p)


def after_mlp(q: float, p: float) -> tuple[float, float]:
    """(q, p) of the MLP's output, from those of its input."""
    hidden = WEIGHT_VARIANCE * q + BIAS_VARIANCE
    c = min(1.0, (WEIGHT_VARIANCE * p + BIAS_VARIANCE) / hidden)
    kernel = (math.sqrt(1 - c**2) + c * (math.pi - math.acos(c))) / math.pi
    return WEIGHT_VARIANCE * hidden / 2 + BIAS_VARIANCE, WEIGHT_VARIANCE * hidden * kernel / 2 + BIAS_VARIANCE


def cosines(norm: str, centred: bool, beta: float) -> Iterator[float]:
    """Cosine of two tokens after each layer, from the first cosine on, without end."""
    q, p = 1.0, FIRST_COSINE
    while True:
        yield p / q
        for branch in (lambda q, p: after_attention(q, p, beta, centred), after_mlp):
            added_q, added_p = branch(1.0, p / q) if norm == "pre" else branch(q, p)
            q, p = q + added_q, p + added_p
            if norm == "post":
                q, p = 1.0, p / q


def predicted(layers: int, **_: int) -> Predicted:
    """The cosine after each layer."""
    for name, variant in VARIANTS.items():
        yield from ((name, layer, c) for layer, c in zip(range(layers + 1), cosines(*variant), strict=False))


def network(cfg: ModelConfig, generator: torch.Generator, tokens: int, layers: int, width: int) -> Measured:
    """The same of networks on random tokens: mean cosine of two tokens."""
    noise_ND = torch.randn(tokens + 1, width, dtype=torch.float64, generator=generator)
    x_ND = math.sqrt(FIRST_COSINE) * noise_ND[:1] + math.sqrt(1 - FIRST_COSINE) * noise_ND[1:]
    for name, variant in VARIANTS.items():
        drawn = _drawn(cfg, generator, tokens, layers, width, *variant)
        for setup in (CLAIMED, CONTROL):
            used = drawn if setup == CLAIMED else with_identity_values(drawn)
            yield setup, name, 0, mean_cosine(x_ND)
            for step in run(used, x_ND[None]):
                if step.sublayer.kind == "mlp":
                    yield setup, name, step.sublayer.layer, mean_cosine(step.output_BND[0])


def _drawn(
    cfg: ModelConfig,
    generator: torch.Generator,
    tokens: int,
    layers: int,
    width: int,
    norm: str,
    centred: bool,
    beta: float,
) -> Transformer:
    keys = {"norm": norm, "mix_uniform": -float(centred), "temperature": 1 / (beta * math.sqrt(math.log(tokens)))}
    keys |= {"skip": True, "mlp": True, "mlp_skip": True, "mlp_gain": math.sqrt(WEIGHT_VARIANCE), "bias": True}
    drawn = drawn_network(cfg, generator, tokens, width=width, layers=layers, **keys)
    for block in drawn.blocks:
        for linear in (block.attention.qkv, block.attention.out):
            linear.bias.zero_()
        for linear in (block.mlp.up, block.mlp.down):
            linear.bias.normal_(0, math.sqrt(BIAS_VARIANCE), generator=generator)
    return drawn


LAW = Law(
    sizes={"tokens": 512, "layers": 20, "width": 256},
    predicted=predicted,
    network=network,
    x_label="layer",
    value_label="cosine of two tokens",
)
