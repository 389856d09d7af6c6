"""The claims on tokens that leave their cluster: on tables that support them, in their controls, and refuted."""

import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided
from rows import verdict

TRAINED = (0.9, 0.6, 0.4, 0.5, 0.8)  # relative residual of the embedding and of four layers
FRESH = (0.9, 0.7, 0.6, 0.5, 0.5)


def layers(trained=TRAINED, fresh=FRESH, loss_fall=0.001):
    """A table of the analysis residual. States before the MLP, other variants and P must not count."""
    rows = []
    for seed in range(5):
        for weights, residuals in (("trained", trained), ("initialised", fresh)):
            for layer, residual in enumerate(residuals):
                row = {"seed": seed, "weights": weights, "variant": "full", "layer": layer, "loss_fall": loss_fall}
                state = row | {"relative_residual": residual * (1 + 0.01 * seed * (layer == 2)), "below_floor": 0.0}
                if layer:
                    rows += [
                        row | {"sublayer": "weights"},
                        state | {"sublayer": "attention", "relative_residual": 0.01},
                    ]
                rows.append(state | {"sublayer": "mlp" if layer else "input"})
                rows.append(state | {"sublayer": "mlp", "variant": "no_mlp", "relative_residual": 0.01})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("name", "measured", "refuting"),
    [
        ("isobe_trained_escape", 0.8 / 0.4, [(0.9, 0.8, 0.6, 0.5, 0.4), (0.4, 0.5, 0.6, 0.8, 0.9)]),
        ("isobe_fresh_stay", 1.0, [(0.9, 0.7, 0.5, 0.6, 0.7), (0.5, 0.6, 0.7, 0.8, 0.9)]),
    ],
)
def test_claims_hold_and_fail(name, measured, refuting):
    """Refuted without a rise at the end, or without a fall before it."""
    weights = "trained" if "trained" in name else "fresh"
    tables = [layers(**{weights: residuals}) for residuals in refuting]
    assert_holds_and_fails(name, layers(), tables, measured, rel=0.03)  # spread of the seeds


def test_the_shallower_side_of_the_valley_counts():
    """A network that hardly falls has not left a cluster, however much it rises."""
    assert verdict("isobe_trained_escape", layers(trained=(0.41, 0.4, 0.4, 0.5, 0.8)))["outcome"] == "failed"


def test_only_what_training_does_counts():
    assert_undecided("isobe_trained_escape", layers(fresh=TRAINED), "control did not fail")
    assert_undecided("isobe_trained_escape", layers(loss_fall=0.1), "still fell")


def test_fresh_networks_whose_tokens_do_not_become_alike_prove_nothing():
    assert_undecided("isobe_fresh_stay", layers(fresh=(0.5, 0.5, 0.5, 0.5, 0.5)), "control did not fail")
