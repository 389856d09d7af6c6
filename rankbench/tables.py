"""Tidy CSV tables: who (run, task, model, seed), then the axes, then one measured value a column."""

from pathlib import Path

import numpy as np
import pandas as pd

from rankbench.files import write_text

WHO = ["run", "task", "model", "seed"]


def with_who(table: pd.DataFrame, **who: str | int) -> pd.DataFrame:
    """The table with the columns of WHO in front, each filled with one value."""
    front = pd.DataFrame({name: [who[name]] * len(table) for name in WHO}, index=table.index)
    return pd.concat([front, table], axis=1)


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write atomically; numbers with all the digits that a float64 needs to come back the same."""
    write_text(path, table.to_csv(index=False, lineterminator="\n"))


def read_table(path: Path) -> pd.DataFrame:
    """A table as it was written; `none` stays a word."""
    return pd.read_csv(path, keep_default_na=False, na_values=["", "nan", "NaN"])


def mean_and_spread(table: pd.DataFrame, axes: list[str], value: str, *, geometric: bool = False) -> pd.DataFrame:
    """`value` by `axes`: mean over everything within a seed, then mean and sample standard deviation over the seeds.

    Columns: the axes, mean, low, high, num_seeds; low and high are one standard deviation away (nan for one seed).
    geometric: of the logarithms, for values that span orders of magnitude; zeros then count as the smallest float64.
    """
    per_seed = table.groupby([*axes, "seed"], sort=True, dropna=False)[value].mean().reset_index()
    if geometric:
        per_seed[value] = np.log(per_seed[value].clip(lower=np.finfo(float).tiny))
    summary = per_seed.groupby(axes, sort=True, dropna=False)[value].agg(mean="mean", sd="std", num_seeds="count")
    summary["low"], summary["high"] = summary["mean"] - summary["sd"], summary["mean"] + summary["sd"]
    if geometric:
        summary[["mean", "low", "high"]] = np.exp(summary[["mean", "low", "high"]])
    return summary.reset_index()[[*axes, "mean", "low", "high", "num_seeds"]]


def last_of_layer(table: pd.DataFrame) -> pd.DataFrame:
    """Of a table by layer and sublayer, the rows of the state that leaves each layer (layer 0: the embedding)."""
    states = table[table.sublayer != "weights"]
    # a layer's MLP, where it has one, stands right behind its attention
    goes_on = (states.sublayer == "attention") & (states.sublayer.shift(-1) == "mlp")
    return states[~goes_on]
