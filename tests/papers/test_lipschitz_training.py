"""The claim on training with a cap: it holds below the cap's bound, and fails in its control and above."""

import pandas as pd
from judged import assert_holds_and_fails, assert_undecided

NAME = "newhouse_capped_certificate"


def table(capped=80.0, uncapped=500.0):
    return pd.DataFrame(
        {"seed": seed, "weights": weights, "part": "network", "p": 2.0, "optimizer.cap": cap}
        | {"quantity": quantity, "value": value if weights == "trained" else 90.0}
        for seed in range(3)
        for weights in ("trained", "initialised")
        for cap, theorem in (("1", capped), ("1000", uncapped))
        for quantity, value in (("theorem", theorem), ("capped", 100.0))
    )


def test_the_certificate_is_compared_with_that_at_the_cap():
    assert_holds_and_fails(NAME, table(), [table(capped=101.0)])


def test_nothing_is_judged_where_nothing_was_above_the_cap():
    assert_undecided(NAME, table(uncapped=99.0), "its control did not fail", "optimizer.cap")


def test_without_the_number_at_the_cap_nothing_is_judged():
    assert_undecided(NAME, table().query("quantity != 'capped'"), "beside that at the cap", "optimizer.cap")
