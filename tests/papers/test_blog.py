"""papers.blog: each condition on a table that supports it, on its control, and on tables that refute it."""

import math

import numpy as np
import pandas as pd
import pytest
from judged import assert_holds_and_fails
from rows import verdict

from rankbench.judging import judge
from rankbench.papers.blog import CONDITIONS as BLOG

PATHS = {"cosine": 0.05, "correlation": -0.05, "information_ksg": 0.02, "interaction": 0.04}


def of_pairs(rest=1e-15, scheme="frozen", cross=0.02, scale=1.0, whole_accuracy=1.0, **paths):
    """An independence table of one scheme: pairs of paths with these numbers, one of each sign, the whole network's
    relative rest, and pairs of heads, whose second derivatives have a scale of their own."""
    rows = [{"of": "network", "scheme": scheme, "interaction": rest}]
    for sign in (-1, 1):
        numbers = {name: sign * value for name, value in (PATHS | paths).items() if name != "information_ksg"}
        numbers["information_ksg"] = (PATHS | paths)["information_ksg"] + sign * 0.01  # an estimate, around its mean
        numbers["interaction"] = abs(numbers["interaction"]) if scheme == "recomputed" else math.nan
        rows.append({"of": "paths", "scheme": scheme, "first": "1-0", "second": "0-1", **numbers})
    pairs = {("L1H1", "L1H1"): 1.0, ("L1H1", "L2H1"): 0.5 * cross, ("L1H2", "L2H1"): 1.5 * cross, ("L2H1", "L2H1"): 1.0}
    for (first, second), relative in pairs.items():
        size = {"cross_gradient_relative": relative, "cross_gradient": scale * relative}
        rows.append({"of": "heads", "scheme": None, "first": first, "second": second, **size})
    table_of_seed = pd.DataFrame(rows).assign(whole_accuracy=whole_accuracy)
    numbers = table_of_seed.select_dtypes("number").columns.difference(["whole_accuracy"])
    seeds = [
        table_of_seed.assign(seed=seed, **{name: table_of_seed[name] * (1 + 0.001 * seed) for name in numbers})
        for seed in range(3)
    ]
    return pd.concat(seeds, ignore_index=True)


def of_pruning(greedy=0.02, norm=0.03, random=0.6):
    """A pruning table: from these shares of the paths on, the network's accuracy is reached, but for four points."""
    shares = np.linspace(0, 1, 101)
    rows = []
    for seed in range(3):
        for order, enough, repeat in (("greedy", greedy, None), ("norm", norm, None), ("random", random, 0)):
            reached = np.where(shares >= enough + 0.01 * seed - 1e-9, 0.96, 0.5)
            common = {"seed": seed, "order": order, "repeat": repeat, "whole_accuracy": 1.0}
            rows += [common | {"kept_share": s, "accuracy": a} for s, a in zip(shares, reached, strict=True)]
    return pd.DataFrame(rows)


RECOMPUTED = {"scheme": "recomputed", "rest": 0.05}
# name: (a table that supports it, the number measured on it, tables that refute it)
TABLES = {
    "blog_paths_orthogonal": (of_pairs(), 0.05, [of_pairs(cosine=0.3), of_pairs(cosine=-0.3)]),
    "blog_paths_uncorrelated": (of_pairs(**RECOMPUTED), 0.05, [of_pairs(correlation=0.2)]),
    "blog_frozen_paths_add_up": (of_pairs(), None, [of_pairs(rest=1e-8)]),
    "blog_paths_additive": (of_pairs(**RECOMPUTED), 0.05, [of_pairs(scheme="recomputed", rest=1.4)]),
    "blog_pairs_additive": (of_pairs(**RECOMPUTED), 0.04, [of_pairs(**RECOMPUTED, interaction=0.7)]),
    # derivatives that are much smaller than 1, but as large as the heads' own
    "blog_cross_gradients_below_own": (of_pairs(), 0.02, [of_pairs(cross=0.9, scale=1e-6), of_pairs(cross=0.9)]),
    # estimates below 0 are as good as those above
    "blog_paths_independent": (of_pairs(), 0.02, [of_pairs(information_ksg=0.5)]),
    "blog_few_paths_suffice": (of_pruning(), 0.03, [of_pruning(greedy=0.4)]),
    "blog_largest_paths_suffice": (of_pruning(), 0.04, [of_pruning(norm=0.4, random=0.5)]),
}


@pytest.mark.parametrize("name", BLOG)
def test_conditions_hold_and_fail(name):
    table, measured, refuting = TABLES[name]
    assert_holds_and_fails(name, table, refuting, measured, rel=2e-3)  # seeds differ by .001


def test_the_smallest_share_that_suffices_is_a_share():
    row = verdict("blog_few_paths_suffice", of_pruning())
    assert row["interval"] == "t of logits" and row["low95"] > 0


def test_without_paths_in_random_order_there_is_no_control():
    table = of_pruning()
    row = verdict("blog_few_paths_suffice", table[table.order != "random"])
    assert row["outcome"] == "undecided" and "its control did not fail (undecided)" in row["reason"]


def test_each_scheme_is_judged_by_the_conditions_that_speak_of_it():
    both = pd.concat([of_pairs(), of_pairs(scheme="recomputed", rest=1.4)])
    names = [name for name, claim in BLOG.items() if claim.table == "independence"]
    where = {name: [(row["where"], row["outcome"]) for row in judge(name, both)] for name in names}
    assert where["blog_frozen_paths_add_up"] == [("scheme=frozen", "passed")]
    assert where["blog_paths_additive"] == [("scheme=recomputed", "failed")]
    assert where["blog_pairs_additive"] == [("scheme=recomputed", "held")]
    assert where["blog_paths_orthogonal"] == [("scheme=frozen", "held"), ("scheme=recomputed", "held")]
    assert where["blog_cross_gradients_below_own"] == [("", "held")]


@pytest.mark.parametrize("name", [name for name, claim in BLOG.items() if not claim.is_check])
def test_networks_that_have_not_learned_are_not_judged(name):
    supporting, _, refuting = TABLES[name]
    for table in (supporting, refuting[0]):
        scaled = table.assign(whole_accuracy=0.5, **({"accuracy": table.accuracy / 2} if "accuracy" in table else {}))
        assert "not learned its task (accuracy 0.500)" in verdict(name, scaled)["reason"]
    assert verdict("blog_frozen_paths_add_up", of_pairs(whole_accuracy=0.1))["outcome"] == "passed"
