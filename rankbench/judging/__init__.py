"""Claims as tests on tables: what a claim is, how it is judged, and the claims that papers and plug-ins make."""

from rankbench.judging.claim import CLAIMS, NOT_JUDGED, PAPERS, Claim
from rankbench.judging.published import figures_published, published
from rankbench.judging.replication import SECOND_SEED, beside_second
from rankbench.judging.statement import OUTCOMES, by_paper, grouped, statement_line, statements_of, table_of, with_holm
from rankbench.judging.verdict import (
    Facet,
    is_number,
    is_outdated,
    judge,
    measured_text,
    number_text,
    of_today,
    over_text,
    verdict_line,
)

__all__ = ["CLAIMS", "NOT_JUDGED", "OUTCOMES", "PAPERS", "SECOND_SEED", "Claim", "Facet", "beside_second", "by_paper"]
__all__ += ["figures_published", "grouped", "is_number", "is_outdated", "judge", "measured_text", "number_text"]
__all__ += ["of_today", "over_text", "published", "statement_line", "statements_of", "table_of"]
__all__ += ["verdict_line", "with_holm"]
