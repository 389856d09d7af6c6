"""Claims and checks of our own."""

from rankbench.papers.own import atlas, balls, claims, norm_ranks, path_lengths, signal_map

CLAIMS = {**claims.CLAIMS, **balls.CLAIMS, **atlas.CLAIMS, **signal_map.CLAIMS}
PAPERS = {"rankbench": "Claims and checks of our own"}
LAWS = {"path_lengths": path_lengths.LAW, "norm_ranks": norm_ranks.LAW}
