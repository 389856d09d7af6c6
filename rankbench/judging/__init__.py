"""Claims as tests on tables: what a claim is, how it is judged, and the claims that papers and plug-ins make."""

from typing import Any

import pandas as pd

from rankbench.judging.claim import NOT_JUDGED, Claim
from rankbench.judging.published import figures_published, published
from rankbench.judging.registries import CLAIMS, PAPERS
from rankbench.judging.replication import SECOND_SEED, beside_second
from rankbench.judging.statement import OUTCOMES, by_paper, grouped, statement_line, statements_of, table_of, with_holm
from rankbench.judging.verdict import (
    Facet,
    brought_up_to_date,
    is_of_another_test,
    measured_text,
    over_text,
    published_text,
    verdict_line,
    verdicts_of,
)

__all__ = [
    "CLAIMS",
    "NOT_JUDGED",
    "OUTCOMES",
    "PAPERS",
    "SECOND_SEED",
    "Claim",
    "Facet",
    "beside_second",
    "by_paper",
    "figures_published",
    "grouped",
    "is_outdated",
    "judge",
]
__all__ += ["measured_text", "of_today", "over_text", "published", "published_text", "statement_line"]
__all__ += ["statements_of", "table_of", "verdict_line", "with_holm"]


def judge(name: str, table: pd.DataFrame, facet: Facet = None) -> list[dict]:
    """Verdicts of one claim on a table: one for each value of the columns it is judged by and of the facet, which is
    the column, or columns, of the keys that a sweep varies."""
    return verdicts_of(name, CLAIMS[name], table, facet)


def is_outdated(verdict: dict[str, Any]) -> bool:
    """Whether a stored verdict comes from a test that its claim no longer has."""
    claim = CLAIMS.get(verdict["claim"])
    return claim is not None and is_of_another_test(claim, verdict)


def of_today(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Stored verdicts in the words of today's claims, undecided where the test has changed. Those of claims that are no
    longer judged are left out."""
    return [brought_up_to_date(CLAIMS[row["claim"]], row) for row in verdicts if row["claim"] in CLAIMS]
