"""Yu et al. 2025: as many heads as a task has directions to retrieve."""

from rankbench.papers.yu_2025.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Yu et al. 2025": "The effect of attention head count on transformer approximation"}
