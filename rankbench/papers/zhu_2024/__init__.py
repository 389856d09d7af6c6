"""Zhu et al. 2024: hyper-connections."""

from rankbench.papers.zhu_2024.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Zhu et al. 2024": "Hyper-connections"}
