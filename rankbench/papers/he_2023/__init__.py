"""He et al. 2023: attention beside the identity in place of skips."""

from rankbench.papers.he_2023.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"He et al. 2023": "Deep transformers without shortcuts"}
