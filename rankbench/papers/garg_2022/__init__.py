"""Garg et al. 2022: regression in context."""

from rankbench.papers.garg_2022.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Garg et al. 2022": "What can transformers learn in-context? A case study of simple function classes"}
