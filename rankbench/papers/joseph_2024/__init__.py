"""Joseph et al. 2024: what the strength of the skips does to the collapse."""

from rankbench.papers.joseph_2024.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Joseph et al. 2024": "Lambda-skip connections"}
