"""What is judged, by name: claims, and the papers that make them. Papers and plug-ins fill both."""

from rankbench.config.plugins import Registry
from rankbench.judging.claim import Claim

CLAIMS = Registry("CLAIMS", Claim)
PAPERS = Registry("PAPERS", str)  # name -> title; a claim's source begins with the name of its paper


def paper_of(source: str) -> str:
    """Name of the paper that a claim's source names; the source itself if it is none of PAPERS."""
    return next((name for name in PAPERS if source.startswith(name)), source)
