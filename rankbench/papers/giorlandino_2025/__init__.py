"""Giorlandino and Goldt 2025: signal propagation through fresh Transformers."""

from rankbench.papers.giorlandino_2025.claims import CLAIMS
from rankbench.papers.giorlandino_2025.signal_propagation import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {"Giorlandino and Goldt 2025": "Two failure modes of deep transformers"}
LAWS = {"signal_propagation": LAW}
