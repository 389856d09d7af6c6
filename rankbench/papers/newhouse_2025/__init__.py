"""Newhouse et al. 2025: training with a cap on the singular values."""

from rankbench.papers.newhouse_2025.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Newhouse et al. 2025": "Training transformers with enforced Lipschitz constants"}
