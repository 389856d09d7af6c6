"""Lan et al. 2020: one layer for all depths, as in ALBERT."""

from rankbench.papers.lan_2020.claims import CLAIMS
from rankbench.papers.lan_2020.looped import COLLAPSE, END

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Lan et al. 2020": "ALBERT: A lite BERT for self-supervised learning of language representations"}
LAWS = {"looped_collapse": COLLAPSE, "looped_end": END}
