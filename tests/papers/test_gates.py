"""The claims on gates: each holds on a table that supports it, and fails in its control and on one that refutes it."""

import pandas as pd
import pytest
from judged import assert_holds_and_fails

from rankbench.judging import CLAIMS

GATES = {name: claim for name, claim in CLAIMS.items() if name.startswith("qiu_")}


def heads(sink=0.8, gated=0.3, gated_rank=6.0):
    """Tables of the analyses attention and head_rank in one, of two heads, of which the second has the sink. Before
    training the first token has a weight of .2 and W_V W_O a rank of 8; the rank of W_Q W_K must not count."""
    rows = [
        {"seed": seed, "weights": weights, "layer": 1, "head": head, "model.attention": attention, "matrix": matrix}
        | {"of": "head", "first_weight": first, "effective_rank": (rank_of_kind if matrix == "vo" else 77.0)}
        for seed in range(5)
        for attention, trained, trained_rank in (("dot", sink, 2.0), ("gated", gated, gated_rank))
        for weights in ("trained", "initialised")
        for head in (1, 2)
        for matrix in ("qk", "vo")
        for first in [0.2 if (weights, head) != ("trained", 2) else trained * (1 + 0.01 * seed)]
        for rank_of_kind in [trained_rank * (1 + 0.01 * seed) if weights == "trained" else 8.0]
    ]
    return pd.DataFrame(rows)


# name: (the number measured on heads(), a table that refutes the claim)
TABLES = {
    "qiu_gate_lowers_sink": (0.5, heads(gated=0.8)),
    "qiu_gate_raises_rank": (3.0, heads(gated_rank=2.0)),
    "qiu_sink_without_gate": (4.08, heads(sink=0.3)),
}


@pytest.mark.parametrize("name", GATES)
def test_claims_hold_and_fail(name):
    measured, refuting = TABLES[name]
    assert_holds_and_fails(name, heads(), [refuting], measured, rel=0.02)  # spread of the seeds
