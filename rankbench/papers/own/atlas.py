"""Claims on which paths networks need, from their path-length spectra (table `spectrum`): of public checkpoints, and of
a grid of our own over depth.

Of checkpoints, each network counts once; one that does not have the number is left out. The claims speak of the last
states, where the module tells them. k95, k99 and k999 are the lengths from which on less than 5, 1 and .1 % of the
states are missing.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd

from rankbench.judging.claim import LEARNED, Claim, Control, above, below, require, within
from rankbench.judging.sweeps import between, rows_by_value, with_exchanged

SOURCE = "rankbench, experiment=atlas"
KINDS = ("states", "logits", "output")
# A tail exp(-k^2 / s), of whatever width s, has a second factor of ten that costs 1.30 times less than the first.
TAIL = math.log(1.25)
MOST_TOKENS = 0.9
LAYERS, SHARED = "model.layers", "model.shared_layers"
# A constant fraction of depth grows as its first power; a tenth below it counts as less.
FRACTION = 0.9
FEWEST_DEPTHS = 3
SHORTEST_TAIL = 8  # layers; fewer have no two factors of ten
# Halfway between a length that no longer grows with the layer and one that grows in proportion.
GROWTH = 0.5


def _lengths(rows: pd.DataFrame, weights: str = "trained") -> pd.DataFrame:
    """The rows of lengths of one kind of weights, about the states, by length."""
    of = next(kind for kind in KINDS if kind in set(rows.of))
    chosen = rows[(rows.of == of) & (rows.part == "length") & (rows.weights == weights)]
    require(not chosen.empty, f"no {weights} weights")
    return chosen.sort_values("path_length")


def _crossing(lengths: pd.DataFrame, error: float) -> float:
    """The length at which the error falls below this one for good, between two lengths on a logarithmic scale; nan if
    it does so before the first head or not until all paths are summed."""
    above_it = np.flatnonzero(lengths.error_upto >= error)
    after = lengths.iloc[above_it[-1] + 1 :] if len(above_it) else lengths[:0]
    if after.empty or after.iloc[0].error_below_floor:
        return math.nan
    last = lengths.iloc[above_it[-1]]
    fall = math.log(last.error_upto / after.iloc[0].error_upto)
    return last.path_length + math.log(last.error_upto / error) / fall


def _second_over_first(rows: pd.DataFrame) -> float:
    first, second, third = (_crossing(_lengths(rows), error) for error in (0.1, 0.01, 0.001))
    return math.log((third - second) / (second - first))


def _tokens_behind_mean(rows: pd.DataFrame) -> float:
    """Heads from the length at which the mean loss settles to that at which the tokens do. Both count from where they
    stay within .01 nats: a mean that passes through on its way to the other side has not settled."""
    lengths = _lengths(rows)
    is_near = lengths.excess_loss_upto.abs() < 0.01
    mean, tokens = is_near[::-1].cummin()[::-1], lengths.loss_settled_upto >= MOST_TOKENS
    return lengths.path_length[tokens].min() - lengths.path_length[mean].min()


def _is_trained(rows: pd.DataFrame) -> bool:
    return {"trained", "initialised"} <= set(rows.weights)


def _trained_over_fresh(rows: pd.DataFrame) -> float:
    """log of k99 of the trained weights over that of the fresh ones, each at least 1."""
    trained, fresh = (max(_lengths(rows, weights).k99.iloc[0], 1.0) for weights in ("trained", "initialised"))
    return math.log(trained / fresh)


def _has_learned(rows: pd.DataFrame) -> bool:
    """Whether the trained network solves its task: by its accuracy, or by a loss of a tenth of the fresh network's."""
    trained = _lengths(rows)
    if trained.whole_accuracy.isna().all():
        return trained.whole_loss.mean() < 0.1 * _lengths(rows, "initialised").whole_loss.mean()
    return trained.whole_accuracy.mean() >= LEARNED


def _power_of_depth(rows: pd.DataFrame) -> float:
    learned = {depth: of for depth, of in rows_by_value(rows, LAYERS).items() if _has_learned(of)}
    require(len(learned) >= FEWEST_DEPTHS, f"networks of fewer than {FEWEST_DEPTHS} depths have learned their task")
    needed = [max(_lengths(of).k99.iloc[0], 1.0) for of in learned.values()]
    return float(np.polyfit(np.log(list(learned)), np.log(needed), 1)[0])


def _variance_over_mean(rows: pd.DataFrame) -> float:
    lengths = _lengths(rows)
    mean = (lengths.path_length * lengths.share).sum()
    variance = ((lengths.path_length - mean) ** 2 * lengths.share).sum()
    require(mean > 0 and variance > 0, "shares of both signs have no mean or variance of length")
    return math.log(variance / mean)


def _log_of_masses(shared: pd.DataFrame, own: pd.DataFrame) -> float:
    return math.log(_lengths(shared).mass.sum() / _lengths(own).mass.sum())


def _is_deep(rows: pd.DataFrame) -> bool:
    return rows.path_length.max() >= SHORTEST_TAIL


