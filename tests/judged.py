"""How a claim comes out on a table that supports it, and on tables that refute it."""

import pytest

from rankbench.judging import CLAIMS, judge, verdict_line


def outcomes(name, table, facet=None):
    return {verdict["outcome"] for verdict in judge(name, table, facet or CLAIMS[name].along)}


def assert_holds_and_fails(name, table, refuting=(), measured=None, rel=1e-9, facet=None):
    """The claim holds on the table, with this number, and fails on each table that refutes it. `judge` lets none hold
    that does not fail in its control. That there is one of something is refuted by no table. facet: keys of which each
    value is judged for itself; None for the key that the claim compares."""
    assert refuting or CLAIMS[name].exists
    if "sublayer" not in table:  # sub-layers of a layer are in the rows' order
        assert outcomes(name, table[::-1], facet) == outcomes(name, table, facet), "the order of the rows decides"
    right, wrong = ("passed", "broken") if CLAIMS[name].is_check else ("held", "failed")
    for verdict in judge(name, table, facet or CLAIMS[name].along):
        assert verdict["outcome"] == right, verdict["reason"]
        assert measured is None or verdict["measured"] == pytest.approx(measured, rel=rel, abs=1e-9)
        assert name in (line := verdict_line(verdict)) and "\n" not in line and verdict["control"]
    for other in refuting:
        assert outcomes(name, other, facet) == {wrong}


def assert_undecided(name, table, reason, facet=None):
    """No verdict on the table decides the claim, and each gives this reason."""
    for verdict in judge(name, table, facet):
        assert verdict["outcome"] == "undecided" and reason in verdict["reason"]
