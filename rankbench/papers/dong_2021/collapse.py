"""Claims of Dong et al. 2021 on the collapse of the residual, and on LayerNorm, which plays no role in it.

Residuals are judged in the table `collapse`, which follows them far below floating point, so rounding hides nothing.
"""

import math
from functools import partial

import pandas as pd

from rankbench.judging.claim import AtMost, Claim, Control, above, below, require, untrained_by_accuracy, within
from rankbench.judging.residual_left import (
    TENTH,
    check_no_overflow,
    keeps,
    layers_ahead,
    log10_kept,
    log10_left,
    of_collapse,
    of_embedding,
    of_variant,
    share,
)
from rankbench.judging.sweeps import at_value, between, in_order
from rankbench.papers.dong_2021.paths import whole_accuracy
from rankbench.runs.tables import last_of_layer

ALL_BUT_FEW = 0.95  # share of the sequences that counts as all of them
VANISHED = 0.001  # share of the relative residual below which a network has "converged to rank 1"
JUST_ABOVE = 1.1  # factor by which controls move a number to the other side of its threshold
# Share of the relative residual: dynamics.csv does not mark rounding, and a network may have trained in float32
SMALLEST_SHARE = 1e-4
RATE = "Dong et al. 2021, Theorem 2.3"
FIG2 = "Dong et al. 2021, sec. 4.1 and Fig. 2"
LAYERNORM = "Dong et al. 2021, sec. 3.3"
BOTH = ("attention_only", "attention_only_no_norm")  # with norms and without

# Measures: one seed's rows -> a number


def _collapsed(rows: pd.DataFrame, variant: str) -> float:
    require("share_collapsed" in rows, "the table does not count the sequences that collapse; analyse the run again")
    return of_variant(rows, variant).share_collapsed.iloc[-1]


def _more_left_by_retraining(removed: pd.DataFrame, retrained: pd.DataFrame) -> float:
    # in decades, not in layers: a network that is trained without skips need not collapse at all
    logs = [log10_kept(rows, "no_skip") for rows in (retrained, removed)]
    check_no_overflow(*logs)
    return logs[0] - logs[1]


def _shift_by_training(rows: pd.DataFrame) -> float:
    (variant,) = rows.variant.unique()
    trained, initialised = (rows[rows.weights == kind] for kind in ("trained", "initialised"))
    require(len(trained) and len(initialised), "this needs trained and initialised weights of the same network")
    return layers_ahead(log10_kept(trained, variant), log10_kept(initialised, variant))


def _from_cubic(rows: pd.DataFrame, variant: str) -> float:
    by_layer = of_variant(rows, variant)
    check_no_overflow(*by_layer.log10_relative_residual)
    later = by_layer[by_layer.layer > by_layer.layer.max() / 2].growth_exponent
    return max(later.fillna(1.0) - 3, key=abs)  # a relative residual that is not below 1 has not begun to collapse


def _layers_for_three_decades(rows: pd.DataFrame) -> float:
    """Number of layers after which a thousandth of the residual is left; one more than there are where none is."""
    residual = of_variant(rows, "attention_only_no_norm").drop_duplicates("layer").log10_residual
    return float((residual > residual.iloc[0] - 3).cummin().sum()) if residual.notna().all() else math.nan


def _above_bound(rows: pd.DataFrame) -> float:
    bounded = rows[rows.variant == "attention_only_no_norm"]
    is_bounded = "log10_bound" in rows and bounded.log10_bound.notna().any()
    require(is_bounded, "the lemma does not say that any layer contracts")
    return (bounded.log10_residual - bounded.log10_bound).max()


def _bounded(rows: pd.DataFrame, bound: str) -> pd.DataFrame:
    return rows[(rows.bound == bound) & rows.covered & (rows.layer > 0)]


def _smallest_slack(rows: pd.DataFrame, bound: str) -> float:
    bounded = _bounded(rows, bound)
    hidden, layers = bounded[bounded.slack_min.isna()].layer.nunique(), bounded.layer.nunique()
    require(hidden == 0, f"rounding hides the residual of {hidden} of {layers} layers")
    return bounded.slack_min.min()


def _left_without_contraction(rows: pd.DataFrame) -> float:
    by_layer = rows[rows.bound == "theorem"].sort_values("layer")
    return share(by_layer.log10_measured.iloc[-1] - by_layer.log10_measured.iloc[0])


