"""Claims of Kim et al. 2021, The Lipschitz constant of self-attention, on language models of characters.

They compare variants, so they are judged on all jobs of a sweep together, at the numbers of layers that both have. The
paper prints the best test loss of all steps; ours is read at the best validation step.
"""

from collections.abc import Callable

import pandas as pd

from rankbench.claims.claim import Claim

DOT, L2, TIED = "causal", "causal_l2", "causal_l2_tied"
CONTRACTIVE, MATCHED, LSTM = "causal_contractive_l2", "causal_l2_matched", "lstm"
LITTLE = 0.02  # nats: "hardly any loss", taken as a fifth of what tying costs at one layer in Table 2
SLOWER = 1.05  # "the differences are rather small", taken as five in a hundred
DEEP = 10  # layers beyond which dot products are said to fail at a fixed rate
FAILS = 0.1  # nats: five times what separates the variants at ten layers

# Measures: one seed's rows of all jobs (of times: one step's) -> a number, nan where a variant is missing


def _by_layers(rows: pd.DataFrame, variant: str, value: str = "test_loss") -> pd.Series:
    return rows[rows.variant == variant].groupby("layers")[value].mean()


def _gap(variant: str, base: str) -> Callable[[pd.DataFrame], float]:
    """Loss of a variant less that of another, mean over the numbers of layers that both have."""
    return lambda rows: (_by_layers(rows, variant) - _by_layers(rows, base)).mean()


def _slowdown(variant: str) -> Callable[[pd.DataFrame], float]:
    """Training time per token over that of dot products, mean over the numbers of layers that both have."""

    def ratio(rows: pd.DataFrame) -> float:
        times = (_by_layers(rows, name, "microseconds_per_token") for name in (variant, DOT))
        return next(times).div(next(times)).mean()

    return ratio


def _best_below_lstm(rows: pd.DataFrame) -> float:
    return _by_layers(rows, DOT).min() - _by_layers(rows, LSTM).min()


def _lstm(rows: pd.DataFrame) -> float:
    return _by_layers(rows, LSTM).min()


def _deepest_less_shallowest(rows: pd.DataFrame) -> float:
    by_layers = _by_layers(rows, CONTRACTIVE)
    return by_layers.iloc[-1] - by_layers.iloc[0] if len(by_layers) > 1 else float("nan")


def _beyond_deep(rows: pd.DataFrame) -> float:
    gaps = (_by_layers(rows, DOT) - _by_layers(rows, TIED)).dropna()
    return gaps[gaps.index > DEEP].mean()


def _claim(
    statement: str,
    source: str,
    measure: Callable[[pd.DataFrame], float],
    side: int,
    line: float,
    published: float | None,
    repeats: str = "seed",
) -> Claim:
    judged = (statement, f"Kim et al. 2021, {source}", "curves", measure, side, line)
    return Claim(*judged, across=True, learned=None, published=published, repeats=repeats)


KIM_CHARLM: dict[str, Claim] = {
    "kim_l2_loses_little": _claim(
        "L2 attention in place of dot products loses hardly anything (nats per character more, below .02).",
        *("Fig. 4, Table 2", _gap(L2, DOT), -1, LITTLE, -0.0046),
    ),
    "kim_tying_loses": _claim(
        "Tying queries and keys costs a little (nats per character more than free L2).",
        *("Fig. 4, Table 2", _gap(TIED, L2), +1, 0.0, 0.0686),
    ),
    "kim_contraction_loses": _claim(
        "Dividing by the Lipschitz bound costs noticeably (nats per character more than tied L2, above .02).",
        *("Fig. 4, Table 2", _gap(CONTRACTIVE, TIED), +1, LITTLE, 0.288),
    ),
    "kim_contraction_gains_from_depth": _claim(
        "Contractive L2 makes up for it with more layers (nats per character, most layers less fewest).",
        *("Fig. 4, Table 2", _deepest_less_shallowest, -1, 0.0, 1.005 - 1.558),
    ),
    "kim_lstm": _claim(
        "The best LSTM reaches about one nat per character (below 1.05).",
        *("Fig. 4", _lstm, -1, 1.05, 1.0),
    ),
    "kim_transformer_beats_lstm": _claim(
        "The best Transformer does slightly better than the LSTM (nats per character more).",
        *("Fig. 4, Table 2", _best_below_lstm, -1, 0.0, 0.940 - 1.0),
    ),
    "kim_l2_as_fast": _claim(
        "L2 attention trains as fast as dot products (time per token, ratio below 1.05).",
        *("Table 1", _slowdown(L2), -1, SLOWER, 1.003, "step"),
    ),
    "kim_tied_as_fast": _claim(
        "Tied L2 attention trains as fast as dot products (time per token, ratio below 1.05).",
        *("Table 1", _slowdown(TIED), -1, SLOWER, 1.017, "step"),
    ),
    "kim_contractive_as_fast": _claim(
        "Contractive L2 attention trains as fast as dot products (time per token, ratio below 1.05).",
        *("Table 1", _slowdown(CONTRACTIVE), -1, SLOWER, 1.077, "step"),
    ),
    "kim_dot_fails_deep": _claim(
        "At a fixed rate dot products fail to train beyond 10 layers, tied L2 does not (nats more, above .1).",
        *("Table 3, Fig. 11", _beyond_deep, +1, FAILS, None),
    ),
    "kim_tying_not_parameters": _claim(
        "As many parameters do not make up for tying (nats per character more than free L2).",
        *("Fig. 9", _gap(MATCHED, L2), +1, 0.0, None),
    ),
    "kim_matched_as_tied": _claim(
        "With as many parameters as free L2, tied L2 does not get better (nats per character less, below .02).",
        *("Fig. 9", _gap(TIED, MATCHED), -1, LITTLE, None),
    ),
}
