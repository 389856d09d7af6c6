"""Rank and collapse metrics of every layer of a network, in one forward pass (formulas in rankbench.metrics).

Shapes: B sequence, H head, N query token, M key token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankbench.metrics import attention_metrics, state_metrics
from rankbench.model.attention import visible_keys
from rankbench.model.network import Network, run


@torch.no_grad()
def metrics_by_layer(network: Network, inputs: Tensor) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """Each place with its metrics, shape (B,).

    A place is layer, sublayer and head: the embedding (layer 0, sublayer input), the state after a sub-layer (layers
    1..L, attention or mlp), or one head's P (sublayer weights; the only place with a head, from 1).
    """
    lengths_B = network.lengths(inputs)
    mask, window = network.attentions[0].mask, network.attentions[0].window
    visible_NM = visible_keys(mask, window, inputs.shape[1], inputs.device)
    for number, step in enumerate(run(network, inputs)):
        if number == 0:
            yield {"layer": 0, "sublayer": "input", "head": None}, state_metrics(step.input_BND, lengths_B)
        layer, kind = step.sublayer.layer, step.sublayer.kind
        if kind == "attention":
            of_weights = attention_metrics(step.weights_BHNM, visible_NM, lengths_B)
            for head in range(step.sublayer.part.heads):
                place = {"layer": layer, "sublayer": "weights", "head": head + 1}
                yield place, {metric: value_BH[:, head] for metric, value_BH in of_weights.items()}
        yield {"layer": layer, "sublayer": kind, "head": None}, state_metrics(step.output_BND, lengths_B)


def moments(values: dict[str, Tensor]) -> dict[str, float]:
    """Mean of each metric over sequences, and as <metric>_sd their sample standard deviation (nan of one sequence)."""
    found = {}
    for metric, value_B in values.items():
        found[metric] = value_B.double().mean().item()
        if value_B.dtype != torch.bool:
            found[f"{metric}_sd"] = value_B.double().std().item() if len(value_B) > 1 else float("nan")
    return found
