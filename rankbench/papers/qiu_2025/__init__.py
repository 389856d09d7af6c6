"""Qiu et al. 2025: a gate behind each head instead of a sink."""

from rankbench.papers.qiu_2025.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {
    "Qiu et al. 2025": "Gated attention for large language models: Non-linearity, sparsity, and attention-sink-free"
}
