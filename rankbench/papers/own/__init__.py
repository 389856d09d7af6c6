"""Claims and checks of our own."""

from rankbench.papers.own import atlas, balls, claims, signal_map
from rankbench.papers.own.path_lengths import LAW

CLAIMS = {**claims.CLAIMS, **balls.CLAIMS, **atlas.CLAIMS, **signal_map.CLAIMS}
PAPERS = {"rankbench": "Claims and checks of our own"}
LAWS = {"path_lengths": LAW}