def _largest_change_of_residual(rows: pd.DataFrame) -> float:
    states = rows[(rows.weights == "initialised") & (rows.variant == "full") & (rows.sublayer != "weights")]
    require(not states.empty, "the table has no initialised weights of the variant full")
    start = states[states.layer == 0].residual.iloc[0]
    return (states.residual / start - 1).abs().max()


def _least_kept_in_training(rows: pd.DataFrame) -> float:
    require("relative_residual" in rows, "the table has no relative_residual; add it to analysis.dynamics.metrics")
    states = pd.concat([last_of_layer(rows_of_step) for _, rows_of_step in rows.groupby("step")])
    by_step = states.pivot(index="step", columns="layer", values="relative_residual")
    least = (by_step.iloc[:, -1] / by_step.iloc[:, 0]).min(skipna=False)
    return least if not least < SMALLEST_SHARE else AtMost(SMALLEST_SHARE)


# Conditions: which rows a claim is about, and whether the networks have learned


def _differ(rows: pd.DataFrame, variant: str = "full", other: str = "no_skip", column: str = "log10_residual") -> bool:
    """Whether the states of two variants differ: by default, whether there are skips."""
    first, second = (rows[rows.variant == name][column].dropna().to_numpy() for name in (variant, other))
    return len(first) == len(second) > 0 and (first != second).any()


def _nowhere_contractive(rows: pd.DataFrame) -> bool:
    first = rows[(rows.bound == "theorem") & rows.source.str.startswith("Theorem") & (rows.layer == 1)]
    return len(first) > 0 and bool((first.contractive == 0).all())


# Controls: set-ups in which a claim must fail


def _as(**variants: str) -> Control:
    """Control that replaces the claim's variants by others of the same network: `replaced=replacement`."""

    def falsify(rows: pd.DataFrame) -> pd.DataFrame:
        return pd.concat([rows[rows.variant == new].assign(variant=old) for old, new in variants.items()])

    return Control(", ".join(f"{new} in place of {old}" for old, new in variants.items()), falsify)


def ahead(column: str, value: str, of: str) -> Control:
    """Control in which a collapse is log3 3.3 = 1.09 layers ahead of the measured one, and otherwise the same."""

    def falsify(rows: pd.DataFrame) -> pd.DataFrame:
        base = rows[rows[column] == of]
        logs = base.log10_relative_residual - of_embedding(base, "log10_relative_residual")
        slower, faster = (base.assign(log10_relative_residual=times * logs) for times in (1, 3.3))
        return pd.concat([slower, faster.assign(**{column: value})])

    return Control(f"for {column}={value} the logarithms of {column}={of} times 3.3, 1.09 layers ahead", falsify)


WITH_SKIPS = _as(no_skip="full", attention_only="no_mlp")
WITHOUT_SKIPS = _as(full="no_skip", no_mlp="attention_only")


def _with_skips(rows: pd.DataFrame) -> pd.DataFrame:
    return WITH_SKIPS.falsify(rows) if _differ(rows) else rows.assign(share_collapsed=ALL_BUT_FEW - 0.01)


# A claim on how many of the sequences of Fig. 2 collapse
_of_sequences = partial(of_collapse, source=FIG2, claimed=above(ALL_BUT_FEW), scale="share", since="2026-11-26")


def _bound_holds(bound: str, statement: str, source: str) -> Claim:
    """Claim that a bound of the table `bounds` holds wherever the paper says that it does.

    The proofs have gaps (rankbench.measures.dong_theory), so a bound that does not hold is a finding.
    """
    return Claim(
        statement=statement,
        source=source,
        table="bounds",
        measure=partial(_smallest_slack, bound=bound),
        claimed=above(0.0),
        by=("weights",),
        why_untrained=None,
        exact=True,
        applies=lambda rows: len(_bounded(rows, bound)) > 0,
        control=Control.beyond(
            "bounds lowered until the tightest is .01 decades below the residual",
            slack_min=lambda rows: rows.slack_min - _smallest_slack(rows, bound) - 0.01,
        ),
    )


