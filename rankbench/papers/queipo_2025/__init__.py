"""Queipo-de-Llano et al. 2025: one massive token makes a layer's tokens almost of rank one."""

from rankbench.papers.queipo_2025.claims import CLAIMS
from rankbench.papers.queipo_2025.massive_token import LAW

__all__ = ["CLAIMS", "LAWS", "PAPERS"]

PAPERS = {
    "Queipo-de-Llano et al. 2025": "Attention sinks and compression valleys in LLMs are two sides of the same coin"
}
LAWS = {"massive_token": LAW}
