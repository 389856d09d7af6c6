"""Wu et al. 2025: causal attention leads to the first token."""

from rankbench.papers.wu_2025.claims import CLAIMS
from rankbench.papers.wu_2025.position_bias import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Wu et al. 2025": "On the emergence of position bias in transformers"}
LAWS = {"position_bias": LAW}
