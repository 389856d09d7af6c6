"""The metrics of states and of attention matrices for every layer of a network, in one forward pass.

Shapes: B sequence, H head, N query token, M key token.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rankbench.measures.attention_matrices import attention_metrics
from rankbench.measures.rounding import ALL, run_with_floors
from rankbench.measures.states import state_metrics
from rankbench.measures.token_views import View, sinks
from rankbench.model.attention import visible_keys
from rankbench.model.network import AttentionStep, Network


@torch.no_grad()
def metrics_by_layer(
    network: Network, inputs: Tensor, generator: torch.Generator, view: View = ALL
) -> Iterator[tuple[dict, dict[str, Tensor]]]:
    """Yield layer, sublayer and head of each state and each P, with its metrics, each of shape (B,).

    The embedding has layer 0 and sublayer input; the state after a sub-layer has layer 1..L and sublayer attention or
    mlp; one head's P has sublayer weights and a head from 1 on, which states do not have. generator: on the CPU, for
    the perturbed passes that give the noise floors. view: the tokens over which metrics of states are taken;
    metrics of P take the rows of all queries that count.
    """
    lengths_B, counted_BN = network.lengths(inputs), network.counted(inputs, view.without)
    attention = network.attentions[0]
    visible_NM = visible_keys(attention.mask, attention.window, network.num_tokens(inputs), inputs.device)
    for number, (step, floors) in enumerate(run_with_floors(network, inputs, generator, view)):
        if number == 0:
            embedding = metrics_in_view(step.input_BND, counted_BN, floors.input_B, view)
            yield {"layer": 0, "sublayer": "input", "head": None}, embedding
        layer, kind = step.sublayer.layer, step.sublayer.kind
        if isinstance(step, AttentionStep) and view.name == "all":
            p_BHNM, stochastic = step.weights_BHNM, step.sublayer.part.weighting.stochastic
            of_weights = attention_metrics(p_BHNM, visible_NM, lengths_B, counted_BN, floors.weights_BH, stochastic)
            for head in range(step.sublayer.part.heads):
                axes = {"layer": layer, "sublayer": "weights", "head": head + 1}
                yield axes, {metric: value_BH[:, head] for metric, value_BH in of_weights.items()}
        axes = {"layer": layer, "sublayer": kind, "head": None}
        yield axes, metrics_in_view(step.output_BND, counted_BN, floors.output_B, view)


def metrics_in_view(x_BND: Tensor, counted_BN: Tensor | None, floor_B: Tensor, view: View) -> dict[str, Tensor]:
    """The metrics of a view of the tokens that count, given the floor of the residual in that view."""
    seen, kept_B = view.of(x_BND, counted_BN)
    metrics = state_metrics(seen(x_BND), kept_B, floor_B)
    if view.name == "without_sinks":
        metrics["num_sinks"] = sinks(x_BND, counted_BN, view.sink_ratio).sum(1).to(x_BND.dtype)
    return metrics


def on_cpu(tables: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Move these values to the CPU in a single copy."""
    values = [value for table in tables for value in table.values()]
    if not values or values[0].device.type == "cpu":
        return tables
    # float64 holds every float32, every truth value and every count exactly
    copied = torch.cat([value.double().flatten() for value in values]).cpu().split([value.numel() for value in values])
    parts = iter(part.to(value.dtype).view(value.shape) for part, value in zip(copied, values, strict=True))
    return [{name: next(parts) for name in table} for table in tables]


def moments(values: dict[str, Tensor]) -> dict[str, float]:
    """Mean of each metric over the sequences for which it is defined (nan if there is none), and its sample standard
    deviation as <metric>_sd (nan for one sequence).

    num_undefined: number of sequences for which at least one metric is undefined; a mean leaves out at most these.
    """
    columns = {}
    for metric, value_B in values.items():
        defined = value_B[~value_B.isnan()].double()
        columns[metric] = defined.mean().item()
        if value_B.dtype != torch.bool:
            columns[f"{metric}_sd"] = defined.std().item() if len(defined) > 1 else float("nan")
    undefined_B = torch.stack([value_B.isnan() for value_B in values.values()]).any(0)
    return columns | {"num_undefined": int(undefined_B.sum())}
