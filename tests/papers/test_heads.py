"""The claims on heads: each holds on a table that supports it, and fails in its control and on one that refutes it."""

import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided

from rankbench.judging import CLAIMS

OTHERS = {"knob_exclusive", "qiu_gate_lowers_sink", "qiu_sink_without_gate"}  # test_knob_claims, test_gates
HEADS = {name: claim for name, claim in CLAIMS.items() if claim.table == "attention" and name not in OTHERS}


def heads(entropy=1.0, bound=0.1, over=3.0, shuffled=1.1, scores=None):
    """A table of the analysis attention, of two heads; scores: the bound on scores by model.weight_norm."""
    rows = [
        {"seed": seed, "weights": weights, "layer": 1, "head": head, "model.weight_norm": weight_norm}
        | {"entropy_nats": entropy, "least_entropy_nats": 0.5, "entropy_bound_nats": bound / (1 + head)}
        | {
            "singular_over_law": of_weights * over * 2 / 3 * head * (1 + 0.01 * seed),
            "shuffled_over_law": shuffled * (1 + 0.01 * seed),
        }
        | {"score_norm_bound": size**of_weights * head * (1 + 0.01 * seed if weight_norm == "sigma" else 1)}
        for seed in range(5)
        for weights, of_weights in (("trained", 1.0), ("initialised", 0.1))
        for head in (1, 2)
        for weight_norm, size in (scores or {"none": 100.0, "sigma": 10.0}).items()
    ]
    return pd.DataFrame(rows)


# name: (the number measured on heads(), a table that refutes the claim)
TABLES = {
    "zhai_heads_above_bound": (0.45, heads(bound=1.5)),
    "zhai_reparam_lowers_scores": (0.991, heads(scores={"none": 5.0, "sigma": 10.0})),
    "law_gap_of_heads": (3.06, heads(over=1.2)),
}


@pytest.mark.parametrize("name", HEADS)
def test_claims_hold_and_fail(name):
    measured, refuting = TABLES[name]
    assert_holds_and_fails(name, heads(), [refuting], measured, rel=1e-3)


def test_heads_like_shuffled_ones_give_no_verdict():
    """The control does not fail where shuffled weights are as far from the law."""
    assert_undecided("law_gap_of_heads", heads(shuffled=2.9), "control did not fail")
