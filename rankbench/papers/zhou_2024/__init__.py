"""Zhou et al. 2024: the first layer's values in later layers."""

from rankbench.papers.zhou_2024.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Zhou et al. 2024": "Value residual learning"}
