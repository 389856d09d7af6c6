"""The numbers that the papers print, kept beside the code in published.csv."""

from collections.abc import Iterator
from importlib.resources import files

import pandas as pd


def published(figure: str) -> pd.DataFrame:
    """Published numbers of one figure; columns: source, figure, where (their facet), series, x, value, unit."""
    with files("rankbench.claims").joinpath("published.csv").open() as opened:
        table = pd.read_csv(opened)
    return table[table.figure == figure].reset_index(drop=True)


def figures_published() -> Iterator[str]:
    """Names of the figures with numbers in published.csv."""
    with files("rankbench.claims").joinpath("published.csv").open() as opened:
        yield from pd.read_csv(opened).figure.unique()
