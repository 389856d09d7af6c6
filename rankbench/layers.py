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
from rankbench.rounding import noise_floors


@torch.no_grad()
def metrics_by_layer(
    model: Transformer, inputs: Tensor, generator: torch.Generator
) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """Each place with its metrics, shape (B,).

    A place is layer, sublayer and head: the embedding (layer 0, sublayer input), the state after a sub-layer (layers
    1..L, attention or mlp), or one head's P (sublayer weights; the only place with a head, from 1). generator: on the
    CPU, of the perturbed passes that give the noise floors.
    """
    trace = Trace("embedding", "output", "weights")
    model(inputs, trace=trace)
    lengths_B, floors = model.lengths(inputs), noise_floors(model, inputs, trace, generator)
    visible_NM = visible_keys(model.cfg.mask, model.cfg.window, inputs.shape[1], inputs.device)

    def of_state(name: str) -> dict[str, Tensor]:
        return state_metrics(trace[name], lengths_B, floors[name])

    yield {"layer": 0, "sublayer": "input", "head": None}, of_state("embedding")
    for layer in range(model.cfg.layers):
        name = f"layers.{layer}"
        weights = f"{name}.attention.weights"
        of_weights = attention_metrics(trace[weights], visible_NM, lengths_B, floors[weights])
        for head in range(model.cfg.heads):
            place = {"layer": layer + 1, "sublayer": "weights", "head": head + 1}
            yield place, {metric: value_BH[:, head] for metric, value_BH in of_weights.items()}
        for sublayer in ("attention", "mlp"):
            if f"{name}.{sublayer}.output" in trace:
                place = {"layer": layer + 1, "sublayer": sublayer, "head": None}
                yield place, of_state(f"{name}.{sublayer}.output")


def moments(values: dict[str, Tensor]) -> dict[str, float]:
    """Mean of each metric over the sequences for which it is defined (nan if there is none), and as <metric>_sd their
    sample standard deviation (nan of one sequence).

    num_undefined: for how many sequences a metric is undefined, one or more; every mean is over all but at most these.
    """
    columns = {}
    for metric, value_B in values.items():
        defined = value_B[~value_B.isnan()].double()
        columns[metric] = defined.mean().item()
        if value_B.dtype != torch.bool:
            columns[f"{metric}_sd"] = defined.std().item() if len(defined) > 1 else float("nan")
    undefined_B = torch.stack([value_B.isnan() for value_B in values.values()]).any(0)
    return columns | {"num_undefined": int(undefined_B.sum())}
