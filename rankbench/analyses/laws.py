"""Laws of newer theory: closed forms compared with simulations and with networks of ours.

The formulas are those of the papers, in rankbench.papers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch

from rankbench.analyses.analysis import Analysis, Subject
from rankbench.config import plugins
from rankbench.config.keys import ConfigError, check_known, key
from rankbench.measures.law import CLAIMED, CONTROL, LAWS, SIZES
from rankbench.plots.laws import draw_laws
from rankbench.seeds import generator_for


@dataclass(frozen=True)
class Options:
    """Which law, and the sizes at which it is measured. A law has only some of the sizes."""

    law: str = key("Name of the law.", choices=LAWS)
    tokens: int | None = key("Number of tokens. null: the law's usual one.", between=(2, 10**4))
    layers: int | None = key("Number of layers. null: the law's usual one.", between=(1, 1024))
    width: int | None = key("Width of a token. null: the law's usual one.", between=(2, 10**5))
    samples: int | None = key("Number of draws for each seed. null: the law's usual one.", between=(1, 10**6))

    def __post_init__(self) -> None:
        usual = LAWS[self.law].sizes
        for name in SIZES:
            if (size := getattr(self, name)) is not None and name not in usual:
                raise ConfigError(
                    f"analysis.laws.{name}={size}: law={self.law} has no such size; its sizes are {', '.join(usual)}"
                )

    @property
    def sizes(self) -> dict[str, int]:
        """The law's sizes."""
        usual = LAWS[self.law].sizes
        return {name: size if getattr(self, name) is None else getattr(self, name) for name, size in usual.items()}


def table(subject: Subject, options: Options) -> pd.DataFrame:
    """A row for each point of a curve. The subject's weights play no part.

    The closed form is for the claimed set-up; for the control, measured at the same parameters and x, it must be wrong.
    """
    try:
        rows = pd.DataFrame(_rows(subject, options), columns=list(POINTS)).astype({"x": float, "value": float})
    except Exception as error:
        if options.law not in plugins.brought("LAWS") or plugins.frames_of_user(error):
            raise
        raise ConfigError(
            f"analysis.laws.law={options.law}: {error}; predicted yields (parameter, x, value), simulated and network "
            "(setup, parameter, x, value)"
        ) from error
    check_known(f"{options.law}: setup", rows.setup.unique(), (CLAIMED, CONTROL))
    rows.insert(0, "law", options.law)
    return rows


@torch.no_grad()
def _rows(subject: Subject, options: Options) -> Iterator[tuple[str, str, str, float, float]]:
    law, sizes = LAWS[options.law], options.sizes
    yield from ((CLAIMED, "closed form", parameter, x, value) for parameter, x, value in law.predicted(**sizes))
    measures = ("simulated", law.simulated, "simulated law"), ("network", law.network, "network of law")
    for curve, measure, purpose in measures:
        if measure is not None:
            measured = measure(generator_for(subject.seed, purpose), **sizes)
            yield from ((setup, curve, parameter, x, value) for setup, parameter, x, value in measured)


def digest(table: pd.DataFrame) -> str:
    """Closed form and measured mean over seeds, by x (at most a dozen), for a terminal."""
    x_values = sorted(table.x.unique())
    few = x_values[:: -(-len(x_values) // 12)]
    wide = table[table.x.isin(few)].pivot_table("value", ["parameter", "setup", "curve"], "x", "mean", sort=False)
    names = ", ".join(table.law.unique())
    return (
        f"law {names}, by {LAWS[table.law.iloc[0]].x_label}\n{wide.sort_index(axis=1).map('{:.4g}'.format).to_string()}"
    )


POINTS = {
    "setup": "claimed or control.",
    "curve": "closed form, simulated or network.",
    "parameter": "Name and value of the curve's parameter.",
    "x": "What the law's figure has on its x axis.",
    "value": "The number.",
}
COLUMNS = {"law": "Name of the law.", **POINTS}
ANALYSIS = Analysis(Options, table, draw_laws, digest, COLUMNS, ("law", "setup", "curve"), {"sublayers", "task"})
