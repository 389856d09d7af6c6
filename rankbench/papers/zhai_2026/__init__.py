"""Claim of Zhai 2026: heads without the token's own value."""

from rankbench.judging.claim import Claim, below, exact_check
from rankbench.judging.sweeps import at_one_end

PAPERS = {"Zhai 2026": "Exclusive self-attention"}

CLAIMS: dict[str, Claim] = {
    "knob_exclusive": exact_check(
        statement="The output of an exclusive head is orthogonal to the token's own value in every layer, and that of "
        "a plain head is not (largest |mean cosine| of a head).",
        source="Zhai 2026, Exclusive self-attention",
        table="attention",
        claimed=below(1e-5),  # rounding of float32
        **at_one_end("model.exclusive", -1, lambda rows: rows.value_cosine.abs().max()),
    ),
}
