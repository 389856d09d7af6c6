"""Claims of Nait Saada et al. 2025 on the second singular value of attention."""

from rankbench.judging.claim import Claim, Control, above
from rankbench.judging.of_laws import agrees
from rankbench.papers.nait_saada_2025.spectral_gap import LAW

PAPERS = {"Nait Saada et al. 2025": "Mind the gap: a spectral analysis of rank collapse and signal propagation"}
LAWS = {"spectral_gap": LAW}


CLAIMS: dict[str, Claim] = {
    "law_gap_of_heads": Claim(
        statement="Heads that have learned are no random Markov matrices: their second singular value is above that of "
        "independent weights of the same variance (ratio, mean over heads; above 1.5, threshold: ours).",
        source="Nait Saada et al. 2025, Mind the gap; how far heads are from its law is measured here",
        table="attention",
        measure=lambda rows: rows[rows.weights == "trained"].singular_over_law.mean(),
        claimed=above(1.5),
        why_untrained=None,
        scale="positive",
        control=Control.beyond(
            "the same weights, those of each row in a random order", singular_over_law="shuffled_over_law"
        ),
    ),
    # the line: among 400 x 400 log-normal weights the largest still lift sigma_2, at sigma = 1 by .15
    "law_spectral_gap": agrees(
        law="spectral_gap",
        line=0.3,
        statement="The second singular value and eigenvalue of random attention fall as 2 s/sqrt(n) and s/sqrt(n), s "
        "the relative standard deviation of the weights",
        source="Nait Saada et al. 2025, Mind the gap; Bordenave et al. 2012",
        control="scores of the same variance and of rank one",
        relative=True,
    ),
}
