"""Zhai 2026: heads without the token's own value."""

from rankbench.papers.zhai_2026.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Zhai 2026": "Exclusive self-attention"}
