"""Rank and collapse metrics, layer by layer (Dong et al. 2021, Fig. 2; formulas in rankbench.metrics)."""

from dataclasses import dataclass
from typing import ClassVar

import pandas as pd
import torch

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.variants import VARIANTS, VariantOptions
from rankbench.layers import metrics_by_layer, moments
from rankbench.model.transformer import Transformer
from rankbench.plots.residual import draw_residual
from rankbench.tables import last_of_layer, thinned
from rankbench.tasks.task import score


@dataclass(frozen=True)
class Options(VariantOptions):
    """Dong et al. took 32 sequences."""

    analysis: ClassVar[str] = "residual"


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: weights (trained | initialised), variant, layer, sublayer, head; columns: metric, metric_sd.

    sublayer: input (the embedding, layer 0), attention or mlp (the state after it, layers 1..L), weights (metrics of P,
    one row a head). A metric is the mean over sequences, metric_sd their sample standard deviation; noise_floor is the
    residual that rounding alone can leave, below_floor the share of sequences that are under it. For a trained
    classifier also whole_accuracy, of the trained network on the whole test set (share of tokens).
    """
    inputs = subject.test.inputs[: options.sequences]
    rows = []
    for weights, model in subject.models.items():
        for variant in options.variants:
            removed = model.without(**VARIANTS[variant])
            for place, values in metrics_by_layer(removed, inputs):
                rows.append(
                    {"weights": weights, "variant": variant, **place, "dtype": _dtype(removed), **moments(values)}
                )
    return pd.DataFrame(rows).assign(**_learned(subject))


def _learned(subject: Subject) -> dict[str, float]:
    if "trained" not in subject.models or subject.test.targets.is_floating_point():
        return {}
    outputs = torch.cat([subject.model(some).detach() for some in subject.test.inputs.split(1000)])
    return {"whole_accuracy": score(outputs, subject.test.targets).accuracy.item()}


def _dtype(model: Transformer) -> str:
    return str(model.read_out.weight.dtype).removeprefix("torch.")


def digest(table: pd.DataFrame) -> str:
    """Relative residual of the states, by layer, mean over seeds, for a terminal."""
    last = last_of_layer(table)
    mean = last.pivot_table("relative_residual", ["weights", "variant"], "layer", "mean", sort=False)
    shown = thinned(mean).map("{:.1e}".format)
    return f"relative residual by layer (mean of {table.seed.nunique()} seeds)\n{shown.to_string()}"


ANALYSIS = Analysis(Options, table, draw_residual, digest, lines="variant")
