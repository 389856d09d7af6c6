"""Claims and checks of our own."""

from rankbench.papers.own import atlas, balls, claims
from rankbench.papers.own.path_lengths import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

CLAIMS = {**claims.CLAIMS, **balls.CLAIMS, **atlas.CLAIMS}
PAPERS = {"rankbench": "Claims and checks of our own"}
LAWS = {"path_lengths": LAW}
