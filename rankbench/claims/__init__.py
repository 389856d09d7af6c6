"""The papers' claims as tests on tables, by name; one module for each source."""

import pandas as pd

from rankbench.claims.amsel import AMSEL
from rankbench.claims.blog import BLOG
from rankbench.claims.claim import Claim, Facet, measured_text, over_text, published_text, verdict_line, verdicts_of
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
from rankbench.claims.statement import OUTCOMES, by_paper, grouped, statement_line, statements_of, table_of, with_holm

__all__ = ["CLAIMS", "OUTCOMES", "PAPERS", "Claim", "by_paper", "figures_published", "grouped", "judge"]
__all__ += ["measured_text", "over_text", "published", "published_text", "statement_line", "statements_of", "table_of"]
__all__ += ["verdict_line", "with_holm"]

CLAIMS: dict[str, Claim] = {**DONG_PATHS, **DONG_COLLAPSE, **BLOG, **AMSEL, **KIM, **KIM_CHARLM, **KNOBS, **LAWS}
CLAIMS |= LIPSCHITZ_TRAINING | HEADS


def judge(name: str, table: pd.DataFrame, facet: Facet = None) -> list[dict]:
    """Verdicts of one claim on a table: one for each value of the columns it is judged by and of the facet, which is
    the column, or columns, of the keys that a sweep varies."""
    return verdicts_of(name, CLAIMS[name], table, facet)
