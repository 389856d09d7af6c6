"""A study of chosen columns: one value of each run and seed from a report's tables, and the columns' rank correlation.

A column is named as `residual.effective_rank`; one of the final numbers as `test_accuracy`.
"""

import math
from collections.abc import Iterable

import pandas as pd
import scipy

from rankbench.config import StudyKeys
from rankbench.keys import ConfigError, closest, unknown
from rankbench.plots import tick
from rankbench.runs.intervals import interval95
from rankbench.runs.tables import RUN_COLUMNS, booleans_as_words

OF_RUN = ["run", "seed"]
DIGITS = 9
FEWEST = 3  # configurations with which a rank correlation says anything


def studied_columns(
    chosen: StudyKeys, tables: dict[str, pd.DataFrame], final: pd.DataFrame, keys: list[str]
) -> dict[str, pd.DataFrame]:
    """The rows of each column that the user chose; ConfigError if one does not exist or needs a narrower choice."""
    if not chosen.value:
        if chosen.where:
            raise ConfigError(f"report.where={chosen.where}: chooses rows for report.value, which is empty")
        return {}
    final = final[is_done(final)] if "status" in final else final
    sources = {}
    for value in chosen.value:
        table = "" if value in final else value.rpartition(".")[0]
        if table and table not in tables:
            raise ConfigError(f"report.value={value}: {unknown('table', table, tables)}")
        sources[value] = tables[table] if table else final
        if (column := column_of(sources[value], value)) not in sources[value]:
            columns = [f"{table}.{name}" if table else name for name in sources[value] if name not in RUN_COLUMNS]
            raise ConfigError(unknown("report.value", value, columns))
        if not pd.api.types.is_numeric_dtype(sources[value][column]):
            raise ConfigError(f"report.value={value}: a column of words; give one of numbers")
    check_conditions(chosen.where, sources.values())
    if len(sources) > 1 and (axes := axes_of(chosen, keys, *sources.values())):
        raise ConfigError(
            f"report.value=[{','.join(sources)}]: compared run by run, and {axes[0]} has several rows for each run; "
            f"give one column, or choose one row, as in report.where={axes[0]}=last"
        )
    return {
        value: values_of(table, value, chosen.where, axes_of(chosen, keys, table)) for value, table in sources.items()
    }


def column_of(table: pd.DataFrame, value: str) -> str:
    """The column of a value: `effective_rank` for residual.effective_rank, or the whole name if a column has it."""
    return value if value in table else value.rpartition(".")[2]


def axes_of(chosen: StudyKeys, keys: list[str], *tables: pd.DataFrame) -> list[str]:
    """The figure's x, series and facet, as far as they are columns of these tables and not keys of the runs."""
    named = [key for key in chosen.places.values() if key is not None and key not in keys]
    return [key for key in named if any(key in table for table in tables)]


def with_columns(
    final: pd.DataFrame, studied: dict[str, pd.DataFrame], chosen: StudyKeys, keys: list[str]
) -> pd.DataFrame:
    """The final numbers with a column for each chosen one that has one value for each run and seed."""
    for value, rows in studied.items():
        if value not in final and not axes_of(chosen, keys, rows):
            column = rows.set_index(OF_RUN)[column_of(rows, value)].rename(value)
            final = final.join(column, on=OF_RUN)
    return final


def is_done(seeds: pd.DataFrame) -> pd.Series:
    """Which seeds of a report's final numbers were trained to their end: (rows,) bool."""
    return (seeds.job_status == "finished") & (seeds.status != "diverged")


def conditions_of(where: str | None) -> dict[str, str]:
    """The conditions in `layer=last,variant=full`, by column."""
    words = [word.strip().partition("=") for word in where.split(",")] if where else []
    for column, equals, value in words:
        if not (column and equals and value):
            raise ConfigError(f"report.where={where}: not understood; give column=value,column=value, as in layer=last")
    return {column: value for column, _, value in words}


