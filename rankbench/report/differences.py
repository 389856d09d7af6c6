"""Differences of a report's configurations from a baseline, paired over the seeds that both have, if there are any."""

import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from rankbench.config.keys import ConfigError, closest, listed
from rankbench.plots.sweep import column_in_words
from rankbench.report.jobs import short_keys
from rankbench.report.study import conditions_of
from rankbench.runs.intervals import LEVEL, holm, paired_difference, unpaired_difference

MOST_LINES = 12  # configurations whose differences are printed
BY_SEED, UNPAIRED = "by seed", "unpaired"
SIGNIFICANT = 2  # digits of an interval's half-width that are printed


def baseline_in(text: str | None, configurations: pd.DataFrame) -> dict[str, str]:
    """The values, by key, of the baseline that the user gave as `key=value,key=value` or as a value alone.

    configurations: a column for each varied key, in the order of the runs. None stands for the first configuration; of
    several tasks, whose numbers have other meanings, for the first of each. Raises ConfigError for keys and values that
    no configuration has.
    """
    words = configurations.map(_word)
    if text is None:
        return dict(words.drop(columns="task", errors="ignore").iloc[0]) if len(words) else {}
    name, keys = f"report.baseline={text}", list(words)
    if not keys:
        raise ConfigError(f"{name}: no key varies between these runs, so there is nothing to compare")
    example = f"{keys[0]}={words[keys[0]].iloc[0]}"
    if "=" not in text:
        value = _word(text)
        having = [key for key in keys if (words[key] == value).any()]
        if len(having) != 1:
            problem = f"a value of {' and of '.join(having)}" if having else "no value of a key that varies"
            near = closest(value, [other for key in keys for other in words[key]])
            raise ConfigError(f"{name}: {problem}{'' if having else near}; give key=value, as in {example}")
        return {having[0]: value}
    chosen = {key: _word(value) for key, value in conditions_of(text, "report.baseline", "key", example).items()}
    for key, value in chosen.items():
        if key not in keys:
            raise ConfigError(f"{name}: {key} does not vary between these runs{closest(key, keys)}; {listed(keys)} do")
        values = list(dict.fromkeys(words[key]))
        if value not in values:
            raise ConfigError(f"{name}: no run has {key}={value}{closest(value, values)}; there are {listed(values)}")
    if not (words[list(chosen)] == pd.Series(chosen)).all(axis=1).any():
        raise ConfigError(f"{name}: no run has all of these values; give those of one run, as in {example}")
    return chosen


def differences(done: pd.DataFrame, keys: list[str], columns: Iterable[str], baseline: dict[str, str]) -> pd.DataFrame:
    """A row for each configuration and column of numbers: the configuration's mean minus that of its baseline.

    done: a row for each run and seed. The baseline of a configuration has the values in `baseline`, and the
    configuration's own values of all other keys; a configuration without a baseline has no row.

    Columns: the keys, baseline, column, pairing (by seed, or unpaired for configurations that share no seeds),
    num_seeds and num_baseline_seeds that count, mean and baseline_mean over these seeds, difference with low95 and
    high95 (nan for one seed), p_value (two-sided, of Student's test of the pairs or of Welch's test), and p_holm,
    adjusted for all rows of the table.
    """
    named = done.assign(**done[keys].map(_word))
    typed = ",".join(f"{key}={value}" for key, value in baseline.items())
    rows: list[dict[str, Any]] = []
    for column in columns:
        by_seed = named.dropna(subset=[column]).groupby([*keys, "seed"], sort=False)[column].mean()
        groups = by_seed.groupby([by_seed.index.get_level_values(key) for key in keys], sort=False)  # always tuples
        measured = {of: values.droplevel(keys) for of, values in groups}
        for configuration, values in measured.items():
            own = dict(zip(keys, configuration, strict=True))
            other = tuple((own | baseline).values())
            if other != configuration and other in measured:
                row = own | {"baseline": typed, "column": column}
                rows.append(row | _compared(values, measured[other]))
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(list(table.p_value))) if rows else table


