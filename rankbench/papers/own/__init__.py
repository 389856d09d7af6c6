"""Claims and checks of our own."""

from rankbench.papers.own.claims import CLAIMS
from rankbench.papers.own.path_lengths import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"rankbench": "Claims and checks of our own"}
LAWS = {"path_lengths": LAW}
