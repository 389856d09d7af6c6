"""Xie et al. 2025: doubly stochastic hyper-connections."""

from rankbench.papers.xie_2025.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Xie et al. 2025": "mHC: Manifold-constrained hyper-connections"}
