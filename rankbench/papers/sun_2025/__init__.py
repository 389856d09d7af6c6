"""Sun et al. 2025: the variance of deep pre-norm networks."""

from rankbench.papers.sun_2025.claims import CLAIMS
from rankbench.papers.sun_2025.depth_curse import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Sun et al. 2025": "The curse of depth in large language models"}
LAWS = {"depth_curse": LAW}
