"""How many paths of each length a network has (Dong et al. 2021, Fig. 5; formulas in
rankbench.measures.dong_theory)."""

import math
from dataclasses import dataclass

import pandas as pd

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config.keys import ConfigError, check_known, key
from rankbench.config.schema import KEYS
from rankbench.measures.dong_theory import path_length_distribution
from rankbench.plots.path_counts import draw_path_counts


@dataclass(frozen=True)
class Options:
    """Which networks are counted. If these keys name other networks, the model itself is not counted."""

    architectures: list[str] = key("Names in known. []: the model, or the network of the next two keys.")
    layers: int | None = key("Layers of one more network with skips. null: the model's.", between=(1, 1024))
    heads: int | None = key("Heads of one more network with skips. null: the model's.", between=(1, 65536))
    known: dict[str, list[int]] = key("Layers and heads of architectures by name, such as {BERT-Base: [12, 12]}.")

    def __post_init__(self) -> None:
        check_known("analysis.path_counts.architectures", self.architectures, self.known)
        for name, sizes in self.known.items():
            if len(sizes) != 2:
                raise ConfigError(f"analysis.path_counts.known.{name}={sizes}: wants [layers,heads]")
            for part, size in zip(("layers", "heads"), sizes, strict=True):
                KEYS[f"model.{part}"].check(f"analysis.path_counts.known.{name}: {part}", size)


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each length of each network. The weights play no part."""
    own_layers, own_heads, own_skip = subject.network.path_choices
    networks = [
        (name, layers, heads, True) for name in options.architectures for layers, heads in [options.known[name]]
    ]
    if options.layers is not None or options.heads is not None:
        layers, heads = options.layers or own_layers, options.heads or own_heads
        networks.append((f"L={layers} H={heads}", layers, heads, True))
    elif not networks:
        networks.append((subject.network.name, own_layers, own_heads, own_skip))
    parts = []
    for name, layers, heads, skip in networks:
        lengths = path_length_distribution(layers, heads, skip)
        columns = {"architecture": name, "layers": layers, "heads": heads, "path_length": range(layers + 1)}
        parts.append(pd.DataFrame(columns | lengths._asdict()))
    return pd.concat(parts, ignore_index=True)


def digest(table: pd.DataFrame) -> str:
    """Number of paths, mean and spread of their length, for a terminal."""
    rows = []
    for name, rows_of_name in table[table.seed == table.seed.min()].groupby("architecture", sort=False):
        mean = (rows_of_name.share * rows_of_name.path_length).sum()
        spread = (rows_of_name.share * (rows_of_name.path_length - mean) ** 2).sum() ** 0.5
        layers, heads = rows_of_name.layers.iloc[0], rows_of_name.heads.iloc[0]
        total = rows_of_name.log10_count.max() - math.log10(rows_of_name.share[rows_of_name.log10_count.idxmax()])
        rows.append([name, layers, heads, f"10^{total:.1f}", f"{mean:.2f} of {layers}", f"{spread:.2f}"])
    printed = pd.DataFrame(rows, columns=["architecture", "layers", "heads", "paths", "mean length", "sd"])
    return f"paths by length\n{printed.to_string(index=False)}"


COLUMNS = {
    "architecture": "Name of the network.",
    "layers": "Number of layers.",
    "heads": "Number of heads of each layer.",
    "path_length": "Number of heads that a path passes, from 0 to layers.",
    "log10_count": "log10 of the number of paths; -inf if none has the length (in a network without skips).",
    "share": "Share of all paths.",
    "cumulative_share": "Share of the paths up to this length.",
}
ANALYSIS = Analysis(Options, table, draw_path_counts, digest, COLUMNS, ("log10_count",), {"sublayers"}, most_panels=12)
