"""Claims on remarks: each holds on a table that supports it, fails in its control and on tables that refute it."""

import math

import numpy as np
import pandas as pd
import pytest
from judged import assert_holds_and_fails, assert_undecided
from test_dong import by_layer, by_length
from test_knob_claims import HEAT, flat, followed, measured

from rankbench.papers.blog import CAUSES_OF_COLLAPSE
from rankbench.papers.dong_2021.remarks import REMARKS as OF_DONG

REMARKS = OF_DONG | CAUSES_OF_COLLAPSE
del REMARKS["blog_saturation_collapses"]  # tests/papers/test_knob_claims.py

KIND, TIED = "model.attention", "model.tied_qk"


def ahead(share, other):
    """Layers by which one collapse is ahead of the other, mean over the seeds of `measured` and `followed`."""
    logs = [[math.log10(kept * (1 + 0.01 * seed)) for kept in (share, other)] for seed in range(5)]
    return np.mean([math.log(first / second, 3) for first, second in logs])


def circle(skip=0.5, error=0.1, escaped=()):
    """A table of the analysis rollout: the way of two points in a step, with a skip and without. escaped: the seeds
    whose points go a hundred times as far with a skip."""
    rows = []
    for name, length in (("san", 1.0), ("san_skip", skip)):
        for seed in range(10):
            for weights in ("trained", "initialised"):
                far = length * (100 if seed in escaped and name == "san_skip" else 1 + 0.01 * seed)
                far = far if weights == "trained" else 7.0
                network = {"run": name, "model": name, "seed": seed, "weights": weights, "one_step_error": error}
                rows += [
                    network | {"token": token, "step": step, "x": token + far * step * 0.6, "y": far * step * 0.8}
                    for step in (0, 5, 10)
                    for token in (1, 2)
                ]
    return pd.DataFrame(rows)


# name: (a table that supports it, the number measured on it, tables that refute it)
TABLES = {
    "dong_low_rank_collapses_faster": (
        measured(KIND, {"dot": 1e-3, "kernel": 1e-6, "sparse": 0.1}),
        ahead(1e-6, 1e-3),
        [measured(KIND, {"dot": 1e-6, "kernel": 1e-3}), measured(KIND, {"dot": 1e-3, "kernel": 2e-3})],
    ),
    "dong_sparse_collapses_slower": (
        measured(KIND, {"dot": 1e-3, "kernel": 1e-6, "sparse": 0.1}),
        ahead(0.1, 1e-3),
        [measured(KIND, {"dot": 1e-3, "sparse": 1e-5})],
    ),
    "dong_fig4_consistent": (by_length(), -1.0, [by_length({length: 0.2 + 0.1 * length for length in range(6)})]),
    "dong_fig3_skips_slow_points": (circle(), 1.0, [circle(skip=1.5), circle(escaped=range(9))]),
    "blog_tied_collapses_sooner": (
        followed(TIED, {"true": 1e-9, "false": 1e-4}),
        ahead(1e-9, 1e-4),
        [followed(TIED, {"true": 1e-4, "false": 1e-9})],
    ),
    "blog_layers_feed_back": (
        by_layer(-0.1, -1.0, -3.7, -13.7),
        3.0,
        [
            by_layer(-0.1, -4.0, -5.0, -9.0),
            by_layer(-0.1, -1.0, -4.0, -3.0),
            by_layer(0.0, 0.1, -1.0, -9.0),
            by_layer(-0.1, -1.0, -1.9, -5.5),  # twice as much on average, but once no more than the layer before
        ],
    ),
    "blog_scale_matters": (followed(HEAT, {0.1: 0.5, 1: 0.9, 3: 1e-3}), math.log10(900), []),
}


@pytest.mark.parametrize("name", REMARKS)
def test_claims_hold_and_fail(name):
    table, measured, refuting = TABLES[name]
    assert_holds_and_fails(name, table, refuting, measured)


@pytest.mark.parametrize(
    ("name", "table", "reason"),
    [
        ("dong_low_rank_collapses_faster", measured(KIND, {"dot": 1e-3, "kernel": 1e-16}), "rounding hides"),
        ("dong_low_rank_collapses_faster", measured(KIND, {"dot": 1e-3, "sparse": 0.1}), "no model.attention=kernel"),
        ("dong_fig3_skips_slow_points", circle(error=1.5), "20 of 20 networks have not learned a step"),
        ("blog_layers_feed_back", by_layer(-0.1, -1.0, -9.0, -math.inf), "float64 holds"),
        ("blog_layers_feed_back", by_layer(-0.1, -1.1, -2.1, -3.1), "threshold lies within"),  # as much in every layer
        ("blog_scale_matters", followed(HEAT, flat(0.5, 0.1)), "no example here"),  # five times as much
        ("dong_fig3_skips_slow_points", circle(escaped=range(5)), "threshold lies within"),  # slower in half the seeds
    ],
)
def test_what_cannot_be_judged_is_undecided_and_says_why(name, table, reason):
    assert_undecided(name, table, reason, REMARKS[name].along)
