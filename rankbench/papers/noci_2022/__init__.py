"""Noci et al. 2022: what the scale of the branches does to the collapse."""

from rankbench.papers.noci_2022.claims import CLAIMS
from rankbench.papers.noci_2022.residual_scale import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Noci et al. 2022": "Signal propagation in transformers"}
LAWS = {"residual_scale": LAW}
