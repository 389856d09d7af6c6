"""Claims of later papers on knobs that change how fast tokens become alike, as tests on the tables.

Each knob has a claim on its direction, judged over all values of the sweep, and a claim on its far end, where the paper
says that the collapse is over. A claim about "enough" of a knob says that such a value exists: one example is enough.
"""

import math
from functools import partial

import pandas as pd

from rankbench.claims.claim import AtMost, Claim, Control, NotMeasurable, above, below, exact_check
from rankbench.claims.dong_collapse import TENTH, log10_kept, share
from rankbench.claims.sweeps import (
    at_one_end,
    from_other_end,
    in_order,
    log10_of,
    rows_at,
    rows_by_value,
    with_exchanged,
)
from rankbench.runs.tables import last_of_layer

HALF = 0.5  # share of a rank or an entropy above which it counts as kept
# Share of the relative residual: dynamics.csv does not mark rounding, and a network may have trained in float32
ROUNDING = 1e-4

# Measures: one seed's rows -> a number


def kept_followed(rows: pd.DataFrame) -> float:
    """Share of the embedding's relative residual that the whole network leaves; table `collapse`."""
    return share(log10_kept(rows, "full"))


def kept_measured(rows: pd.DataFrame) -> float:
    """Share of the embedding's relative residual that is left; table `residual`, for networks that `collapse` excludes.

    It is a bound where a sequence is below its noise floor: the larger of its residual and the floor, over the size of
    the tokens.
    """
    first, last = _ends(rows)
    kept = last.relative_residual / first.relative_residual
    if not last.below_floor:
        return kept
    if not last.residual > 0:
        raise NotMeasurable("rounding has left nothing of the residual")
    return AtMost(kept * max(1.0, last.noise_floor / last.residual))


def _log10_kept_measured(rows: pd.DataFrame) -> float:
    return log10_of(kept_measured(rows))


