"""rankbench.judging.replication: verdicts beside those of a second run."""

import pytest

from rankbench.judging import beside_second
from rankbench.judging.claim import NOT_JUDGED


def row(outcome, reason=None):
    facts = {"claim": "a claim", "where": "", "scale": "paper", "claimed": "> 1", "since": "2026-11-29"}
    numbers = {"measured": None, "is_bound": False, "interval": "none", "num_repeats": 0, "repeats": "seed"}
    return facts | numbers | {"outcome": outcome, "reason": reason}


@pytest.mark.parametrize(
    ("first", "second", "replicated"),
    [
        (row("held"), row("held"), "yes"),
        (row("held"), row("undecided"), "no"),
        (row("undecided", "fewer than 3 seeds"), row("undecided", "fewer than 3 seeds"), "yes"),
        # neither says anything about today's claim
        (row("undecided", f"{NOT_JUDGED} (held before)"), row("undecided", f"{NOT_JUDGED} (failed before)"), None),
        (row("held"), row("undecided", f"{NOT_JUDGED} (failed before)"), None),
    ],
)
def test_what_is_not_judged_does_not_replicate(first, second, replicated):
    (beside,) = beside_second([first], [second])
    assert (beside["replicated"], beside["outcome"]) == (replicated, first["outcome"])
