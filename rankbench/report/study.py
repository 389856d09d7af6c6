"""A study of chosen columns: one value of each run and seed from a report's tables, and the columns' rank correlation.

A column is named as `residual.effective_rank`; one of the final numbers as `test_accuracy`. Of a table with several
rows for each run and seed, those count that the user or BY_DEFAULT chooses.
"""

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd
import scipy

from rankbench.analyses import ANALYSES
from rankbench.config.keys import ConfigError, closest, unknown
from rankbench.config.schema import StudyKeys
from rankbench.plots import tick
from rankbench.runs.intervals import LEVEL, interval95
from rankbench.runs.tables import RUN_COLUMNS, booleans_as_words

OF_RUN = ["run", "seed"]
DIGITS = 9
FEWEST = 3  # configurations, or seeds, with which a rank correlation says anything
MEAN = "mean"  # condition on a column over which the rows are averaged
# Rows that count where the user chose none: of these columns the first of these values that there is
BY_DEFAULT = {
    "weights": ("trained",),
    "variant": ("full",),
    "view": ("all",),
    "of": ("states", "logits", "output"),
    "part": ("length",),
    "split": ("test",),
    "step": ("last",),
    "layer": ("last",),
    "sublayer": ("last",),
    "head": (MEAN,),
}


def check_words(chosen: StudyKeys, columns: dict[str, list[str]]) -> None:
    """Raise ConfigError for a table or a column that does not exist, and for conditions that are not understood.

    columns: those of each table, and those of the final numbers under an empty name. No table need be read for that.
    """
    if chosen.x == "seed":
        raise ConfigError("report.x=seed: seeds are averaged over; report.series=seed draws a line for each of them")
    if not chosen.value:
        if chosen.where:
            raise ConfigError(f"report.where={chosen.where}: chooses rows for report.value, which is empty")
        return
    for value in chosen.value:
        table = table_of(value, columns[""])
        if table not in columns:
            if table in ANALYSES:
                raise ConfigError(
                    f"report.value={value}: no run has a table {table}; measure one run with `rankbench analyze "
                    f"run=<folder> analysis=[{table}]`, or train with analysis=[{table}]"
                )
            raise ConfigError(f"report.value={value}: {unknown('table', table, filter(None, columns))}")
        if column_of(columns[table], value) not in columns[table]:
            raise ConfigError(_unknown_column(value, table, columns))
    known = list(dict.fromkeys(name for value in chosen.value for name in columns[table_of(value, columns[""])]))
    for column in conditions_of(chosen.where):
        if column not in known:
            raise ConfigError(
                f"report.where={chosen.where}: no column {column}{closest(column, known)} in the chosen tables"
            )


def _unknown_column(value: str, table: str, columns: dict[str, list[str]]) -> str:
    """The refusal of a column, with a similar one or, for a name without a table, with the tables that have it."""
    there = [name for name in columns[table] if name not in RUN_COLUMNS]
    named = [f"{table}.{name}" if table else name for name in there]
    elsewhere = [f"{other}.{value}" for other in columns if other and not table and value in columns[other]]
    if elsewhere:
        return f"report.value={value}: a column of a table; give it with its table, as in {' or '.join(elsewhere)}"
    return unknown("report.value", value, named)


def studied_columns(
    chosen: StudyKeys, tables: dict[str, pd.DataFrame], final: pd.DataFrame, keys: list[str]
) -> dict[str, pd.DataFrame]:
    """The rows of each column that the user chose; ConfigError if one does not exist or needs a narrower choice."""
    check_words(chosen, {name: list(map(str, table)) for name, table in ({"": final} | tables).items()})
    final = final[is_done(final)] if "status" in final else final
    sources = {value: tables[name] if (name := table_of(value, final)) else final for value in chosen.value}
    for value, source in sources.items():
        column = column_of(source, value)
        if column == "seed" or not pd.api.types.is_numeric_dtype(source[column]):
            of = "seeds, which are averaged over" if column == "seed" else "words"
            raise ConfigError(f"report.value={value}: a column of {of}; give one of numbers")
    if len(sources) > 1 and (axes := axes_of(chosen, keys, *sources.values())):
        raise ConfigError(
            f"report.value=[{','.join(sources)}]: compared run by run, and {axes[0]} has several rows for each run; "
            f"give one column, or choose one row, as in report.where={axes[0]}=last"
        )
    return {
        value: values_of(table, value, chosen.where, axes_of(chosen, keys, table)) for value, table in sources.items()
    }


