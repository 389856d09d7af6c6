"""Selections of rows of the table `head_rank`: of one seed, or of all seeds."""

import pandas as pd


def trained_errors(rows: pd.DataFrame, evaluation: str = "soft") -> pd.DataFrame:
    """Rows of the trained networks' errors."""
    return rows[(rows.of == "network") & (rows.weights == "trained") & (rows.evaluation == evaluation)]


def initial_for_trained(rows: pd.DataFrame, of: str) -> pd.DataFrame:
    """Put the initial weights of the networks (of=network), or of their heads, in place of the trained ones."""
    chosen = rows.of == of
    initial = rows[chosen & (rows.weights == "initialised")].assign(weights="trained")
    return pd.concat([rows[~chosen], initial])
