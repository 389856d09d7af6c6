"""The numbers that the papers print, kept in published.csv next to this file."""

from pathlib import Path

import pandas as pd


def published(figure: str) -> pd.DataFrame:
    """Published numbers of one figure; columns: source, figure, where (their facet), series, x, value, unit."""
    table = _all_published()
    return table[table.figure == figure].reset_index(drop=True)


def figures_published() -> list[str]:
    """Names of the figures with numbers in published.csv."""
    return _all_published().figure.unique().tolist()


def _all_published() -> pd.DataFrame:
    return pd.read_csv(Path(__file__).with_name("published.csv"))
