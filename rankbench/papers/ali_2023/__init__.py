"""Ali, Galanti and Wolf 2023: attention with its mean removed."""

from rankbench.papers.ali_2023.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Ali, Galanti and Wolf 2023": "Centered self-attention layers"}
