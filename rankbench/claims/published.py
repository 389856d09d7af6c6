"""The numbers that the papers print, kept in published.csv next to this file."""

from importlib.resources import files

import pandas as pd


def published(figure: str) -> pd.DataFrame:
    """Published numbers of one figure; columns: source, figure, where (their facet), series, x, value, unit."""
    table = _all_published()
    return table[table.figure == figure].reset_index(drop=True)


def figures_published() -> list[str]:
    """Names of the figures with numbers in published.csv."""
    return _all_published().figure.unique().tolist()


def _all_published() -> pd.DataFrame:
    with files("rankbench.claims").joinpath("published.csv").open() as opened:
        return pd.read_csv(opened)
