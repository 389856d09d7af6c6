"""Wang et al. 2022: the uniform part of attention."""

from rankbench.papers.wang_2022.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Wang et al. 2022": "Anti-oversmoothing in deep vision transformers"}
