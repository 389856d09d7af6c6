"""Nait Saada et al. 2025: the spectral gap of random attention."""

from rankbench.papers.nait_saada_2025.claims import CLAIMS
from rankbench.papers.nait_saada_2025.spectral_gap import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Nait Saada et al. 2025": "Mind the gap: a spectral analysis of rank collapse and signal propagation"}
LAWS = {"spectral_gap": LAW}