def table_of(value: str, final: Iterable[str]) -> str:
    """The table that a value names: `residual` for residual.effective_rank; none for a column of the final numbers."""
    return "" if value in list(final) else value.rpartition(".")[0]


def column_of(columns: Iterable[str], value: str) -> str:
    """The column of a value: `effective_rank` for residual.effective_rank, or the whole name if a column has it."""
    return value if value in list(columns) else value.rpartition(".")[2]


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


def conditions_of(
    text: str | None, name: str = "report.where", noun: str = "column", example: str = "layer=last"
) -> dict[str, str]:
    """The conditions in `layer=last,variant=full`, by column. name, noun and example are for the refusal."""
    words = [word.strip().partition("=") for word in text.split(",")] if text else []
    for column, equals, value in words:
        if not (column and equals and value):
            raise ConfigError(f"{name}={text}: not understood; give {noun}=value,{noun}=value, as in {example}")
    conditions = {column: value for column, _, value in words}
    if len(conditions) < len(words):
        raise ConfigError(f"{name}={text}: names a {noun} twice; give each of them once")
    return conditions


def values_of(table: pd.DataFrame, value: str, where: str | None, axes: list[str]) -> pd.DataFrame:
    """The rows of a joined table that have a value and meet the conditions; one for each run, seed and point of the
    axes.

    A condition is a value; `first` or `last`: of numbers the smallest or largest of this run and seed, of words the
    first or last in the table's order; or `mean` over the column. Then the conditions of BY_DEFAULT apply to columns
    that are neither chosen nor axes, and in which the rows still differ; `attrs["by_default"]` has them as typed.
    Raises ConfigError if nothing is left, and if rows of one run and seed differ in more columns than the axes, because
    their mean would mix separate measurements.
    """
    column = column_of(table, value)
    if column in axes:
        raise ConfigError(f"report.value={value}: x, series or facet of its own figure; give another column there")
    rows = booleans_as_words(table.dropna(subset=[column]))
    if rows.empty:
        raise ConfigError(f"report.value={value}: no run has a value in this column")
    chosen = conditions_of(where)
    for name, wanted in chosen.items():
        if name in rows:
            kept = _narrowed(rows, name, wanted, column, axes, OF_RUN)
            if kept.empty:
                there = ", ".join(dict.fromkeys(map(tick, rows[name])))
                raise ConfigError(f"report.where={where}: {name}={wanted} leaves no row of {value}; there are {there}")
            rows = kept
    applied = {}
    for name, candidates in BY_DEFAULT.items():
        if name in chosen or name not in _differing(rows, [*OF_RUN, *axes], column):
            continue
        words = [word for word in candidates if word in ("last", MEAN) or word in set(rows[name])]
        if words:
            applied[name] = words[0]
            rows = _narrowed(rows, name, words[0], column, axes, [*OF_RUN, *axes])
    if differing := _differing(rows, [*OF_RUN, *axes], column):
        choices = ", ".join(f"{name} ({', '.join(map(tick, rows[name].unique()[:4]))})" for name in differing)
        raise ConfigError(
            f"report.value={value}: each run and seed has several rows, which differ in {choices}; "
            f"choose one of each, as in report.where={differing[0]}={tick(rows[differing[0]].iloc[-1])}, "
            f"or draw it, as in report.x={differing[-1]}"
        )
    rows.attrs["by_default"] = ", ".join(f"{name}={word}" for name, word in applied.items())
    return rows


def rows_that_count(chosen: StudyKeys, rows: pd.DataFrame) -> str:
    """The conditions that the rows of a column meet, chosen and by default, in words."""
    where, by_default = (chosen.where or "").replace(",", ", "), rows.attrs.get("by_default")
    return "; ".join(filter(None, (where, f"{by_default} (by default)" if by_default else "")))


