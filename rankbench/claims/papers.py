"""The papers whose claims are judged. A claim's source begins with the name of its paper."""

PAPERS = {
    "Dong et al. 2021": "Attention is not all you need: pure attention loses rank doubly exponentially with depth",
    "Attention-paths blog": "Weak interdependence of attention paths",
    "Kim et al. 2021": "The Lipschitz constant of self-attention",
    "Amsel, Yehudai and Bruna": "On the benefits of rank in attention layers",
    "Garg et al. 2022": "What can transformers learn in-context? A case study of simple function classes",
    "Wu et al. 2024": "On the role of attention masks and LayerNorm in transformers",
    "Wu et al. 2025": "On the emergence of position bias in transformers",
    "Noci et al. 2022": "Signal propagation in transformers",
    "Joseph et al. 2024": "Lambda-skip connections",
    "Giorlandino and Goldt 2025": "Two failure modes of deep transformers",
    "Ali, Galanti and Wolf 2023": "Centered self-attention layers",
    "He et al. 2023": "Deep transformers without shortcuts",
    "Wang et al. 2022": "Anti-oversmoothing in deep vision transformers",
    "Saxe et al. 2014": "Exact solutions to the nonlinear dynamics of learning",
    "Zhai et al. 2023": "Preventing attention entropy collapse",
    "Zhai 2026": "Exclusive self-attention",
    "Newhouse et al. 2025": "Training transformers with enforced Lipschitz constants",
    "Sun et al. 2025": "The curse of depth in large language models",
    "Nait Saada et al. 2025": "Mind the gap: a spectral analysis of rank collapse and signal propagation",
    "Karagodin, Ge, Polyanskiy and Rigollet 2025": "Normalization in attention dynamics",
    "Bruno, Pasqualotto and Agazzi 2025": "Emergence of meta-stable clustering in mean-field transformers",
    "Chen, Lin, Polyanskiy and Rigollet 2026": "Critical attention scaling in long-context transformers",
    "Fedorov et al. 2026": "Clustering in deep stochastic transformers",
    "Chen et al. 2020": "Simple and deep graph convolutional networks (initial residual)",
    "Zhou et al. 2024": "Value residual learning",
    "Zhu et al. 2024": "Hyper-connections",
    "Xie et al. 2025": "mHC: Manifold-constrained hyper-connections",
    "Hausdorff 1921": "Summation methods and moment sequences",
    "rankbench": "Claims and checks of our own",
}


def paper_of(source: str) -> str:
    """Name of the paper that a claim's source names; the source itself if it is none of PAPERS."""
    return next((name for name in PAPERS if source.startswith(name)), source)
