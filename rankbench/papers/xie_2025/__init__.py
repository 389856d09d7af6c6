"""Xie et al. 2025: doubly stochastic hyper-connections."""

from rankbench.papers.xie_2025.claims import CLAIMS
from rankbench.papers.xie_2025.stream_collapse import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Xie et al. 2025": "mHC: Manifold-constrained hyper-connections"}
LAWS = {"stream_collapse": LAW}
