"""Saxe et al. 2014: orthogonal maps."""

from rankbench.papers.saxe_2014.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Saxe et al. 2014": "Exact solutions to the nonlinear dynamics of learning"}