def _growth_in_second_half(rows: pd.DataFrame) -> float:
    """p of k99 ~ layer^p between the middle layer and the last, with k99 at least 1."""
    layers = rows[(rows.part == "layer") & (rows.weights == "trained")].set_index("layer").k99
    require(not layers.empty, "no trained weights")
    last = int(layers.index.max())
    middle, end = (max(layers[number], 1.0) for number in (last // 2, last))
    return math.log(end / middle) / math.log(last / (last // 2))


def _has_layers(norm: str, rows: pd.DataFrame) -> bool:
    """Whether these are the layers of a deep network with norms in this place."""
    return _is_deep(rows) and set(rows.get("model.norm", ())) == {norm} and bool((rows.part == "layer").any())


def _untrained(rows: pd.DataFrame) -> str:
    """Say why the trained network counts as untrained; empty if it has learned its task."""
    reached = _lengths(rows)[["whole_accuracy", "whole_loss"]].mean()
    accuracy, loss = reached.map("{:.3g}".format)
    return "" if _has_learned(rows) else f"the network has not learned its task (accuracy {accuracy}, loss {loss})"


def _untrained_by_sharing(rows: pd.DataFrame) -> str:
    """The same of each value of model.shared_layers: both networks must have learned."""
    reasons = {value: _untrained(of_value) for value, of_value in rows_by_value(rows, SHARED).items()}
    return "; ".join(f"{SHARED}={value}: {reason}" for value, reason in reasons.items() if reason)


_of_networks = partial(
    Claim, source=SOURCE, table="spectrum", why_untrained=None, across=True, repeats="checkpoint", since="2026-11-27"
)

CLAIMS: dict[str, Claim] = {
    "atlas_tail": _of_networks(
        statement="The error that is left falls geometrically with length: the factor of ten from .01 to .001 costs as "
        "many heads as that from .1 to .01 (log of the ratio; within a factor of 1.25 to either side, threshold: ours, "
        "below the 1.30 of a Gaussian tail).",
        measure=_second_over_first,
        claimed=within(TAIL),
        applies=_is_trained,
        control=Control.beyond(
            "errors with a Gaussian tail",
            error_upto="exp(-8 * (path_length / path_length.max()) ** 2)",
            error_below_floor=0.0,
        ),
    ),
    "atlas_tokens_behind_mean": _of_networks(
        statement="The mean loss stays within .01 nats of the whole network's from fewer heads on than nine tokens in "
        "ten do of theirs: errors of tokens cancel in the mean (heads by which the tokens come later).",
        measure=_tokens_behind_mean,
        claimed=above(0.0),
        since="2026-11-29",
        applies=lambda rows: _is_trained(rows) and rows.loss_settled_upto.notna().any(),
        control=Control.beyond("tokens that are all close from the start", loss_settled_upto=1.0),
    ),
    "atlas_training_lengthens": _of_networks(
        statement="Trained weights need longer paths than fresh ones of the checkpoint's own standard deviation (log "
        "of the ratio of k99).",
        measure=_trained_over_fresh,
        claimed=above(0.0),
        applies=_is_trained,
        control=with_exchanged("weights", "trained", "initialised"),
    ),
    "atlas_hard_tokens": _of_networks(
        statement="Difficulty is not depth: the third of the tokens with the largest loss is within .01 nats of the "
        "whole network's distribution from as many heads on as the third with the smallest (within one head).",
        measure=lambda rows: _lengths(rows).hard_tokens_later.iloc[0],
        claimed=within(1.0),
        applies=lambda rows: _is_trained(rows) and bool(rows.hard_tokens_later.notna().any()),
        control=Control.beyond("hard tokens that need two heads more", hard_tokens_later=2.0),
    ),
}

GRID = "rankbench, experiment=depth_grid"
_of_grid = partial(Claim, source=GRID, table="spectrum")
_of_growth = partial(_of_grid, measure=_growth_in_second_half, why_untrained=_untrained)
_in_grid = partial(replace, source=GRID, across=False, repeats="seed", why_untrained=_untrained)

CLAIMS |= {
    "grid_no_fraction": _of_grid(
        statement="The length that a network needs is no constant fraction of its depth: k99 grows as depth to a power "
        "below 1 (slope of log k99 against log depth; threshold: ours, .9).",
        measure=_power_of_depth,
        claimed=below(FRACTION),
        why_untrained=None,  # networks that have not learned are left out
        along=LAYERS,
        control=Control(
            "half of the longest path needed at every depth",
            lambda rows: rows.assign(k99=rows[LAYERS].astype(float) / 2),
        ),
    ),
    "grid_variance": _of_grid(
        statement="The variance of length, weighted by shares, is below its mean, as that of a sum of independent "
        "choices (log of the ratio).",
        measure=_variance_over_mean,
        claimed=below(0.0),
        applies=_is_deep,
        why_untrained=_untrained,
        control=Control.beyond(
            "half of the output of length 0 and half of the longest paths",
            share=".5 * (path_length == 0) + .5 * (path_length == path_length.max())",
        ),
    ),
    "grid_shared_cancel": _of_grid(
        statement="Layers that share their weights make path sums that cancel: from 8 layers on, the masses of all "
        "lengths in the last states of a trained network sum to more than those of the same network whose layers have "
        "weights of their own (log of the ratio; above 0, however little).",
        **between(SHARED, "true", "false", _log_of_masses),
        claimed=above(0.0),
        applies=_is_deep,
        why_untrained=_untrained_by_sharing,
    ),
    "grid_tail": _in_grid(CLAIMS["atlas_tail"], applies=_is_deep),
    "grid_hard_tokens": _in_grid(CLAIMS["atlas_hard_tokens"]),
    "grid_post_norm_grows": _of_growth(
        statement="In one post-norm network the needed length grows to the end: from the middle layer to the last, k99 "
        "of the states grows as the layer to a power above a half (threshold: ours).",
        claimed=above(GROWTH),
        applies=partial(_has_layers, "post"),
        control=Control.beyond("one head needed after every layer", of="part == 'layer'", k99=1.0),
    ),
    "grid_pre_norm_saturates": _of_growth(
        statement="In one pre-norm network the needed length saturates: from the middle layer to the last, k99 of the "
        "states grows as the layer to a power below a half (threshold: ours).",
        claimed=below(GROWTH),
        applies=partial(_has_layers, "pre"),
        control=Control.beyond("the longest path needed after every layer", of="part == 'layer'", k99="layer"),
    ),
}