def check_conditions(where: str | None, tables: Iterable[pd.DataFrame]) -> None:
    """Raise ConfigError for a condition on a column that none of the tables has."""
    known = list(dict.fromkeys(str(name) for table in tables for name in table))
    for column in conditions_of(where):
        if column not in known:
            raise ConfigError(f"report.where={where}: no column {column}{closest(column, known)} in the chosen tables")


def values_of(table: pd.DataFrame, value: str, where: str | None, axes: list[str]) -> pd.DataFrame:
    """The rows of a joined table that have a value and meet the conditions; one for each run, seed and point of the
    axes.

    A condition is a value, or `first` or `last`: of numbers the smallest or largest of this run and seed, of words the
    first or last in the table's order. Raises ConfigError if nothing is left, and if rows of one run and seed differ in
    more columns than the axes, because their mean would mix separate measurements.
    """
    column = column_of(table, value)
    rows = booleans_as_words(table.dropna(subset=[column]))
    for name, wanted in conditions_of(where).items():
        if name in rows:
            kept = rows[_meets(rows, name, wanted)]
            if kept.empty:
                there = ", ".join(dict.fromkeys(map(tick, rows[name])))
                raise ConfigError(
                    f"report.where={where}: {name}={wanted} leaves no row of {value}; there are {there or 'none'}"
                )
            rows = kept
    if rows.empty:
        raise ConfigError(f"report.value={value}: no run has a value in this column")
    if differing := _differing(rows, [*OF_RUN, *axes], column):
        choices = ", ".join(f"{name} ({', '.join(map(tick, rows[name].unique()[:4]))})" for name in differing)
        raise ConfigError(
            f"report.value={value}: each run and seed has several rows, which differ in {choices}; "
            f"choose one of each, as in report.where={differing[0]}={tick(rows[differing[0]].iloc[-1])}, "
            f"or draw it, as in report.x={differing[-1]}"
        )
    return rows


def _meets(rows: pd.DataFrame, name: str, wanted: str) -> pd.Series:
    is_number = pd.api.types.is_numeric_dtype(rows[name])
    if wanted not in ("first", "last"):
        return rows[name] == (pd.to_numeric(wanted, errors="coerce") if is_number else wanted)
    if is_number:
        return rows[name] == rows.groupby(OF_RUN)[name].transform("max" if wanted == "last" else "min")
    return rows[name] == rows.groupby(OF_RUN)[name].transform(wanted)


def _differing(rows: pd.DataFrame, by: list[str], column: str) -> list[str]:
    """The columns that tell rows with the same values of `by` apart: a table's axes come before its measured values."""
    differing: list[str] = []
    for name in rows.columns[: rows.columns.get_loc(column)]:
        if not rows.duplicated([*by, *differing]).any():
            break
        if name not in by and rows.groupby([*by, *differing], dropna=False)[name].nunique(dropna=False).max() > 1:
            differing.append(name)
    return differing


def rank_correlation(seeds: pd.DataFrame, x: str, y: str, keys: list[str]) -> dict[str, float]:
    """Spearman's rank correlation of two columns over the configurations, for each seed separately: mean and 95 %
    interval over the seeds. A seed with fewer than FEWEST configurations, or with only equal values, has none. Values
    that agree to DIGITS digits are ties, so that rounding decides no rank."""
    measured = seeds.dropna(subset=[x, y]).groupby([*keys, "seed"], dropna=False)[[x, y]].mean().reset_index()
    for column in (x, y):
        measured[column] = measured[column].map(lambda number: float(f"{number:.{DIGITS}g}"))
    of_seed = [
        float(scipy.stats.spearmanr(rows[x], rows[y]).statistic)
        for _, rows in measured.groupby("seed")
        if len(rows) >= FEWEST and rows[x].nunique() > 1 and rows[y].nunique() > 1
    ]
    # (r + 1) / 2 is a share, whose logit is twice Fisher's z
    ends = interval95([(r + 1) / 2 for r in of_seed], "share")[:3] if of_seed else (math.nan,) * 3
    mean, low, high = (2 * end - 1 for end in ends)
    counts = {"num_seeds": len(of_seed), "num_configurations": measured.groupby(keys, dropna=False).ngroups}
    return {"rank_correlation": mean, "low95": low, "high95": high} | counts
