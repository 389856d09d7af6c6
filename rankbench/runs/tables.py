"""Tidy CSV tables: columns run, task, model and seed, then the axes, then a column for each measured value."""

import io
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rankbench.config.arguments import typed_arguments
from rankbench.config.keys import ConfigError
from rankbench.runs.files import LARGEST_TABLE, bounded, write_text
from rankbench.runs.intervals import ends95, half_width, interval95

RUN = {  # the columns that every table begins with, and what they mean
    "run": "Name of the run's folder; `fresh` for untrained networks; else the network as it was named.",
    "task": "Name of the task, or of the inputs.",
    "model": "Name of the model.",
    "seed": "Seed of weights, data and all other draws.",
}
RUN_COLUMNS = list(RUN)
NAMES = dict.fromkeys(("run", "task", "model", "architecture"), str)  # words, also where they look like numbers
POSITIVE = {"loss", "bits", "seconds", "residual", "rank", "norm"}  # last words of columns of numbers above 0
AGAIN = "put back the file that was there, or make it again"  # by analyze, or by training in another folder
# Columns of which by_layer keeps one choice, and the one that it prefers; None: the first.
CHOICES = {"weights": "trained", "variant": "full", "view": "all", "special_tokens": None, "dtype": None}
# pandas reads every digit of a float since 3.1, where the option is deprecated
EXACT: dict[str, Any] = (
    {} if tuple(map(int, pd.__version__.split(".")[:2])) >= (3, 1) else {"float_precision": "round_trip"}
)
MEANINGS: dict[str, Mapping[str, str]] = {}  # of the other columns of each table; whoever writes a table adds them


def column_help(name: str, table: pd.DataFrame) -> dict[str, str]:
    """What each column of a table means; without those that are not described, such as a sweep's keys."""
    described = {**RUN, **MEANINGS.get(name, {})}
    known = {column: column if column in described else family(str(column)) for column in table}
    return {column: described[known[column]] for column in table if known[column] in described}


def family(column: str) -> str:
    """The name under which columns of a kind are described once: sigma_<k> for sigma_3, <column>_sd for residual_sd."""
    return re.sub(r"\d+$", "<k>", re.sub(r".+_sd$", "<column>_sd", column))


