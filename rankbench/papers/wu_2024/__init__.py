"""Masks, and value matrices with which a norm stops the collapse of attention alone (Wu et al., NeurIPS 2024).

The source proves that attention with LayerNorm, which there scales each token to length 1, has equilibria of any rank
with some value matrices, and with orthogonal ones only of rank 1. The example is derived here. Attention is causal
and uniform, the values are diag(w_1, ..., w_n), w_i = r^(i-1), and token i begins in the span of the first i
directions. Token 1 then stays where it is. With s the sum of the tokens before it, token i ends at the x of length 1
for which W (s + x) = l x, whose entries are

    x_j = w_j s_j / (l - w_j), j < i,    x_i = sqrt(1 - sum of x_j^2).

Here l = w_i if that sum is below 1, and token i adds a direction. Otherwise l > w_i is the number that makes the sum 1,
and token i stays in the span of those before it. Token 2, for example, ends at a cosine of min(1, 1/(r - 1)) with
token 1. The larger r, the more tokens have directions of their own.

Control: values that are the identity. Then all tokens become token 1 for every r.

Shapes: N token, D width (here N).
"""

import math
from functools import partial

import pandas as pd
import scipy
import torch

from rankbench.judging.claim import Claim, Control, below, require
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import check_no_overflow, log10_left, of_collapse, of_embedding, of_variant, share
from rankbench.judging.sweeps import in_order
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.model.bare import UNIFORM, drawn_network, with_identity_values
from rankbench.model.network import run

RATIOS = [1.1, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3, 2.6, 3.0, 3.5, 4.0]


def equilibrium(ratio: float, tokens: int) -> list[list[float]]:
    """The tokens' entries in the equilibrium."""
    values = [ratio**i for i in range(tokens)]
    states = [[1.0] + [0.0] * (tokens - 1)]
    while (i := len(states)) < tokens:
        sums = [sum(column) for column in zip(*states, strict=True)][:i]

        def entries(length: float, sums: list[float] = sums) -> list[float]:
            return [value * s / (length - value) for value, s in zip(values, sums, strict=False)]

        def excess(length: float) -> float:
            return sum(entry**2 for entry in entries(length)) - 1

        length = values[i]
        if excess(length) >= 0:
            length = scipy.optimize.brentq(excess, length, 2 * i * length, xtol=1e-15)
        old = entries(length)
        own = math.sqrt(max(0.0, 1 - sum(entry**2 for entry in old)))
        states.append([*old, own, *[0.0] * (tokens - i - 1)])
    return states


def predicted(tokens: int, **_: int) -> Predicted:
    """Cosine of each token with the first, by ratio."""
    for ratio in RATIOS:
        for token, state in enumerate(equilibrium(ratio, tokens)[1:], 2):
            yield f"token {token}", ratio, state[0]


def network(generator: torch.Generator, tokens: int, layers: int) -> Measured:
    """The same after this many layers of a network, from random tokens, with token i in the first i directions."""
    keys = {"width": tokens, "layers": layers, "mask": "causal", "norm": "post", "norm_kind": "rmsnorm", **UNIFORM}
    drawn = with_identity_values(drawn_network(generator, tokens, **keys))
    x_ND = torch.randn(tokens, tokens, dtype=torch.float64, generator=generator).tril()
    for ratio in RATIOS:
        for setup in (CLAIMED, CONTROL):
            for attention in drawn.attentions:
                growth_D = (ratio if setup == CLAIMED else 1.0) ** torch.arange(tokens, dtype=torch.float64)
                attention.out.weight.copy_(growth_D.diag())
            *_, last = run(drawn, x_ND[None])
            states_ND = torch.nn.functional.normalize(last.output_BND[0], dim=1)
            for token, cosine in enumerate((states_ND[1:] @ states_ND[0]).tolist(), 2):
                yield setup, f"token {token}", ratio, cosine


PAPERS = {"Wu et al. 2024": "On the role of attention masks and LayerNorm in transformers"}
LAWS = {
    "layernorm_rank": Law(
        {"tokens": 5, "layers": 600},
        predicted,
        "ratio r of the values",
        "cosine with the first token",
        network=network,
    )
}
WU = "Wu et al. 2024, On the role of attention masks and LayerNorm in transformers"


def _most_that_a_layer_leaves(rows: pd.DataFrame) -> float:
    left = of_variant(rows, "attention_only_no_norm").set_index("layer").log10_relative_residual
    check_no_overflow(*left)
    half, last = left.index.max() // 2, left.index.max()
    require(half, "this needs attention alone of two layers or more")
    return share(max((left[half] - left[0]) / half, (left[last] - left[half]) / (last - half)))


CLAIMS: dict[str, Claim] = {
    "wu_masked_attention_collapses": of_collapse(
        statement="Without LayerNorm attention alone collapses exponentially under any of these masks: in both halves "
        "of its depth layers leave less than all of the relative residual (share that a layer leaves, geometric mean "
        "over the half that leaves more).",
        source=WU,
        measure=_most_that_a_layer_leaves,
        claimed=below(1.0),
        scale="positive",
        sourced=True,
        since="2026-11-26",
        control=Control.beyond(
            "a relative residual that grows by .001 decades in every layer",
            log10_relative_residual=lambda rows: of_embedding(rows, "log10_relative_residual") + 0.001 * rows.layer,
        ),
    ),
    "wu_windows_slow_the_collapse": of_collapse(
        statement="Local masks slow the collapse down: without LayerNorm the narrower the window, the more is left "
        "(Kendall's rank correlation of window and relative residual of the last layer; below -.5, three pairs in four "
        "in this order, threshold: ours; changes of less than a tenth count as none).",
        source=WU,
        **in_order("model.window", -1, partial(log10_left, variant="attention_only_no_norm")),
    ),
    # threshold: how far tokens still move after 600 layers at ratios next to a threshold, where they part most slowly
    "law_layernorm_rank": agrees(
        law="layernorm_rank",
        line=1e-3,
        statement="With some value matrices, and tokens that begin in fewer directions the earlier they stand, "
        "attention alone with a norm keeps tokens apart: any number of them is a direction of its own, by the ratio of "
        "the values",
        source="Wu et al. 2024, On the role of attention masks and LayerNorm in transformers; example derived here",
        control="values that are the identity",
    ),
}
