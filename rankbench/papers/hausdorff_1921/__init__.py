"""Hausdorff 1921: causal uniform attention is a summation method."""

from rankbench.papers.hausdorff_1921.cesaro import LAW
from rankbench.papers.hausdorff_1921.claims import CLAIMS

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Hausdorff 1921": "Summation methods and moment sequences"}
LAWS = {"cesaro": LAW}
