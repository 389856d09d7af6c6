"""The numbers that papers print, from the files published.csv of papers and plug-ins."""

from pathlib import Path

import pandas as pd

from rankbench.config import plugins
from rankbench.config.keys import ConfigError

COLUMNS = ["source", "figure", "where", "series", "x", "value", "unit"]


def published(figure: str) -> pd.DataFrame:
    """Published numbers of one figure; columns: source, figure, where (their facet), series, x, value, unit."""
    table = _all_published()
    return table[table.figure == figure].reset_index(drop=True)


def figures_published() -> list[str]:
    """Names of the figures with published numbers."""
    return _all_published().figure.unique().tolist()


def _all_published() -> pd.DataFrame:
    """All numbers. ConfigError for a file of a plug-in that cannot be read, or with a figure that exists already."""
    tables: dict[Path, pd.DataFrame] = {}
    for path in plugins.published_files():
        table = read_published(path)
        for before in tables.values():
            if known := sorted({*before.figure} & {*table.figure}):
                raise ConfigError(f"{path}: figure {known[0]} exists already; give it another name")
        tables[path] = table
    return pd.concat(tables.values(), ignore_index=True) if tables else pd.DataFrame(columns=COLUMNS)


def read_published(path: Path) -> pd.DataFrame:
    """The numbers of one file. ConfigError for other columns, a cell without a text, and what is not a number."""
    try:
        table = pd.read_csv(path, dtype=str)
    except (ValueError, OSError) as error:  # pandas' errors of parsing are ValueErrors
        raise ConfigError(f"{path}: cannot be read ({error}); fix it, or leave it out") from None
    if list(table) != COLUMNS:
        raise ConfigError(f"{path}: has the columns {', '.join(table)}; they must be {', '.join(COLUMNS)}")
    for name in COLUMNS:
        cells = table[name]
        numbers = pd.to_numeric(cells, errors="coerce") if name in ("x", "value") else cells
        wrong = cells.notna() & numbers.isna() | cells.isna() & (name not in ("x", "where"))
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            what = "is empty" if pd.isna(cells[row]) else f"is {cells[row]}, not a number"
            raise ConfigError(f"{path}: {name} in row {row + 1} {what}; fix it")
        table[name] = numbers
    return table