COLLAPSE: dict[str, Claim] = {
    "dong_fig2_learns": Claim(
        statement="A network with skips learns to sort (accuracy above .95), so its weights are those of a trained "
        "network, as the other claims take them to be.",
        source=FIG2,
        table="residual",
        measure=whole_accuracy,
        claimed=above(0.95),
        scale="share",
        why_untrained=None,
        is_check=True,
        applies=partial(_differ, column="residual"),
        since="2026-11-26",
        control=Control.beyond("an accuracy of .94 in every seed", whole_accuracy=0.94),
    ),
    "dong_fig2_collapses": _of_sequences(
        statement="Without skips, with MLPs or without, less than a tenth of the embedding's relative residual is left "
        "after the last layer of all sequences but a few (share of the sequences, the smaller of the two; above .95, "
        "threshold: ours).",
        measure=lambda rows: min(_collapsed(rows, variant) for variant in ("no_skip", "attention_only")),
        control=Control(f"{WITH_SKIPS.statement}; .94 of the sequences where the network has no skips", _with_skips),
    ),
    "dong_fig2_skips": _of_sequences(
        statement="With skips, with MLPs or without, more than a tenth of the embedding's relative residual is left "
        "after the last layer of all sequences but a few (share of the sequences, the smaller of the two; above .95, "
        "threshold: ours).",
        measure=lambda rows: 1 - max(_collapsed(rows, variant) for variant in ("full", "no_mlp")),
        applies=_differ,
        control=WITHOUT_SKIPS,
    ),
    "dong_fig2_mlps_do_not_help": of_collapse(
        statement="Once the skips of a Transformer are removed its MLPs do not seem to help: they delay the collapse "
        "by less than one layer (log3 of the ratio of the logarithms of what is left, without MLPs over with them).",
        source="Dong et al. 2021, sec. 4.1",
        measure=lambda rows: layers_ahead(log10_kept(rows, "attention_only"), log10_kept(rows, "no_skip")),
        claimed=below(1.0),
        applies=lambda rows: _differ(rows) and _differ(rows, "no_skip", "attention_only"),
        control=ahead("variant", "attention_only", of="no_skip"),
    ),
    "dong_fig2_retrained_slower": of_collapse(
        statement="A network with MLPs that is trained without skips collapses more slowly than one whose skips are "
        "removed after training (decades of the relative residual by which more is left after the last layer).",
        source="Dong et al. 2021, sec. 4.1, expected there",
        claimed=above(0.0),
        applies=lambda rows: {"transformer", "san_mlp"} <= set(rows.model) and set(rows.weights) == {"trained"},
        why_untrained=lambda rows: untrained_by_accuracy(rows[rows.model == "san_mlp"]),
        **between("model", "transformer", "san_mlp", _more_left_by_retraining),
    ),
    "dong_fig2_trained_alike": Claim(
        statement="Without skips, with MLPs (no_skip) or without (attention_only), a network collapses before and "
        "after training alike: training shifts the collapse by less than one layer to either side (log3 of the ratio "
        "of the logarithms of what is left).",
        source=FIG2,
        table="collapse",
        measure=_shift_by_training,
        claimed=within(1.0),
        by=("variant",),
        applies=lambda rows: rows.variant.isin(["no_skip", "attention_only"]).all(),
        control=ahead("weights", "trained", of="initialised"),
    ),
    "dong_thm_rate_cubic": of_collapse(
        statement="Attention alone cubes the residual: each of the later half of the layers triples its logarithm "
        "(growth exponent less 3, of the layer that is farthest from it; threshold: ours, .1 to either side).",
        source=RATE,
        measure=partial(_from_cubic, variant="attention_only_no_norm"),
        claimed=within(0.1),
        since="2026-11-26",
        control=_as(attention_only_no_norm="no_mlp"),
    ),
    "dong_thm_rate_few_layers": of_collapse(
        statement="For a decline of three orders of magnitude the residual of attention alone takes just two or three "
        "layers, not a dozen (number of layers).",
        source="Dong et al. 2021, sec. 2.2",
        measure=_layers_for_three_decades,
        claimed=below(3.5),
        sourced=True,
        control=Control.beyond("a residual that each layer halves", log10_residual=f"1.0 - {math.log10(2)} * layer"),
    ),
    "dong_thm_rate_bound": of_collapse(
        statement="The residual of attention alone stays below the theorem's bound, in every layer from the first on "
        "that the bound says contracts (log10 of residual over bound, the largest).",
        source=RATE,
        measure=_above_bound,
        claimed=below(0.0),
        exact=True,
        control=Control.beyond(
            "each residual raised until the closest is 1.02 times its bound",
            log10_residual=lambda rows: rows.log10_residual - _above_bound(rows) + 0.01,
        ),
    ),
    "dong_thm_rate_mlp_cubic": of_collapse(
        statement="With MLPs and without skips the decay is still cubic in each of the later half of the layers "
        "(growth exponent less 3, of the layer that is farthest from it; threshold: ours, .1 to either side).",
        source="Dong et al. 2021, Corollary 3.2",
        measure=partial(_from_cubic, variant="no_skip"),
        claimed=within(0.1),
        since="2026-11-26",
        control=Control.beyond("growth exponents of 2.89 in every layer", growth_exponent=3 - JUST_ABOVE * 0.1),
    ),
    "dong_thm_rate_mlp_slows": of_collapse(
        statement="The larger the Lipschitz constant of the MLPs (here their weights are mlp_gain times as large), the "
        "more residual is left without skips (Kendall's rank correlation of mlp_gain and the residual of the last "
        "layer; above .5, three pairs in four in this order, threshold: ours; changes of less than a tenth count as "
        "none).",
        source="Dong et al. 2021, sec. 3.2",
        **in_order("model.mlp_gain", +1, lambda rows: of_variant(rows, "no_skip").log10_residual.iloc[-1]),
    ),
    "dong_thm_rate_skips": of_collapse(
        statement="Skips prevent the collapse: more than a tenth of the embedding's relative residual is left after "
        "the last layer of attention and skips (the share that is left).",
        source="Dong et al. 2021, sec. 3.1",
        measure=lambda rows: share(log10_kept(rows, "no_mlp")),
        claimed=above(TENTH),
        scale="positive",
        control=_as(no_mlp="attention_only_no_norm"),
    ),
    "dong_bound_holds": _bound_holds(
        "theorem",
        statement="The residual after every layer is below the bound of Theorem 2.2 or 2.3, Corollary 3.1 or 3.2, in "
        "every sequence (smallest slack in decades; where the bound grows with depth the first layer's).",
        source="Dong et al. 2021, Theorems 2.2 and 2.3, Corollaries 3.1 and 3.2",
    ),
    "dong_lemma_holds": _bound_holds(
        "layer",
        statement="Every layer by itself keeps the residual below the lemmas' bound, computed from the residual that "
        "enters it, in every sequence (smallest slack in decades).",
        source="Dong et al. 2021, Lemmas A.1 and A.2, eq. 23 and app. A.6",
    ),
    "dong_collapse_beyond_bound": Claim(
        statement="The region of convergence is larger than the bound's: attention alone collapses though the bound "
        "falls for no sequence (residual of the last layer over that of the embedding, below a thousandth).",
        source="Dong et al. 2021, sec. 2.2 and 2.3",
        table="bounds",
        measure=_left_without_contraction,
        claimed=below(VANISHED),
        scale="positive",
        by=("weights",),
        why_untrained=None,
        applies=_nowhere_contractive,
        control=Control.beyond(
            ".0011 of the residual left in every layer",
            of="layer > 0",
            log10_measured=lambda rows: of_embedding(rows, "log10_measured") + math.log10(JUST_ABOVE * VANISHED),
        ),
    ),
    "dong_claim31": Claim(
        statement="With skips and W_V = 0 the residual is the same at every depth (largest relative change).",
        source="Dong et al. 2021, Claim 3.1",
        table="residual",
        measure=_largest_change_of_residual,
        claimed=below(1e-12),
        why_untrained=None,
        is_check=True,
        exact=True,
        control=Control.beyond(
            "the residual of the last layer off by 1e-11 of itself",
            of="layer == layer.max()",
            residual="residual * (1 + 1e-11)",
        ),
    ),
    "knob_dynamics": keeps(
        statement="With skips more than a tenth of the embedding's relative residual is left at every moment of "
        "training, and without them it is not (the share that is left, at the step at which it is smallest).",
        source="Dong et al. 2021, sec. 4.1",
        table="dynamics",
        claimed=above(TENTH),
        **at_value("model", "transformer", "transformer_no_skip", _least_kept_in_training),
    ),
}


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
