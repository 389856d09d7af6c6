"""Chen et al. 2020: the embedding in the input of each layer."""

from rankbench.papers.chen_2020.claims import CLAIMS

__all__ = ["CLAIMS", "PAPERS"]

PAPERS = {"Chen et al. 2020": "Simple and deep graph convolutional networks (initial residual)"}
