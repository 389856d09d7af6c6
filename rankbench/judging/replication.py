"""Verdicts beside those of a second run, on seeds that the first does not have."""

from collections.abc import Iterable
from typing import Any

from rankbench.judging.claim import BROKEN, FAILED, HELD, NOT_JUDGED, PASSED, UNDECIDED
from rankbench.judging.verdict import number_text

SECOND_SEED = 1000  # a run whose seeds begin here or later is the second run of its preset
OPPOSITES = {HELD: FAILED, FAILED: HELD, PASSED: BROKEN, BROKEN: PASSED}


def beside_second(verdicts: Iterable[dict[str, Any]], second: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts, with what a second run says in the same setting at the same scale.

    second_outcome and second_measured (its number, with interval and seeds, in words): of the second run; None where it
    has no such setting, or where one of the two is not judged since the claim changed. replicated: yes, if both have
    the same outcome, else no. A verdict that turns round, from held to failed or from failed to held, is undecided, and
    its reason says so.
    """
    by_setting = {_setting(row): row for row in second}
    return [_beside(row, by_setting.get(_setting(row))) for row in verdicts]


def _setting(row: dict[str, Any]) -> tuple:
    return row["claim"], row["where"] or "", row["scale"], row["claimed"], row.get("since") or ""


def _beside(row: dict[str, Any], second: dict[str, Any] | None) -> dict[str, Any]:
    if second is None or any((verdict["reason"] or "").startswith(NOT_JUDGED) for verdict in (row, second)):
        return row | dict.fromkeys(("second_outcome", "second_measured", "replicated"))
    outcome, measured = second["outcome"], number_text(second)
    replicated = "yes" if outcome == row["outcome"] else "no"
    row = row | {"second_outcome": outcome, "second_measured": measured, "replicated": replicated}
    if OPPOSITES.get(row["outcome"]) != outcome:
        return row
    reason = f"{row['outcome']} with the first seeds, {outcome} with others ({measured})"
    return row | {"outcome": UNDECIDED, "p_value": None, "reason": "; ".join(filter(None, (reason, row["reason"])))}
