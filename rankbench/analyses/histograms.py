"""Histograms of the entries of attention layers' inputs and outputs (Kim et al. 2021, app. N, Fig. 10)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.analyses.columns import LOSS_FALL, WEIGHTS
from rankbench.analyses.invertibility import check_ranges, inputs_of
from rankbench.config.keys import ConfigError, key
from rankbench.plots.histograms import draw_histograms
from rankbench.runs.tables import mean_of_seeds
from rankbench.seeds import generator_for


@dataclass(frozen=True)
class Options:
    """The inputs, and the bins of the histograms."""

    tokens: int = key("Number of tokens of an input.", at_least=2)
    sequences: int = key("Number of inputs.", at_least=1)
    ranges: list[list[float]] = key("Ranges [low,high] of inputs, whose first token is 0.", nonempty=True)
    bins: int = key("Number of bins from the smallest to the largest entry.", at_least=2)

    def __post_init__(self) -> None:
        check_ranges("histograms", self.ranges)


@torch.no_grad()
def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each bin of the entries of an attention layer's inputs X and outputs f(X), without skip and norm, in
    float64.
    """
    rows = []
    for weights, model in subject.networks_in_float64():
        for number, attention in enumerate(model.attentions, 1):
            layer_columns = {"weights": weights, "layer": number, "attention": attention.score_name}
            for low, high in options.ranges:
                generator = generator_for(subject.seed, "invertibility")  # the same inputs as in `invertibility`
                x_BND = inputs_of(low, high, options.sequences, options.tokens, model.width, generator)
                x_BND = x_BND.to(subject.device)
                y_BND = attention(x_BND)
                if not y_BND.isfinite().all():
                    raise ConfigError(
                        f"analysis.histograms.ranges=[[{low:g},{high:g}]]: the outputs of attention overflow; give "
                        "smaller numbers"
                    )
                axes = layer_columns | {"inputs": f"{low:g}..{high:g}"}
                rows += [axes | row for row in _rows({"input": x_BND, "output": y_BND}, options.bins)]
    return pd.DataFrame(rows).assign(**subject.how_trained)


def _rows(entries: dict[str, Tensor], bins: int) -> Iterator[dict]:
    values = {of: x.flatten().cpu().numpy() for of, x in entries.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(values.values())), bins)
    for of, x in values.items():
        density, _ = np.histogram(x, edges, density=True)
        moments = {"sd": x.std(), "smallest": x.min(), "largest": x.max()}
        for number in range(bins):
            where = {"of": of, "bin": number, "low": edges[number], "high": edges[number + 1]}
            yield where | {"density": density[number]} | moments


def digest(table: pd.DataFrame) -> str:
    """Spread and range of inputs and outputs, mean over seeds, for a terminal."""
    axes = ["weights", "layer", "attention", "inputs", "of"]
    mean = table.groupby(axes, sort=False)[["sd", "smallest", "largest"]].mean()
    seeds = mean_of_seeds(table.seed.nunique())
    return f"entries of attention's inputs and outputs ({seeds})\n{mean.round(3).to_string()}"


def check(subject: Subject, options: Options) -> None:
    """Raise ConfigError if attention also reads another layer, or contraction_keys is too small."""
    if any(sublayer.streams is not None and sublayer.streams.beside for sublayer in subject.network.sublayers):
        raise ConfigError(
            "analysis=histograms: an attention's inputs are tokens; with model.value_residual they are also those of "
            "the first attention; measure this network with analysis=[residual], [paths] or [path_mass]"
        )
    subject.network.attentions[0].num_keys(options.tokens)


COLUMNS = {
    **WEIGHTS,
    "layer": "Number of the layer.",
    "attention": "Kind of attention.",
    "inputs": "Range of the inputs.",
    "of": "input or output.",
    "bin": "Number of the bin, from 0.",
    "low": "Lower end of the bin.",
    "high": "Upper end of the bin.",
    "density": "Share of entries over the bin's width.",
    "sd": "Standard deviation of all entries.",
    "smallest": "Smallest of all entries.",
    "largest": "Largest of all entries.",
    **LOSS_FALL,
}
ANALYSIS = Analysis(
    Options, table, draw_histograms, digest, COLUMNS, ("density",), {"sublayers"}, check, most_panels=12
)
