"""A quick check that an attention's weights are what it declares, for attentions that others write.

Shapes: B batch, N query token, M key token, H head, K head width.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.model.attention import Attention
from rankbench.model.bare import drawn_network

SEQUENCES, TOKENS, WIDTH, HEADS = 2, 5, 8, 2
MASKS = ("none", "causal", "window", "others")
ROUNDING = 1e-9  # of sums of a few numbers of order 1 in float64, with a wide margin


@functools.cache
def check_weighting(name: str) -> None:
    """Raise ConfigError, once in a process, unless the attention keeps its promises on random tokens of each mask: the
    shapes of P, gate and W_QK; hidden keys weigh 0 and change no weight; rows of a stochastic P are probabilities; a
    head of its own gives the same P; the fused kernel gives P v; and its parameters get gradients."""
    generator = torch.Generator().manual_seed(0)
    x_BND = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    for mask in MASKS:
        attention = _attention(name, mask)
        with torch.no_grad():
            _check_weights(f"model.attention={name}", mask, attention, x_BND)
    _check_gradients(f"model.attention={name}", attention, x_BND)


def _attention(name: str, mask: str) -> Attention:
    keys = {"attention": name, "mask": mask, "window": 1 if mask == "window" else None, "heads": HEADS, "bias": True}
    network = drawn_network(torch.Generator().manual_seed(1), TOKENS, layers=1, width=WIDTH, **keys)
    return network.requires_grad_(True).attentions[0]


def _check_weights(begins: str, mask: str, attention: Attention, x_BND: Tensor) -> None:
    weighting, under = attention.weighting, f"under model.mask={mask}"
    q_BHNK, k_BHMK, _ = attention.queries_keys_values(x_BND)
    seen_NM = attention.seen(None, TOKENS, x_BND.device)
    p_BHNM = attention.weights(q_BHNK, k_BHMK, seen_NM)
    _check_shape(f"{begins}: weights", p_BHNM, (SEQUENCES, HEADS, TOKENS, TOKENS))
    if not p_BHNM.isfinite().all():
        raise ConfigError(f"{begins}: weights gave entries that are not finite {under}; divide by no sum that can be 0")
    hidden_NM = torch.zeros(TOKENS, TOKENS, dtype=torch.bool) if seen_NM is None else ~seen_NM
    if (p_BHNM * hidden_NM).any():
        raise ConfigError(
            f"{begins}: a key that a query does not see has a weight of {(p_BHNM * hidden_NM).abs().max():.3g} {under};"
            " use hidden_as(0.0, weights, seen_NM), or hidden_as(-math.inf, scores, seen_NM) before a softmax"
        )
    for token in range(TOKENS):
        other_BHMK = k_BHMK.clone()
        other_BHMK[:, :, token] += 1
        change_BHNM = (attention.weights(q_BHNK, other_BHMK, seen_NM) - p_BHNM).abs()
        if (change_BHNM[:, :, hidden_NM[:, token]] > ROUNDING).any():
            raise ConfigError(
                f"{begins}: a query's weights change with a key that it does not see {under}; hide the key before "
                "sums over the keys are taken"
            )
    if weighting.stochastic and ((p_BHNM < 0).any() or ((p_BHNM.sum(-1) - 1).abs() > ROUNDING).any()):
        raise ConfigError(
            f"{begins}: a row of P sums to {p_BHNM.sum(-1).flatten()[(p_BHNM.sum(-1) - 1).abs().argmax()]:.6g}, with "
            f"entries from {p_BHNM.min():.3g} {under}; rows of a stochastic attention are probabilities: divide by "
            "their sum, or set stochastic=False"
        )
    gate_BHN = weighting.gate(q_BHNK, attention)
    if gate_BHN is not None:
        _check_shape(f"{begins}: gate", gate_BHN, (SEQUENCES, HEADS, TOKENS))
    if weighting.by_head:
        alone_BHNM = attention.weights(q_BHNK[:, :1], k_BHMK[:, :1], seen_NM)
        if alone_BHNM.shape != p_BHNM[:, :1].shape or (alone_BHNM - p_BHNM[:, :1]).abs().max() > ROUNDING:
            raise ConfigError(f"{begins}: a head's weights depend on the other heads; set by_head=False")
    if weighting.fusible:
        fused_BHNV = attention._fused(x_BND, None, side_by_side=False)
        if (fused_BHNV - attention.observe(x_BND)[1]["mixed_BHNK"]).abs().max() > ROUNDING:
            raise ConfigError(
                f"{begins}: torch's fused kernel on its factors does not give P v {under}; set fusible=False"
            )
    for key, maps in attention.qk_maps().items():
        for w_HDK in maps:
            _check_shape(f"{begins}: qk_maps, {key},", w_HDK, (HEADS, WIDTH, w_HDK.shape[-1]))


def _check_gradients(begins: str, attention: Attention, x_BND: Tensor) -> None:
    attention(x_BND).square().sum().backward()
    for key, parameter in attention.own.items():
        if parameter.grad is None or not parameter.grad.isfinite().all():
            what = "no gradient, so it is never used" if parameter.grad is None else "a gradient that is not finite"
            raise ConfigError(f"{begins}: its parameter {key} gets {what}; use it in weights or in gate")


def _check_shape(begins: str, x: object, wanted: Sequence[int]) -> None:
    shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
    if shape != tuple(wanted):
        raise ConfigError(f"{begins} gave {shape}; wanted is a tensor of shape {tuple(wanted)}")
