"""Claims and checks of our own."""

from rankbench.papers.own.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"rankbench": "Claims and checks of our own"}
