"""The papers' claims as tests on tables, by name; one module for each source."""

from typing import Any

import pandas as pd

from rankbench.claims.amsel import AMSEL
from rankbench.claims.blog import BLOG
from rankbench.claims.claim import (
    NOT_JUDGED,
    Claim,
    Facet,
    brought_up_to_date,
    is_of_another_test,
    measured_text,
    over_text,
    published_text,
    verdict_line,
    verdicts_of,
)
from rankbench.claims.dong_collapse import DONG_COLLAPSE
from rankbench.claims.dong_paths import DONG_PATHS
from rankbench.claims.heads import HEADS
from rankbench.claims.kim import KIM
from rankbench.claims.kim_charlm import KIM_CHARLM
from rankbench.claims.knobs import KNOBS
from rankbench.claims.laws import LAWS
from rankbench.claims.lipschitz_training import LIPSCHITZ_TRAINING
from rankbench.claims.papers import PAPERS
from rankbench.claims.published import figures_published, published
from rankbench.claims.remarks import REMARKS
from rankbench.claims.replication import SECOND_SEED, beside_second
from rankbench.claims.statement import OUTCOMES, by_paper, grouped, statement_line, statements_of, table_of, with_holm

__all__ = [
    "CLAIMS",
    "NOT_JUDGED",
    "OUTCOMES",
    "PAPERS",
    "SECOND_SEED",
    "Claim",
    "beside_second",
    "by_paper",
    "figures_published",
    "grouped",
    "is_outdated",
    "judge",
]
__all__ += ["measured_text", "of_today", "over_text", "published", "published_text", "statement_line"]
__all__ += ["statements_of", "table_of", "verdict_line", "with_holm"]

CLAIMS: dict[str, Claim] = {**DONG_PATHS, **DONG_COLLAPSE, **BLOG, **AMSEL, **KIM, **KIM_CHARLM, **KNOBS, **LAWS}
CLAIMS |= LIPSCHITZ_TRAINING | HEADS | REMARKS


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