def _narrowed(
    rows: pd.DataFrame, name: str, wanted: str, column: str, axes: list[str], within: list[str]
) -> pd.DataFrame:
    """The rows that meet a condition, or their means over a column. within: what `first` and `last` are of."""
    if wanted == MEAN and MEAN not in set(rows[name]):
        if name in (*OF_RUN, *axes, column):
            raise ConfigError(f"report.where={name}={MEAN}: values of {name} are drawn apart; leave this condition out")
        by = [*OF_RUN, *axes, *(other for other in _differing(rows, [*OF_RUN, *axes], column) if other != name)]
        means = rows.groupby(by, dropna=False)[column].transform("mean")
        return rows.assign(**{column: means}).drop_duplicates(by).drop(columns=name)
    is_number = pd.api.types.is_numeric_dtype(rows[name])
    if wanted in ("first", "last"):
        which = {"first": "min", "last": "max"}[wanted] if is_number else wanted
        return rows[rows[name] == rows.groupby(within, dropna=False)[name].transform(which)]
    return rows[rows[name] == (pd.to_numeric(wanted, errors="coerce") if is_number else wanted)]


def _differing(rows: pd.DataFrame, by: list[str], column: str) -> list[str]:
    """The columns that tell rows with the same values of `by` apart: a table's axes come before its measured values."""
    differing: list[str] = []
    for name in rows.columns[: rows.columns.get_loc(column)]:
        if not rows.duplicated([*by, *differing]).any():
            break
        if name not in by and rows.groupby([*by, *differing], dropna=False)[name].nunique(dropna=False).max() > 1:
            differing.append(name)
    return differing


def rank_correlations(seeds: pd.DataFrame, x: str, y: str, keys: list[str]) -> list[dict[str, Any]]:
    """Spearman's rank correlation of two columns: over the configurations or, of fewer than FEWEST configurations, over
    the seeds of each, with `over` and the `configuration`."""
    configurations = list(seeds.dropna(subset=[x, y]).groupby(keys, dropna=False, sort=False))
    if len(configurations) >= FEWEST:
        return [{"over": "configurations", "configuration": "", **rank_correlation(seeds, x, y, keys)}]
    names = [", ".join(f"{key}={tick(value)}" for key, value in zip(keys, of, strict=True)) for of, _ in configurations]
    return [
        {"over": "seeds", "configuration": name, **_correlation_over_seeds(rows, x, y)}
        for name, (_, rows) in zip(names, configurations, strict=True)
    ]


def _correlation_over_seeds(rows: pd.DataFrame, x: str, y: str) -> dict[str, float]:
    """Spearman's rank correlation over the seeds of one configuration, with the 95 % interval of Bonett and Wright
    (2000) on the scale of Fisher's z, whose variance is (1 + r^2 / 2) / (n - 3)."""
    of_seed = rows.groupby("seed")[[x, y]].mean()
    count, r, low, high = len(of_seed), _spearman(of_seed), math.nan, math.nan
    if count > 3 and abs(r) < 1:
        half = float(scipy.special.ndtri(1 - LEVEL)) * math.sqrt((1 + r**2 / 2) / (count - 3))
        low, high = (math.tanh(math.atanh(r) + side * half) for side in (-1, 1))
    return {"rank_correlation": r, "low95": low, "high95": high, "num_seeds": count, "num_configurations": 1}


def _spearman(columns: pd.DataFrame) -> float:
    """Spearman's rank correlation of two columns; nan for fewer than FEWEST rows, and for a column of equal values.
    Values that agree to DIGITS digits count as equal, so that rounding decides no rank."""
    columns = columns.map(lambda number: float(f"{number:.{DIGITS}g}"))
    if len(columns) < FEWEST or (columns.nunique() == 1).any():
        return math.nan
    return float(scipy.stats.spearmanr(columns).statistic)


def rank_correlation(seeds: pd.DataFrame, x: str, y: str, keys: list[str]) -> dict[str, float]:
    """Spearman's rank correlation of two columns over the configurations, for each seed separately: mean and 95 %
    interval over the seeds. A seed with fewer than FEWEST configurations, or with only equal values, has none."""
    measured = seeds.dropna(subset=[x, y]).groupby([*keys, "seed"], dropna=False)[[x, y]].mean().reset_index()
    by_seed = (_spearman(rows[[x, y]]) for _, rows in measured.groupby("seed"))
    of_seed = [r for r in by_seed if not math.isnan(r)]
    # (r + 1) / 2 is a share, whose logit is twice Fisher's z
    ends = interval95([(r + 1) / 2 for r in of_seed], "share")[:3] if of_seed else (math.nan,) * 3
    mean, low, high = (2 * end - 1 for end in ends)
    counts = {"num_seeds": len(of_seed), "num_configurations": measured.groupby(keys, dropna=False).ngroups}
    return {"rank_correlation": mean, "low95": low, "high95": high} | counts
