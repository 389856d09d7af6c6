"""How many paths of each length a network has (Dong et al. 2021, Fig. 5; formulas in rankbench.theory)."""

import math
from dataclasses import dataclass

import pandas as pd

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config import ConfigError, unknown
from rankbench.plots.path_counts import draw_path_counts
from rankbench.theory import path_length_distribution

LARGEST = {"layers": 1024, "heads": 65536}  # as for a model


@dataclass(frozen=True)
class Options:
    """architectures: names in `known`, which maps a name to its layers and heads. layers, heads: of one more network,
    with skips; null: the subject's. With architectures and neither of the two, the architectures alone.
    """

    architectures: list[str]
    layers: int | None
    heads: int | None
    known: dict[str, list[int]]

    def __post_init__(self) -> None:
        for name in self.architectures:
            if name not in self.known:
                raise ConfigError(unknown("analysis.path_counts.architectures", name, self.known))
        for name, sizes in self.known.items():
            if len(sizes) != 2:
                raise ConfigError(f"analysis.path_counts.known.{name}={sizes}: wants [layers,heads]")
        named = {f"known.{name}": dict(zip(LARGEST, sizes, strict=True)) for name, sizes in self.known.items()}
        for place, sizes in {"": {"layers": self.layers, "heads": self.heads}, **named}.items():
            for key, size in sizes.items():
                if size is not None and not 1 <= size <= LARGEST[key]:
                    raise ConfigError(
                        f"analysis.path_counts.{place or key}={size}: {key} out of range; "
                        f"allowed are values from 1 to {LARGEST[key]}"
                    )


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """Rows: architecture, path_length 0..L; columns layers, heads, log10_count, share, cumulative_share.

    A path's length is the number of heads that it passes; log10_count is -inf where no path has the length (a network
    without skips), share is of all paths, cumulative_share of those up to this length. Nothing is measured: the
    weights play no part.
    """
    cfg = subject.model.cfg
    networks = [(name, *options.known[name], True) for name in options.architectures]
    own = options.layers is None and options.heads is None
    if not own:
        layers, heads = options.layers or cfg.layers, options.heads or cfg.heads
        networks.append((f"L={layers} H={heads}", layers, heads, True))
    elif not networks:
        networks.append((cfg.name, cfg.layers, cfg.heads, cfg.skip))
    parts = []
    for name, layers, heads, skip in networks:
        lengths = path_length_distribution(layers, heads, skip)
        places = {"architecture": name, "layers": layers, "heads": heads, "path_length": range(layers + 1)}
        parts.append(pd.DataFrame(places | lengths._asdict()))
    return pd.concat(parts, ignore_index=True)


def digest(table: pd.DataFrame) -> str:
    """Number of paths, mean and spread of their length, for a terminal."""
    rows = []
    for name, one in table[table.seed == table.seed.min()].groupby("architecture", sort=False):
        mean = (one.share * one.path_length).sum()
        spread = (one.share * (one.path_length - mean) ** 2).sum() ** 0.5
        layers, heads = one.layers.iloc[0], one.heads.iloc[0]
        total = one.log10_count.max() - math.log10(one.share[one.log10_count.idxmax()])
        rows.append([name, layers, heads, f"10^{total:.1f}", f"{mean:.2f} of {layers}", f"{spread:.2f}"])
    shown = pd.DataFrame(rows, columns=["architecture", "layers", "heads", "paths", "mean length", "sd"])
    return f"paths by length\n{shown.to_string(index=False)}"


ANALYSIS = Analysis(Options, table, draw_path_counts, digest, most_panels=12)
