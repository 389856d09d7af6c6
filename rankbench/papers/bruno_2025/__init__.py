"""Bruno, Pasqualotto and Agazzi 2025: tokens on the circle stay long in a few clusters."""

from rankbench.papers.bruno_2025.claims import CLAIMS
from rankbench.papers.bruno_2025.metastable import METASTABLE, PLATEAU

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Bruno, Pasqualotto and Agazzi 2025": "Emergence of meta-stable clustering in mean-field transformers"}
LAWS = {"metastable": METASTABLE, "plateau": PLATEAU}
