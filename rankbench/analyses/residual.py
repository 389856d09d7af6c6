"""Rank and collapse metrics, layer by layer (Dong et al. 2021, Fig. 2; formulas in rankbench.measures.states)."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses import columns
from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.variants import VARIANTS, VariantOptions
from rankbench.config.keys import key
from rankbench.measures.by_layer import metrics_by_layer, metrics_in_view, moments
from rankbench.measures.module_reading import ReadModule
from rankbench.measures.module_states import layers_of, states_with_floors
from rankbench.measures.norms import at_least_float32
from rankbench.measures.streams import streams_by_layer
from rankbench.measures.token_views import DEFAULT_VIEWS, VIEWS, View
from rankbench.model.kinds import kinds_of_task
from rankbench.model.modules import Example
from rankbench.model.network import without
from rankbench.plots.figure import in_words
from rankbench.plots.residual import draw_residual, views_apart, with_lines_of_views
from rankbench.progress import counted
from rankbench.runs.tables import last_of_layer, mean_and_spread, mean_of_seeds, thinned
from rankbench.seeds import generator_for
from rankbench.tape.tags import Visit

log = logging.getLogger(__name__)

SEQUENCES_AT_A_TIME = 8  # of a module that is not ours
COMPARED = ("relative_residual", "stable_rank", "effective_rank")  # between all tokens and the other views of them


@dataclass(frozen=True)
class Options(VariantOptions):
    """Which variants of a network are measured, on how many sequences, and which of their tokens."""

    views: list[str] | None = key(
        "Views of a state's tokens. null: all; for networks that are not ours also without_sinks and unit_length.",
        choices=VIEWS,
        nonempty=True,
    )
    sink_ratio: float = key(
        "A sink token is more than this many times as long as the median token of its sequence.", above=1
    )


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each state, and for each head's P.

    Metrics are means over the sequences for which they are defined. Networks of sub-layers have the state after every
    sub-layer, also with parts taken out, and every P; other modules have what every layer returns
    (rankbench.measures.module_states). Layers without attention count if they stand in one list with the others.
    Metrics of P take its rows for the queries that count, over their sums if these are not 1.
    """
    rows_of = _rows_of_networks if subject.networks else _rows_of_modules
    of_all = {**whole_accuracy(subject), **subject.how_trained, **subject.what_counts}
    return pd.DataFrame(rows_of(subject, options)).assign(**of_all)


def _rows_of_networks(subject: Subject, options: Options) -> Iterator[dict[str, Any]]:
    """Rows of the state after every sub-layer and of every P, also of networks with parts taken out."""
    inputs = subject.test.inputs[: options.sequences]
    passes = list(product(subject.networks, options.variants, _views(subject, options)))
    for weights, variant, view in counted(passes, len(passes), "residual: networks, variants and views"):
        removed = without(subject.networks[weights], **VARIANTS[variant])
        generator = generator_for(subject.seed, "rounding")
        row = {"weights": weights, "variant": variant, "view": view.name}
        dtype = str(removed.read_out.weight.dtype).removeprefix("torch.")
        streams = dict(streams_by_layer(removed, inputs, view.without))
        for axes, values in metrics_by_layer(removed, inputs, generator, view):
            of_mixing: dict[str, float] = {}
            if (place := (axes["layer"], axes["sublayer"])) in streams:
                residual_B, of_mixing = streams[place]
                values = values | {"stream_residual": residual_B}
            yield {**row, **axes, "dtype": dtype, **moments(values), **of_mixing}


