"""Claims of Dong et al. 2021 on LayerNorm: it plays no role in the collapse."""

import math
from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, below, within
from rankbench.judging.residual_left import layers_ahead, log10_left, of_collapse, share
from rankbench.papers.dong_2021.collapse import JUST_ABOVE, VANISHED, ahead

LAYERNORM = "Dong et al. 2021, sec. 3.3"
BOTH = ("attention_only", "attention_only_no_norm")  # with norms and without


def _collapses_without_norms(rows: pd.DataFrame) -> bool:
    last = rows[(rows.variant == "attention_only_no_norm") & (rows.layer == rows.layer.max())]
    return bool((10.0**last.log10_relative_residual).mean() < VANISHED)


def _a_tenth_of_it(rows: pd.DataFrame) -> pd.DataFrame:
    without = rows[rows.variant == "attention_only_no_norm"]
    with_norms = without.assign(log10_relative_residual=without.log10_relative_residual - 1.1)
    return pd.concat([without, with_norms.assign(variant="attention_only")])


# The same on what LayerNorm changes where attention alone collapses without it
_layernorm = partial(of_collapse, source=LAYERNORM, applies=_collapses_without_norms)

NORMS: dict[str, Claim] = {
    "dong_layernorm_collapses": _layernorm(
        statement="LayerNorm does not mitigate the collapse: where attention alone collapses without it, less than a "
        "thousandth of the last layer's tokens is residual with it, too (relative residual).",
        measure=lambda rows: share(log10_left(rows, "attention_only")),
        claimed=below(VANISHED),
        scale="positive",
        control=Control.beyond(
            "a relative residual of 0.0011 after every layer",
            log10_relative_residual=f"{math.log10(JUST_ABOVE * VANISHED)} * (layer > 0)",
        ),
    ),
    "dong_layernorm_plays_no_role": _layernorm(
        statement="LayerNorm plays no role: where attention alone collapses without it, it shifts the collapse by less "
        "than one layer to either side (log3 of the ratio of the logarithms of the relative residual, with over "
        "without).",
        measure=lambda rows: layers_ahead(*(log10_left(rows, variant) for variant in BOTH)),
        claimed=within(1.0),
        control=ahead("variant", "attention_only", of="attention_only_no_norm"),
    ),
    "dong_layernorm_leaves_as_much": _layernorm(
        statement="LayerNorm leaves as much: where attention alone collapses without it, the relative residual of the "
        "last layer is the same with it but for a factor of ten to either side (difference in decades; "
        "threshold: ours).",
        measure=lambda rows: log10_left(rows, "attention_only") - log10_left(rows, "attention_only_no_norm"),
        claimed=within(1.0),
        control=Control("with LayerNorm 1.1 decades less is left than without", _a_tenth_of_it),
    ),
}
