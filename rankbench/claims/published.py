"""The numbers that the papers print, kept beside the code in published.csv."""

from collections.abc import Iterator
from importlib.resources import files

import pandas as pd


def published(figure: str) -> pd.DataFrame:
    """The published numbers of one figure: source, figure, where (the facet they belong to), series, x, value, unit."""
    with files("rankbench.claims").joinpath("published.csv").open() as opened:
        table = pd.read_csv(opened)
    return table[table.figure == figure].reset_index(drop=True)


def figures_published() -> Iterator[str]:
    """Names of the figures that published.csv has numbers of."""
    with files("rankbench.claims").joinpath("published.csv").open() as opened:
        yield from pd.read_csv(opened).figure.unique()
