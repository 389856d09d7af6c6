"""Karagodin, Ge, Polyanskiy and Rigollet 2025: what the place of the norms does."""

from rankbench.papers.karagodin_2025.claims import CLAIMS
from rankbench.papers.karagodin_2025.norm_placement import FIRST_SPEED, MEETING, NORM_PLACEMENT

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Karagodin, Ge, Polyanskiy and Rigollet 2025": "Normalization in attention dynamics"}
LAWS = {"norm_placement": NORM_PLACEMENT, "first_speed": FIRST_SPEED, "meeting": MEETING}
