"""Amsel, Yehudai and Bruna: what the rank of heads buys."""

from rankbench.papers.amsel.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Amsel, Yehudai and Bruna": "On the benefits of rank in attention layers"}
