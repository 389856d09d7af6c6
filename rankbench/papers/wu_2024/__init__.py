"""Wu et al. 2024: what masks and LayerNorm do to the collapse."""

from rankbench.papers.wu_2024.claims import CLAIMS
from rankbench.papers.wu_2024.layernorm_rank import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Wu et al. 2024": "On the role of attention masks and LayerNorm in transformers"}
LAWS = {"layernorm_rank": LAW}