def _ends(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Rows of the embedding and of the state after the last layer."""
    states = last_of_layer(rows[rows.variant == "full"])
    first, last = (states[states.layer == layer].iloc[0] for layer in (0, states.layer.max()))
    if not math.isfinite(last.relative_residual):
        raise NotMeasurable("the tokens after the last layer are all zero")
    return first, last


def _rank_kept(rows: pd.DataFrame) -> float:
    first, last = _ends(rows)
    return last.effective_rank / first.effective_rank


def _rank_of_residual_kept(rows: pd.DataFrame) -> float:
    first, last = _ends(rows)
    if last.below_floor:
        raise NotMeasurable("the residual after the last layer is rounding")
    return last.effective_rank_centred / first.effective_rank_centred


def _kept_with_scaled_branches(rows: pd.DataFrame) -> float:
    """Share that is left at the largest branch scale of at most 1/sqrt(layers), up to its printed digits."""
    largest = 1.01 / math.sqrt(rows.layer.max())
    small = [of_value for value, of_value in rows_by_value(rows, "model.branch_scale").items() if value <= largest]
    if not small:
        raise NotMeasurable("the sweep has no model.branch_scale of 1/sqrt(model.layers) or less")
    return kept_followed(small[-1])


def _entropy_kept(rows: pd.DataFrame) -> float:
    """Attention entropy (mean over heads) at the last step over that at the first, in the layer that loses most."""
    of_sigma = rows_at(rows, "model.weight_norm", "sigma")
    weights = of_sigma[of_sigma.sublayer == "weights"]
    by_layer = weights.groupby(["layer", "step"]).attention_entropy.mean().unstack()
    return (by_layer.iloc[:, -1] / by_layer.iloc[:, 0]).min()


def _least_kept_in_training(rows: pd.DataFrame) -> float:
    """Smallest share over the steps that the network with skips keeps."""
    with_skips = rows_at(rows, "model", "transformer")
    states = pd.concat([last_of_layer(rows_of_step) for _, rows_of_step in with_skips.groupby("step")])
    by_step = states.pivot(index="step", columns="layer", values="relative_residual")
    least = (by_step.iloc[:, -1] / by_step.iloc[:, 0]).min()
    return least if not least < ROUNDING else AtMost(ROUNDING)


def mean_path_length(rows: pd.DataFrame) -> float:
    """Mean length of the paths, each length weighted with the size of its sum; table `path_mass`."""
    lengths = rows[rows.part == "length"]
    return (lengths.path_length * lengths.mass).sum() / lengths.mass.sum()


def _length_over(rows: pd.DataFrame, key: str, value: str, other: str) -> float:
    return mean_path_length(rows_at(rows, key, value)) / mean_path_length(rows_at(rows, key, other))


def _growth_in_size(rows: pd.DataFrame) -> float:
    """Size of the state after the last layer over that of the embedding, or its inverse if it shrinks."""
    first, last = _ends(rows)
    growth = (last.residual / last.relative_residual) / (first.residual / first.relative_residual)
    return max(growth, 1 / growth)


# A claim that more than a share of something is kept, whether or not a network has learned
_keeps = partial(Claim, scale="positive", why_untrained=None)

# Claims on fresh networks: the direction, and the share left at one end of the sweep (0: the smallest value)


def _trend(key: str, side: int, statement: str, source: str, table: str = "collapse") -> Claim:
    """Claim that what is left grows (side=+1) or falls (-1) with the key."""
    measure = partial(log10_kept, variant="full") if table == "collapse" else _log10_kept_measured
    line = "above .5" if side > 0 else "below -.5"
    return Claim(
        statement=f"{statement} (Kendall's rank correlation of {key} and the share of the embedding's relative "
        f"residual that is left; {line}, three pairs in four in this order, which is our line; changes of less than a "
        "tenth count as none).",
        source=source,
        table=table,
        why_untrained=None,
        **in_order(key, side, measure),
    )


def _left_at(key: str, end: int, statement: str, source: str, table: str = "collapse", exists: bool = True) -> Claim:
    return _keeps(
        statement=f"{statement} more than a tenth of the embedding's relative residual is left after the last layer "
        f"(the share at the {'largest' if end else 'smallest'} {key} of the sweep).",
        source=source,
        table=table,
        claimed=above(TENTH),
        exists=exists,
        **at_one_end(key, end, kept_followed if table == "collapse" else kept_measured),
    )


def _shorter(key: str, statement: str, source: str) -> Claim:
    return Claim(
        statement=f"{statement} (Kendall's rank correlation of {key} and their mean length, each length weighted with "
        "the size of its sum; below -.5, three pairs in four in this order, which is our line; changes of less than a "
        "tenth count as none).",
        source=source,
        table="path_mass",
        floor="below_floor",
        why_untrained=None,
        **in_order(key, -1, lambda rows: math.log10(mean_path_length(rows))),
    )


ZHOU = "Zhou et al. 2024, Value residual learning"
CHEN = "Chen et al. 2020, Simple and deep graph convolutional networks (initial residual)"
KARAGODIN = "Karagodin, Ge, Polyanskiy and Rigollet 2025, Normalization in attention dynamics"
XIE = "Xie et al. 2025, mHC: Manifold-constrained hyper-connections"
NOCI = "Noci et al. 2022, Signal propagation in transformers"
JOSEPH = "Joseph et al. 2024, Lambda-skip connections"
GIORLANDINO = "Giorlandino and Goldt 2025, Two failure modes of deep transformers"
ALI = "Ali, Galanti and Wolf 2023, Centered self-attention layers"
HE = "He et al. 2023, Deep transformers without shortcuts"
WANG = "Wang et al. 2022, Anti-oversmoothing in deep vision transformers"

KNOBS: dict[str, Claim] = {
    "knob_residual_scale": _trend(
        key="model.branch_scale",
        side=-1,
        statement="The smaller the scale of the branches beside the skips, the more is left",
        source=NOCI,
    ),
    "knob_residual_scale_root": _keeps(
        statement="With branches scaled by 1/sqrt(layers) more than a tenth of the embedding's relative residual is "
        "left after the last layer (the share that is left).",
        source=NOCI,
        table="collapse",
        measure=_kept_with_scaled_branches,
        claimed=above(TENTH),
        along="model.branch_scale",
        control=from_other_end("model.branch_scale", 0),
    ),
    "knob_lambda_skip": _trend(
        key="model.skip_scale", side=+1, statement="The stronger the skip, the more is left", source=JOSEPH
    ),
    "knob_lambda_skip_enough": _left_at(
        key="model.skip_scale", end=-1, statement="With a skip that is strong enough", source=JOSEPH
    ),
    "knob_temperature": _trend(
        key="model.temperature", side=-1, statement="The lower the temperature, the more is left", source=GIORLANDINO
    ),
    "knob_temperature_enough": _left_at(
        key="model.temperature", end=0, statement="At a temperature that is low enough", source=GIORLANDINO
    ),
    # the opposite of knob_temperature: one of the two fails
    "blog_saturation_collapses": _trend(
        key="model.temperature",
        side=+1,
        statement="Saturated softmax makes tokens alike: the lower the temperature, the less is left",
        source="Attention-paths blog, rank collapse, cause 1",
    ),
    "knob_mean_removal": _left_at(
        key="model.mix_uniform",
        end=0,
        statement="With the mean removed from attention",
        source=ALI,
        table="residual",
        exists=False,
    ),
    "knob_mean_removal_rank": _keeps(
        statement="With the mean removed from attention more than half of the tokens' effective rank is left after the "
        "last layer (rank over that of the embedding).",
        source=ALI,
        table="residual",
        claimed=above(HALF),
        **at_one_end("model.mix_uniform", 0, _rank_kept),
    ),
    "knob_identity_mix": _trend(
        key="model.mix_attention",
        side=-1,
        statement="Without skips, the less of attention there is beside the identity, the more is left",
        source=HE,
        table="residual",
    ),
    "knob_identity_mix_enough": _left_at(
        key="model.mix_attention",
        end=0,
        statement="Without skips, with little enough attention beside the identity",
        source=HE,
        table="residual",
    ),
    "knob_uniform_mix": _trend(
        key="model.mix_uniform",
        side=-1,
        statement="Attention's uniform part, a low-pass filter, makes tokens alike: the less of it there is, the more "
        "is left",
        source=WANG,
        table="residual",
    ),
    "knob_orthogonal_values": _keeps(
        statement="With orthogonal value maps more than half of the residual's effective rank is left after the last "
        "layer (rank over that of the embedding).",
        source="Saxe et al. 2014, Exact solutions to the nonlinear dynamics of learning",
        table="residual",
        measure=lambda rows: _rank_of_residual_kept(rows_at(rows, "model.values", "orthogonal")),
        claimed=above(HALF),
        along="model.values",
        is_check=True,
        control=with_exchanged("model.values", "orthogonal", "free"),
    ),
    "knob_value_residual": _trend(
        key="model.value_residual",
        side=+1,
        statement="The more of the first layer's values in later layers, the more is left",
        source=ZHOU,
        table="residual",
    ),
    "knob_value_residual_enough": _left_at(
        key="model.value_residual",
        end=-1,
        statement="With enough of the first layer's values in later layers",
        source=ZHOU,
        table="residual",
    ),
    "knob_embedding_skip": _trend(
        key="model.embedding_skip",
        side=+1,
        statement="The more of the embedding enters each layer, the more is left",
        source=CHEN,
        table="residual",
    ),
    "knob_embedding_skip_enough": _left_at(
        key="model.embedding_skip",
        end=-1,
        statement="With enough of the embedding in the input of each layer",
        source=CHEN,
        table="residual",
    ),
    "knob_norm_place": _keeps(
        statement="With peri-norm more than a tenth of the embedding's relative residual is left after the last layer, "
        "and with post-norm it is not (the share that is left).",
        source=KARAGODIN,
        table="collapse",
        measure=lambda rows: kept_followed(rows_at(rows, "model.norm", "peri")),
        claimed=above(TENTH),
        along="model.norm",
        control=with_exchanged("model.norm", "peri", "post"),
    ),
    "knob_hyper_connections": _keeps(
        statement="Doubly stochastic mixing matrices keep the size of the states within a factor of ten of the "
        "embedding's, and free ones that are as far from the identity do not (the factor).",
        source=XIE,
        table="residual",
        measure=lambda rows: _growth_in_size(rows_at(rows, "model.hyper_connections", "doubly_stochastic")),
        claimed=below(10.0),
        along="model.hyper_connections",
        control=with_exchanged("model.hyper_connections", "doubly_stochastic", "free"),
    ),
    "paths_value_residual": _shorter(
        key="model.value_residual",
        statement="The more of the first layer's values in later layers, the shorter are the paths",
        source=ZHOU,
    ),
    "paths_embedding_skip": _shorter(
        key="model.embedding_skip",
        statement="The more of the embedding enters each layer, the shorter are the paths",
        source=CHEN,
    ),
    "paths_norm_place": _keeps(
        statement="With peri-norm, whose branches have the size of their norm, paths are more than twice as long as "
        "with pre-norm (mean length, each length weighted with the size of its sum, over that with pre-norm).",
        source=KARAGODIN,
        table="path_mass",
        floor="below_floor",
        measure=partial(_length_over, key="model.norm", value="peri", other="pre"),
        claimed=above(2.0),
        along="model.norm",
        control=with_exchanged("model.norm", "peri", "pre"),
    ),
    "paths_hyper_connections": exact_check(
        statement="Fresh hyper-connections have the paths of plain skips: their mean lengths differ by rounding alone.",
        source="Zhu et al. 2024, Hyper-connections, sec. 2.3",
        table="path_mass",
        floor="below_floor",
        measure=lambda rows: abs(_length_over(rows, "model.hyper_connections", "free", "none") - 1),
        claimed=below(1e-9),
        along="model.hyper_connections",
        control=Control.beyond(
            "paths of plain skips that are longer by one",
            path_length=lambda rows: rows.path_length + (rows["model.hyper_connections"] == "none"),
        ),
    ),
    "knob_sigma_reparam": _keeps(
        statement="With weights over their spectral norms no layer loses more than half of its attention's entropy in "
        "training, and without them one does (entropy at the last step over that at the first, the layer that loses "
        "most).",
        source="Zhai et al. 2023, Preventing attention entropy collapse",
        table="dynamics",
        measure=_entropy_kept,
        claimed=above(HALF),
        along="model.weight_norm",
        control=with_exchanged("model.weight_norm", "sigma", "none"),
    ),
    "knob_exclusive_keeps": _left_at(
        key="model.exclusive",
        end=-1,
        statement="With exclusive heads",
        source="rankbench, knob_exclusive: not a claim of Zhai 2026",
        table="residual",
        exists=False,
    ),
    "knob_exclusive": exact_check(
        statement="The output of an exclusive head is orthogonal to the token's own value in every layer, and that of "
        "a plain head is not (largest |mean cosine| of a head).",
        source="Zhai 2026, Exclusive self-attention",
        table="attention",
        claimed=below(1e-5),  # rounding of float32
        **at_one_end("model.exclusive", -1, lambda rows: rows.value_cosine.abs().max()),
    ),
    "knob_dynamics": _keeps(
        statement="With skips more than a tenth of the embedding's relative residual is left at every moment of "
        "training, and without them it is not (the share that is left, at the step at which it is smallest).",
        source="Dong et al. 2021, sec. 4.1",
        table="dynamics",
        measure=_least_kept_in_training,
        claimed=above(TENTH),
        along="model",
        control=with_exchanged("model", "transformer", "transformer_no_skip"),
    ),
}