@torch.no_grad()
def _rows_of_modules(subject: Subject, options: Options) -> Iterator[dict[str, Any]]:
    """Rows of the states that layers return; of the whole module, as no parts can be taken out of it."""
    if options.variants != ["full"]:
        log.info("%s: no parts can be taken out of it; variant full alone is measured", subject.run)
    views = _views(subject, options)
    for weights, read in subject.reads.items():
        generator, example = generator_for(subject.seed, "rounding"), read.example[: options.sequences]
        for row in rows_by_layer(read, layers_of(read), example, generator, views):
            yield {"weights": weights, "variant": "full", **row}


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError for a view without a kind of tokens that there is not, and for modules without layers."""
    if without := [view.without for view in _views(subject, options) if view.without is not None]:
        kinds = kinds_of_task(subject.task) if subject.foreign is None else subject.example.kinds
        kinds.check(without, "analysis.residual.views")
    if not subject.networks:
        for read in subject.reads.values():
            layers_of(read)


def _views(subject: Subject, options: Options) -> list[View]:
    default = DEFAULT_VIEWS[:1] if subject.foreign is None else DEFAULT_VIEWS
    return [View(name, options.sink_ratio) for name in (default if options.views is None else options.views)]


@torch.no_grad()
def rows_by_layer(
    read: ReadModule, layers: list[Visit], example: Example, generator: torch.Generator, views: Sequence[View]
) -> Iterator[dict[str, Any]]:
    """A row for each view of each state of a module: view, layer, sublayer, head (none), submodule and dtype as in
    `table`, and the moments of the metrics. generator: on the CPU, for the perturbed passes."""
    parts: dict[tuple[int, int], list[dict[str, Tensor]]] = {}  # by view and layer
    for batch in example.split(SEQUENCES_AT_A_TIME):
        for layer, (state_BND, floors) in enumerate(states_with_floors(read, layers, batch, generator, views)):
            for number, (view, floor_B) in enumerate(zip(views, floors, strict=True)):
                state, floor = at_least_float32(state_BND), at_least_float32(floor_B)
                counted_BN = read.counted_after(layers, batch, state.shape[1], view.without)
                metrics = metrics_in_view(state, counted_BN, floor, view)
                parts.setdefault((number, layer), []).append(metrics)
    dtype = str(state_BND.dtype).removeprefix("torch.")
    for number, layer in sorted(parts):
        of_state = parts[number, layer]
        values = {name: torch.cat([part[name] for part in of_state]) for name in of_state[0]}
        row = {"view": views[number].name, "layer": layer, "sublayer": "layer" if layer else "input", "head": None}
        row["submodule"] = layers[layer - 1].name if layer else None
        yield {**row, "dtype": dtype, **moments(values)}


@torch.no_grad()
def whole_accuracy(subject: Subject) -> dict[str, float]:
    """whole_accuracy, of a trained classifier on the whole test set (share of tokens); else nothing."""
    if "trained" not in subject.networks or subject.test.targets.is_floating_point():
        return {}
    return {"whole_accuracy": subject.score(subject.test).accuracy.item()}


def digest(table: pd.DataFrame) -> str:
    """Relative residual of the states by layer, geometric mean over seeds; and the views of the tokens that differ."""
    last = last_of_layer(table)
    shown = with_lines_of_views(last)
    axes = ["weights", "variant", *(["view"] if shown.view.nunique() > 1 else [])]
    summary = mean_and_spread(shown, [*axes, "layer"], "relative_residual", geometric=True)
    order = shown.drop_duplicates(axes).set_index(axes).index
    mean = summary.pivot(index=axes, columns="layer", values="mean").loc[order]
    few = thinned(mean).map("{:.1e}".format)
    seeds = mean_of_seeds(table.seed.nunique(), "geometric mean")
    lines = [f"relative residual by layer ({seeds})", few.to_string()]
    return "\n".join([*lines, *disagreements(last)])


def disagreements(last: pd.DataFrame) -> list[str]:
    """A sentence for each network, metric and view that differs from all tokens by more than a factor of two."""
    lines = []
    for metric in COMPARED:
        for (weights, variant, view), rows in views_apart(last, metric).groupby(
            ["weights", "variant", "view"], sort=False
        ):
            worst = rows.loc[np.log2(rows["value"] / rows["all"]).abs().idxmax()]
            lines.append(
                f"{weights}, {variant}: {metric} of all tokens and {in_words(view)} differ by more than a factor "
                f"of 2 in layers {', '.join(map(str, rows.layer))} (layer {worst.layer}: {worst['all']:.2g} and "
                f"{worst['value']:.2g})"
            )
    return lines


COLUMNS = {
    **columns.WEIGHTS,
    **columns.VARIANT,
    "view": "Tokens that are measured: all, without_sinks, unit_length, or without those of a kind "
    "(rankbench.measures.token_views).",
    "layer": "0: what enters the first layer; else the number of the layer.",
    "sublayer": "Where: input; attention or mlp, the state after it; layer, the state that a module's layer returns; "
    "weights, P of one head.",
    "head": "Number of the head, from 1; empty for states.",
    "submodule": "Name of the layer in a module. In a module of one layer, check that it contains the skip.",
    "dtype": "Floating-point format of the weights.",
    **columns.STATES,
    **columns.STATE_FLOORS,
    "num_sinks": "Number of tokens that the view without_sinks leaves out.",
    "num_undefined": "Number of sequences that lack one metric or more.",
    **columns.ATTENTION,
    **columns.ATTENTION_FLOORS,
    **columns.STREAMS,
    **columns.SPREAD,
    **columns.OF_CLASSIFIER,
    **columns.LOSS_FALL,
    **columns.SPECIAL_TOKENS,
}
ANALYSIS = Analysis(
    Options,
    table,
    draw_residual,
    digest,
    COLUMNS,
    ("variant", "sublayer"),
    needs={"attention"},
    check=check,
    lines="variant",
)
