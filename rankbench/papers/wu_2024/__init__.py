"""Claims of Wu et al. 2024 on masks and LayerNorm, in answer to Dong et al. 2021."""

from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, below
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import check_no_overflow, log10_left, of_collapse, of_variant, share
from rankbench.judging.sweeps import in_order
from rankbench.papers.wu_2024.layernorm_rank import LAW

PAPERS = {"Wu et al. 2024": "On the role of attention masks and LayerNorm in transformers"}
LAWS = {"layernorm_rank": LAW}
WU = "Wu et al. 2024, On the role of attention masks and LayerNorm in transformers"


def _most_that_a_layer_leaves(rows: pd.DataFrame) -> float:
    """Share that a layer leaves, geometric mean over the earlier or the later half of the layers; the larger."""
    left = of_variant(rows, "attention_only_no_norm").set_index("layer").log10_relative_residual
    check_no_overflow(*left)
    half, last = left.index.max() // 2, left.index.max()
    return share(max((left[half] - left[0]) / half, (left[last] - left[half]) / (last - half)))


CLAIMS: dict[str, Claim] = {
    "wu_masked_attention_collapses": of_collapse(
        statement="Without LayerNorm attention alone collapses exponentially under any of these masks: in both halves "
        "of its depth layers leave less than all of the relative residual (share that a layer leaves, geometric mean "
        "over the half that leaves more).",
        source=WU,
        measure=_most_that_a_layer_leaves,
        claimed=below(1.0),
        scale="positive",
        sourced=True,
        since="2026-11-26",
        control=Control.beyond(
            "a relative residual that grows by .001 decades in every layer",
            log10_relative_residual=lambda rows: (
                rows.groupby(["seed", "weights", "variant"]).log10_relative_residual.transform("first")
                + 0.001 * rows.layer
            ),
        ),
    ),
    "wu_windows_slow_the_collapse": of_collapse(
        statement="Local masks slow the collapse down: without LayerNorm the narrower the window, the more is left "
        "(Kendall's rank correlation of window and relative residual of the last layer; below -.5, three pairs in four "
        "in this order, threshold: ours; changes of less than a tenth count as none).",
        source=WU,
        **in_order("model.window", -1, partial(log10_left, variant="attention_only_no_norm")),
    ),
    # the line: how far tokens still move after 600 layers at ratios next to a threshold, where they part most slowly
    "law_layernorm_rank": agrees(
        law="layernorm_rank",
        line=1e-3,
        statement="With some value matrices, and tokens that begin in fewer directions the earlier they stand, "
        "attention alone with a norm keeps tokens apart: any number of them is a direction of its own, by the ratio of "
        "the values",
        source="Wu et al. 2024, On the role of attention masks and LayerNorm in transformers; example derived here",
        control="values that are the identity",
    ),
}