def with_who(table: pd.DataFrame, **who: str | int) -> pd.DataFrame:
    """Put the columns of RUN_COLUMNS in front of the table, each filled with one value."""
    front = pd.DataFrame({name: [who[name]] * len(table) for name in RUN_COLUMNS}, index=table.index)
    return pd.concat([front, table], axis=1)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write atomically, with all the digits that a float64 needs to be read back unchanged. A column with an integer of
    more than 64 bits, such as a number of paths, is written as floats; inf beyond their range."""
    floats = {name: table[name].map(as_float) for name in table if _has_huge(table[name])}
    write_text(path, table.assign(**floats).to_csv(index=False, lineterminator="\n"))


def as_float(value: Any) -> float:
    """The nearest float: nan for no value, inf for an integer beyond all floats."""
    return math.nan if pd.isna(value) else float(str(value))


def _has_huge(column: pd.Series) -> bool:
    is_object = pd.api.types.is_object_dtype(column)
    return is_object and any(isinstance(value, int) and abs(value) > sys.maxsize for value in column)


def read_table(path: Path, grows: bool = False) -> pd.DataFrame:
    """Read a table as it was written; `none` stays a word. grows: the table is written line by line, so a kill may have
    cut its last line, which is dropped. ConfigError for a file that is not a table, or ends within a row."""
    lines = bounded(path, LARGEST_TABLE).read_bytes()
    if grows:
        lines = lines[: lines.rfind(b"\n") + 1]
    elif lines and not lines.endswith(b"\n"):
        raise ConfigError(f"{path}: ends in the middle of a row; {AGAIN}, or continue its training")
    try:
        options = {"keep_default_na": False, "na_values": ["", "nan", "NaN"], "dtype": NAMES} | EXACT
        table = pd.read_csv(io.BytesIO(lines), **options)
        for name in filter(lambda name: _has_huge(table[name]), table):
            raise ConfigError(f"{path}: {name} has an integer that is too large; {AGAIN}")
        return table
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path}: not readable as a table ({reason}); {AGAIN}") from None


def booleans_as_words(table: pd.DataFrame) -> pd.DataFrame:
    """Replace the booleans that pandas reads from a CSV file by the words `true` and `false`, as users write them."""

    def word(value: Any) -> Any:
        return str(value).lower() if isinstance(value, bool | np.bool_) else value

    mixed = [name for name in table if table[name].dtype == object or pd.api.types.is_bool_dtype(table[name])]
    return table.assign(**{name: table[name].astype(object).map(word) for name in mixed})


def mean_and_spread(table: pd.DataFrame, axes: list[str], value: str, *, geometric: bool = False) -> pd.DataFrame:
    """`value` by `axes`: mean over everything within a seed, then mean over the seeds, with its 95 % interval.

    Columns: the axes, mean, low, high, num_seeds, of_seed. low and high are the ends of `interval95` on the scale of
    the column (nan for one seed); of_seed is a dict of the values by seed.
    geometric: average logarithms, for values that span orders of magnitude; zeros then count as the smallest float64,
    and high can be inf.
    """
    by_seed = table.groupby([*axes, "seed"], sort=True, dropna=False)[value].mean().unstack("seed")
    # with numpy, because pandas takes twice as long for the few rows of a figure's line
    values = by_seed.to_numpy(dtype=float)
    if geometric:
        values = np.maximum(values, np.finfo(float).tiny)
    of_seed = [
        {seed: mean for seed, mean in zip(by_seed.columns, means, strict=True) if not math.isnan(mean)}
        for means in values.tolist()
    ]
    if geometric:
        values = np.log(values)
    num_seeds = (~np.isnan(values)).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # nothing measured, or one seed
        mean = np.nansum(values, axis=1) / num_seeds
        sd = np.sqrt(np.nansum((values - mean[:, None]) ** 2, axis=1) / (num_seeds - 1))
        half = half_width(sd, num_seeds)
    low, high = ends95(mean, half, "real" if geometric else scale_of(value))
    ends = {"mean": mean, "low": low, "high": high}
    if geometric:
        with np.errstate(over="ignore"):  # the interval of two seeds that lie far apart can overflow to inf
            ends = {name: np.exp(end) for name, end in ends.items()}
    summary = pd.DataFrame({**ends, "num_seeds": num_seeds, "of_seed": of_seed}, index=by_seed.index)
    return summary.reset_index()


def scale_of(column: str) -> str:
    """The scale of `interval95` for a column, by the last word of its name."""
    if column.endswith("accuracy"):
        return "share"
    return "positive" if column.rpartition("_")[2] in POSITIVE and "log10" not in column else "real"


def over_seeds(table: pd.DataFrame, axes: list[str], value: str, scale: str | None = None) -> pd.DataFrame:
    """`value` by `axes`: mean over everything within a seed, then over the seeds; rows without a value do not count.

    Columns: the axes, mean, low95 and high95 (ends of `interval95`), smallest, largest (of a seed), num_seeds.
    """
    measured = table.dropna(subset=[value])
    per_seed = measured.groupby([*axes, "seed"], sort=True, dropna=False)[value].mean().reset_index()
    by_axes = per_seed.groupby(axes, sort=True, dropna=False)[value]
    ends = {
        "low95": lambda values: interval95(values, scale or scale_of(value)).low,
        "high95": lambda values: interval95(values, scale or scale_of(value)).high,
    }
    return by_axes.agg(mean="mean", **ends, smallest="min", largest="max", num_seeds="count").reset_index()


def fall_in_last_quarter(losses: pd.Series) -> float:
    """Fall of a loss, indexed by training step, over the last quarter of the steps; negative if it rose.

    The loss at the start of the quarter is interpolated between the evaluations.
    """
    losses = losses.dropna().sort_index()
    last = losses.index[-1]
    return float(np.interp(0.75 * last, losses.index, losses) - losses[last])


def last_of_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the state that leaves each layer (layer 0: the embedding), from a table by layer and sublayer."""
    states = table[table.sublayer != "weights"]
    # the row of a layer's MLP, if it has one, follows that of its attention
    before_mlp = (states.sublayer == "attention") & (states.sublayer.shift(-1) == "mlp")
    return states[~before_mlp]


