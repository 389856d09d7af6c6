"""Chen, Lin, Polyanskiy and Rigollet 2026: attention whose scores grow as the number of tokens' logarithm."""

from rankbench.papers.chen_2026.claims import CLAIMS
from rankbench.papers.chen_2026.long_context import GRADIENT, LONG_CONTEXT

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Chen, Lin, Polyanskiy and Rigollet 2026": "Critical attention scaling in long-context transformers"}
LAWS = {"long_context": LONG_CONTEXT, "long_context_gradient": GRADIENT}
