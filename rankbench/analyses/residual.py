"""Rank and collapse metrics, layer by layer (Dong et al. 2021, Fig. 2; formulas in rankbench.measures.states)."""

import logging
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from rankbench.analyses.analysis import Analysis, ModuleSubject, Subject
from rankbench.analyses.variants import VARIANTS
from rankbench.analyses.variants import VariantOptions as Options
from rankbench.measures.by_layer import metrics_by_layer, moments
from rankbench.measures.module_states import Run, layers_of, states_with_floors
from rankbench.measures.norms import at_least_float32
from rankbench.measures.states import state_metrics
from rankbench.model.modules import Example
from rankbench.model.network import Network, without
from rankbench.plots.residual import draw_residual
from rankbench.runs.tables import last_of_layer, thinned
from rankbench.seeds import generator_for
from rankbench.tasks.task import score

log = logging.getLogger(__name__)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: weights (trained | initialised), variant, layer, sublayer, head; columns: metric, metric_sd.

    sublayer: input (the embedding, layer 0), attention or mlp (the state after it, layers 1..L), weights (metrics of P,
    one row a head). A metric is the mean over the sequences for which it is defined, metric_sd their sample standard
    deviation; num_undefined of all sequences lack one metric or more (layers.moments). noise_floor is the error of the
    residual by rounding (rankbench.measures.rounding), relative_noise_floor the same over ||X||, below_floor the share
    of sequences whose residual is no larger: what is said of these residuals is no measurement. Rows of a head have the
    same of P, attention_noise_floor and so on. For a trained classifier also whole_accuracy, of the trained network on
    the whole test set (share of tokens).
    """
    inputs = subject.test.inputs[: options.sequences]
    rows = []
    for weights, model in subject.models.items():
        for variant in options.variants:
            removed = without(model, **VARIANTS[variant])
            generator = generator_for(subject.seed, "rounding")
            for place, values in metrics_by_layer(removed, inputs, generator):
                rows.append(
                    {"weights": weights, "variant": variant, **place, "dtype": _dtype(removed), **moments(values)}
                )
    return pd.DataFrame(rows).assign(**learned(subject))


SEQUENCES_AT_A_TIME = 8  # of a module that is not ours


@torch.no_grad()
def of_module(subject: ModuleSubject, options: Options) -> pd.DataFrame:
    """The rows of states in `table`, of modules that are not ours, variant full: parts cannot be taken out of these.

    sublayer: input (what enters the first layer) or layer (what a layer returns; rankbench.measures.module_states).
    submodule: the layer's name in the module; of a network of one layer, see there that its skip is inside.
    """
    if options.variants != ["full"]:
        log.info("%s: no parts can be taken out of it; variant full alone is measured", subject.name)
    example, rows = subject.example[: options.sequences], []
    for weights, module in subject.modules.items():
        generator = generator_for(subject.seed, "rounding")
        rows_of_states = rows_by_layer(module, layers_of(module, example[:1]), example, generator)
        rows += [{"weights": weights, "variant": "full", **row} for row in rows_of_states]
    return pd.DataFrame(rows)


@torch.no_grad()
def rows_by_layer(
    module: nn.Module, layers: list[Run], example: Example, generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """A row for each state of a module: layer, sublayer, head (none), submodule and dtype as in `of_module`, and the
    moments of the metrics. generator: on the CPU, of the perturbed passes."""
    by_layer: list[list[dict[str, Tensor]]] = [[] for _ in range(len(layers) + 1)]
    for some in example.split(SEQUENCES_AT_A_TIME):
        states = states_with_floors(module, layers, some, generator)
        for parts, (state_BND, floor_B) in zip(by_layer, states, strict=True):
            parts.append(state_metrics(at_least_float32(state_BND), some.lengths_B, at_least_float32(floor_B)))
    dtype = str(state_BND.dtype).removeprefix("torch.")
    for layer, parts in enumerate(by_layer):
        place = {"layer": layer, "sublayer": "layer" if layer else "input", "head": None}
        place["submodule"] = layers[layer - 1].name if layer else None
        values = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        yield {**place, "dtype": dtype, **moments(values)}


def learned(subject: Subject) -> dict[str, float]:
    """whole_accuracy, of a trained classifier on the whole test set (share of tokens); else nothing."""
    if "trained" not in subject.models or subject.test.targets.is_floating_point():
        return {}
    outputs = torch.cat([subject.model(some).detach() for some in subject.test.inputs.split(1000)])
    return {"whole_accuracy": score(outputs, subject.test.targets).accuracy.item()}


def _dtype(network: Network) -> str:
    return str(network.read_out.weight.dtype).removeprefix("torch.")


def digest(table: pd.DataFrame) -> str:
    """Relative residual of the states, by layer, mean over seeds, for a terminal."""
    last = last_of_layer(table)
    mean = last.pivot_table("relative_residual", ["weights", "variant"], "layer", "mean", sort=False)
    shown = thinned(mean).map("{:.1e}".format)
    return f"relative residual by layer (mean of {table.seed.nunique()} seeds)\n{shown.to_string()}"


ANALYSIS = Analysis(
    Options,
    table,
    draw_residual,
    digest,
    ("variant", "sublayer"),
    lines="variant",
    of_module=of_module,
    check_module=layers_of,
    any_network=True,
)
