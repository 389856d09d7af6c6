"""Fedorov et al. 2026: tokens become antipodal under random values."""

from rankbench.papers.fedorov_2026.antipodal import LAW
from rankbench.papers.fedorov_2026.claims import CLAIMS

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Fedorov et al. 2026": "Clustering in deep stochastic transformers"}
LAWS = {"antipodal": LAW}