def _compared(values: pd.Series, baseline: pd.Series) -> dict[str, Any]:
    """The numbers of one configuration, by seed, against those of its baseline.

    If they share a single seed and both have others, all seeds count, unpaired: one pair has no interval.
    """
    shared = values.index.intersection(baseline.index)
    is_paired = len(shared) > 1 or len(shared) == min(len(values), len(baseline)) == 1
    if is_paired:
        values, baseline = values[shared], baseline[shared]
    interval, p = (paired_difference if is_paired else unpaired_difference)(values, baseline)
    row: dict[str, Any] = {"pairing": BY_SEED if is_paired else UNPAIRED, "num_seeds": len(values)}
    row |= {"num_baseline_seeds": len(baseline), "mean": values.mean(), "baseline_mean": baseline.mean()}
    return row | {"difference": interval.mean, "low95": interval.low, "high95": interval.high, "p_value": p}


def sentences(table: pd.DataFrame, keys: list[str], baseline: dict[str, str]) -> list[str]:
    """One sentence for each configuration: `qk_norm against dot: test loss -0.45 [-0.52, -0.38]; ...`.

    A difference counts as shown if p is below the level after Holm's method; of the others the bound is given.
    """
    if table.empty:
        return []
    other = _briefly(baseline, keys)
    other = other if len(baseline) == len(keys) else f"the same with {other}"
    lines = []
    for values, rows in table.groupby(keys, sort=False):
        own = _briefly(dict(zip(keys, map(str, values), strict=True)), keys)
        parts = [f"{column_in_words(row.column)} {_in_short(row)}" for row in rows.itertuples()]
        lines.append(f"{own} against {other}{_about_seeds(rows)}: {'; '.join(parts)}")
    return lines


def printed(lines: list[str]) -> list[str]:
    """The sentences for a terminal: the first MOST_LINES of them, and how many more there are."""
    more = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"... and {more} more in differences.csv"] if more > 0 else [])


def _in_short(row: Any) -> str:
    """A difference with its interval to SIGNIFICANT digits; a bound, rounded up, if no difference is shown."""
    if math.isnan(row.low95):
        return f"{row.difference:+.3g}"
    if not row.p_holm < 2 * LEVEL:
        bound = max(abs(row.low95), abs(row.high95))
        if bound == 0:
            return "no difference"
        unit = 10.0 ** (math.floor(math.log10(bound)) - SIGNIFICANT + 1)
        return f"no difference shown (|d| < {math.ceil(bound / unit) * unit:.{SIGNIFICANT}g})"
    half, numbers = (row.high95 - row.low95) / 2, (row.difference, row.low95, row.high95)
    digits = SIGNIFICANT - 1 - math.floor(math.log10(half)) if half > 0 else math.inf
    how = f"+.{max(0, digits)}f" if digits <= 6 else "+.4g"
    mean, low, high = (f"{number:{how}}" for number in numbers)
    return f"{mean} [{low}, {high}]"


def _about_seeds(rows: pd.DataFrame) -> str:
    if (rows.pairing == UNPAIRED).any():
        return " (no pairs of seeds, so unpaired)"
    return " (one shared seed, so no interval)" if rows.num_seeds.max() == 1 else ""


def _briefly(values: dict[str, str], keys: list[str]) -> str:
    """A configuration in a sentence: keys without their group, or the value alone if the only key has a word."""
    text = values[keys[0]] if len(keys) == 1 else ""
    if text not in ("", "true", "false", "null", "none") and not _is_number(text):
        return text
    names = short_keys(keys)
    return ", ".join(f"{names[key]}={value}" for key, value in values.items())


def _word(value: Any) -> str:
    """A key's value as a word, the same whether it comes from a config or was read from a table."""
    text = "none" if value == "" or pd.isna(value) else str(value)
    return f"{float(text):.12g}" if _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
