"""The claims on the streams of trained networks: on tables that support them, in their controls, and refuted."""

import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided

from rankbench.judging import judge

KEY = "model.hyper_connections"


def streams(distances=(0.3, 0.5), apart=0.02, free_apart=0.4):
    """A table of the analysis residual of two sub-layers: their distances to the identity, and the residual of the
    streams behind the first one, which is twice that behind the second. Other rows must not count."""
    rows = []
    for kind, largest in (("free", free_apart), ("doubly_stochastic", apart)):
        for seed in range(5):
            who = {"seed": seed, KEY: kind, "variant": "full", "weights": "trained", "layer": 1}
            for number, (sublayer, distance) in enumerate(zip(("attention", "mlp"), distances, strict=True)):
                of_mixing = {
                    "mixing_from_identity": distance,
                    "mixing_from_mean": (0.8 + 0.4 * number) * (1 + 0.001 * seed),
                }
                residual = largest * (1 + 0.01 * seed) / (1 + number)
                row = who | of_mixing | {"sublayer": sublayer, "mixing_gain": 1.0, "stream_residual": residual}
                rows += [row, row | {"variant": "no_mlp", "mixing_from_identity": 9.0, "stream_residual": 0.9}]
                rows.append(row | {"weights": "initialised", "mixing_from_identity": 9.0, "stream_residual": 0.9})
            rows.append(who | {"sublayer": "weights"})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("name", "measured", "refuting"),
    [
        ("xie_mixing_near_identity", 0.4, streams(distances=(0.9, 1.5))),
        ("xie_streams_become_one", 0.02, streams(apart=0.2, free_apart=0.2)),
    ],
)
def test_claims_hold_and_fail(name, measured, refuting):
    assert_holds_and_fails(name, streams(), [refuting], measured, rel=0.03)  # spread of the seeds


def test_each_kind_of_mixing_is_judged_for_itself_and_streams_that_are_always_one_prove_nothing():
    near, far = streams(), streams(distances=(1.2, 1.6))
    both = pd.concat([near[near[KEY] == "free"], far[far[KEY] == "doubly_stochastic"]])
    outcomes = {verdict["where"]: verdict["outcome"] for verdict in judge("xie_mixing_near_identity", both, KEY)}
    assert outcomes == {f"{KEY}=free": "held", f"{KEY}=doubly_stochastic": "failed"}
    assert_undecided("xie_streams_become_one", streams(free_apart=0.02), "control did not fail", KEY)
