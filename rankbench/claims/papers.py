"""The papers whose claims are judged, as the sources of the claims begin."""

PAPERS = {
    "Dong et al. 2021": "Attention is not all you need: pure attention loses rank doubly exponentially with depth",
    "Attention-paths blog": "Weak interdependence of attention paths",
    "Kim et al. 2021": "The Lipschitz constant of self-attention",
    "Amsel, Yehudai and Bruna": "On the benefits of rank in attention layers",
    "Garg et al. 2022": "What can transformers learn in-context? A case study of simple function classes",
    "Wu et al. 2024": "On the role of attention masks and LayerNorm in transformers",
    "Noci et al. 2022": "Signal propagation in transformers",
    "Joseph et al. 2024": "Lambda-skip connections",
    "Giorlandino and Goldt 2025": "Two failure modes of deep transformers",
    "Ali, Galanti and Wolf 2023": "Centered self-attention layers",
    "He et al. 2023": "Deep transformers without shortcuts",
    "Wang et al. 2022": "Anti-oversmoothing in deep vision transformers",
    "Saxe et al. 2014": "Exact solutions to the nonlinear dynamics of learning",
    "Zhai et al. 2023": "Preventing attention entropy collapse",
    "rankbench": "Claims and checks of our own",
}


def paper_of(source: str) -> str:
    """Name of the paper that a claim's source names; the source itself if it is none of PAPERS."""
    return next((name for name in PAPERS if source.startswith(name)), source)
