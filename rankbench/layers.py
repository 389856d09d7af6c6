"""Rank and collapse metrics of every layer of a model, in one forward pass (formulas in rankbench.metrics).

Shapes: B sequence, H head, N query token, M key token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankbench.metrics import attention_metrics, state_metrics
from rankbench.model.attention import visible_keys
from rankbench.model.trace import Trace
from rankbench.model.transformer import Transformer


@torch.no_grad()
def metrics_by_layer(model: Transformer, inputs: Tensor) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """Each place with its metrics, shape (B,).

    A place is layer, sublayer and head: the embedding (layer 0, sublayer input), the state after a sub-layer (layers
    1..L, attention or mlp), or one head's P (sublayer weights; the only place with a head, from 1).
    """
    trace = Trace("embedding", "output", "weights")
    model(inputs, trace=trace)
    lengths_B = model.lengths(inputs)
    visible_NM = visible_keys(model.cfg.mask, model.cfg.window, inputs.shape[1], inputs.device)
    yield {"layer": 0, "sublayer": "input", "head": None}, state_metrics(trace["embedding"], lengths_B)
    for layer in range(model.cfg.layers):
        name = f"layers.{layer}"
        of_weights = attention_metrics(trace[f"{name}.attention.weights"], visible_NM, lengths_B)
        for head in range(model.cfg.heads):
            place = {"layer": layer + 1, "sublayer": "weights", "head": head + 1}
            yield place, {metric: value_BH[:, head] for metric, value_BH in of_weights.items()}
        for sublayer in ("attention", "mlp"):
            if f"{name}.{sublayer}.output" in trace:
                place = {"layer": layer + 1, "sublayer": sublayer, "head": None}
                yield place, state_metrics(trace[f"{name}.{sublayer}.output"], lengths_B)


def moments(values: dict[str, Tensor]) -> dict[str, float]:
    """Mean of each metric over sequences, and as <metric>_sd their sample standard deviation (nan of one sequence)."""
    found = {}
    for metric, value_B in values.items():
        found[metric] = value_B.double().mean().item()
        if value_B.dtype != torch.bool:
            found[f"{metric}_sd"] = value_B.double().std().item() if len(value_B) > 1 else float("nan")
    return found
