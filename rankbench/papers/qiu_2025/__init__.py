"""Claims of Qiu et al. 2025: with a gate behind each head the first token is no sink."""

from functools import partial

import pandas as pd

from rankbench.judging.claim import BEFORE_TRAINING, Claim, above, below
from rankbench.judging.sweeps import rows_at

PAPERS = {
    "Qiu et al. 2025": "Gated attention for large language models: Non-linearity, sparsity, and attention-sink-free"
}
KEY = "model.attention"
QIU = "Qiu et al. 2025, Gated attention for large language models"


def _of_heads(rows: pd.DataFrame, attention: str, column: str, weights: str = "trained") -> pd.Series:
    """A number of each head with this kind of attention. Of the table `head_rank`: of W_V W_O."""
    of_kind = rows_at(rows, KEY, attention)
    of_maps = of_kind.matrix == "vo" if "matrix" in of_kind else True
    return of_kind[(of_kind.weights == weights) & of_maps][column]


def _with_gate_over_without(rows: pd.DataFrame, column: str) -> float:
    return _of_heads(rows, "gated", column).mean() / _of_heads(rows, "dot", column).mean()


def _sink(rows: pd.DataFrame) -> float:
    before = _of_heads(rows, "dot", "first_weight", weights="initialised").mean()
    return _of_heads(rows, "dot", "first_weight").max() / before


_of_sweep = partial(Claim, along=KEY, why_untrained=None, scale="positive", control=BEFORE_TRAINING)

CLAIMS: dict[str, Claim] = {
    "qiu_gate_lowers_sink": _of_sweep(
        statement="With a gate behind each head the first token gets less attention: its mean weight over heads and "
        "queries falls by more than a tenth (with the gate over without; threshold: ours).",
        source=QIU,
        table="attention",
        measure=lambda rows: _with_gate_over_without(rows, "first_weight"),
        claimed=below(0.9),
    ),
    "qiu_gate_raises_rank": _of_sweep(
        statement="Without a gate W_V W_O is of lower rank: with one its effective rank, mean over heads, is larger by "
        "more than a tenth (with the gate over without; threshold: ours).",
        source=f"{QIU}, on the low rank of W_V W_O; that training with a gate raises it is our conjecture",
        table="head_rank",
        measure=lambda rows: _with_gate_over_without(rows, "effective_rank"),
        claimed=above(1.1),
    ),
    "qiu_sink_without_gate": _of_sweep(
        statement="Without a gate there is a sink to lose: one head gives the first token more than twice the weight "
        "that it has before training (ratio; threshold: ours).",
        source=f"{QIU}; the sink is that of Guo et al. 2024, Active-dormant attention heads",
        table="attention",
        measure=_sink,
        claimed=above(2.0),
        is_check=True,
    ),
}
