"""Zhai et al. 2023: the entropy of attention, and its collapse."""

from rankbench.papers.zhai_2023.claims import CLAIMS
from rankbench.papers.zhai_2023.entropy_bound import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Zhai et al. 2023": "Preventing attention entropy collapse"}
LAWS = {"entropy_bound": LAW}
