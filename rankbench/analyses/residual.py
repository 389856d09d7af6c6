"""Rank and collapse metrics, layer by layer (Dong et al. 2021, Fig. 2; formulas in rankbench.metrics)."""

from dataclasses import dataclass

import pandas as pd
import torch

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config import ConfigError, unknown
from rankbench.layers import metrics_by_layer, moments
from rankbench.model.transformer import Transformer
from rankbench.plots.residual import draw_residual
from rankbench.tables import last_of_layer, thinned
from rankbench.tasks.task import score

# What is taken out of the network with its weights as they are. A removed MLP takes its norm and skip along; removed
# skips are all of them, the MLP's too; norms stay, except in the network that the theorems are about.
VARIANTS: dict[str, dict[str, bool]] = {
    "full": {},
    "no_mlp": {"mlp": True},
    "no_skip": {"skip": True},
    "attention_only": {"skip": True, "mlp": True},
    "attention_only_no_norm": {"skip": True, "mlp": True, "norm": True},
}


@dataclass(frozen=True)
class Options:
    """variants: which of VARIANTS; sequences: how many of the test set (Dong et al.: 32)."""

    variants: list[str]
    sequences: int

    def __post_init__(self) -> None:
        if not self.variants:
            raise ConfigError(f"analysis.residual.variants=[]: name at least one of {', '.join(VARIANTS)}")
        for variant in self.variants:
            if variant not in VARIANTS:
                raise ConfigError(unknown("analysis.residual.variants", variant, VARIANTS))
        if self.sequences < 1:
            raise ConfigError(f"analysis.residual.sequences={self.sequences}: at least one is needed")


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


ANALYSIS = Analysis(Options, table, draw_residual, digest)