@typed_arguments()
def by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table that a first look needs: one for each run, seed and layer.

        rankbench.by_layer(tables["residual"]).groupby("layer").relative_residual.mean()

    Of trained and initialised weights the trained ones count; of the variants the full network; of other columns with
    several choices (special_tokens, dtype) the first. A state is that which leaves the layer, after its last sub-layer,
    and columns of heads are means over them. ConfigError for a table without layers.
    """
    if "layer" not in table:
        raise ConfigError(f"by_layer: a table without a column layer; it has {', '.join(map(str, table.columns))}")
    if not table.columns.is_unique:
        raise ConfigError(
            f"by_layer: a table with two columns {table.columns[table.columns.duplicated()][0]}; drop one"
        )
    rows = table
    for column, preferred in CHOICES.items():
        if column in rows and len(rows):
            rows = rows[rows[column] == (preferred if preferred in set(rows[column]) else rows[column].iloc[0])]
    named = (*RUN_COLUMNS, *table.attrs.get("varied", ()), *CHOICES, "layer")
    axes = [name for name in dict.fromkeys(named) if name in rows]
    if "head" in rows:
        heads = rows["head"].notna()
        states = rows[~heads].groupby(axes, dropna=False).tail(1).set_index(axes)
        rows = states.combine_first(rows[heads].groupby(axes, dropna=False).mean(numeric_only=True)).reset_index()
    else:
        rows = rows.groupby(axes, dropna=False).tail(1)
    left = [name for name in table if name in axes or (name != "head" and rows[name].notna().any())]
    rows = rows[left].sort_values(axes, ignore_index=True)
    rows.attrs = dict(table.attrs)
    return rows


def thinned(wide: pd.DataFrame, most: int = 13) -> pd.DataFrame:
    """Evenly spaced columns of a wide table, including the first and the last: as many as fit on a terminal."""
    chosen = np.unique(np.linspace(0, wide.shape[1] - 1, min(most, wide.shape[1])).round().astype(int))
    return wide.iloc[:, chosen]


def markdown(table: pd.DataFrame) -> str:
    """The table as GitHub's Markdown."""
    marks = str.maketrans({"\\": "\\\\", "|": "\\|", "<": "&lt;", ">": "&gt;", "\n": " ", "\r": " "})
    lines = [[str(name) for name in table.columns], ["---"] * table.shape[1], *_cells(table)]
    return "".join("| " + " | ".join(cell.translate(marks) for cell in line) + " |\n" for line in lines)


def latex(table: pd.DataFrame) -> str:
    """The table as a LaTeX tabular with booktabs' rules; numbers are right-aligned."""
    marks: dict[str, str | int | None] = {letter: f"\\{letter}" for letter in "&%$#_{}"}
    marks |= {"\n": " ", "\r": " "}
    marks |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    marks |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
    sides = "".join("r" if pd.api.types.is_numeric_dtype(table[name]) else "l" for name in table.columns)
    names, *rows = (
        [cell if isinstance(cell, Formula) else cell.translate(str.maketrans(marks)) for cell in cells]
        for cells in ([str(name) for name in table.columns], *_cells(table))
    )
    return "% \\usepackage{booktabs}\n" + pd.DataFrame(rows, columns=names).to_latex(index=False, column_format=sides)


class Formula(str):
    """Text that is LaTeX already."""


def with_errors(mean: float, low: float, high: float) -> Formula:
    """A mean with the ends of its interval as errors, to two digits of the smaller one; without errors that are 0,
    unknown, or below a millionth of the mean."""
    below, above = abs(mean - low), abs(high - mean)
    if not min(below, above) > 1e-6 * abs(mean):
        return Formula("" if math.isnan(mean) else f"${short(mean)}$")
    power = 0 if 1e-3 <= (abs(mean) or above) < 1e5 else math.floor(math.log10(abs(mean) or above))
    digits = max(0, 1 - math.floor(math.log10(min(below, above))) + power)
    number, minus, plus = (f"{value / 10**power:.{digits}f}" for value in (mean, below, above))
    text = rf"{number} \pm {plus}" if minus == plus else f"{number}_{{-{minus}}}^{{+{plus}}}"
    return Formula(rf"$({text}) \times 10^{{{power}}}$" if power else f"${text}$")


def short(value: Any) -> str:
    """A value as text for a reader: a number with four digits, an empty text if there is no value."""
    if value is None or (isinstance(value, float | np.floating) and np.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def mean_of_seeds(number: int, mean: str = "mean") -> str:
    """What a printed number averages, in words. mean: its kind, such as "geometric mean"."""
    return "one seed" if number == 1 else f"{mean} of {number} seeds"


def _cells(table: pd.DataFrame) -> list[list[str]]:
    return [
        [value if isinstance(value, Formula) else short(value) for value in row]
        for row in table.itertuples(index=False, name=None)
    ]
