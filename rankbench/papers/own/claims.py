"""Claims and checks of our own."""

from functools import partial

import numpy as np
import pandas as pd

from rankbench.judging.claim import Claim, Control, above, below, has_row, of_any_weights, require, within
from rankbench.judging.lipschitz import LOWER, bound_holds, of_layers
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import layers_ahead, left_at, log10_left
from rankbench.judging.sweeps import TENTH_MORE, rows_by_value

QUARTER = 0.25  # of a layer


def _off_exact(rows: pd.DataFrame) -> float:
    rows = rows[rows.p == np.inf]
    exact = rows[rows.kind == "exact"].set_index("tokens").value
    best = rows[rows.kind == "lower_bound"].groupby("tokens").value.max().reindex(exact.index)
    require(best.notna().all(), "no ascent at some number of tokens with an exact constant")
    return (best - exact).abs().max()


def _bound_grown(rows: pd.DataFrame) -> float:
    bounds = rows[np.isfinite(rows.lipschitz_inf)].set_index("step").sort_index().groupby("layer").lipschitz_inf
    return np.log10(bounds.last() / bounds.first()).min()


def _bound_is_free(rows: pd.DataFrame) -> bool:
    """Whether any bound changes in training; a layer that divides by its bound keeps it the same at every step."""
    if "lipschitz_inf" not in rows:
        return False
    bounds = rows[np.isfinite(rows.lipschitz_inf)].groupby(["seed", "layer"]).lipschitz_inf
    return bool((bounds.max() > (1 + 1e-9) * bounds.min()).any())


def _layers_between_ends(rows: pd.DataFrame, key: str) -> float:
    smallest, *_, largest = rows_by_value(rows, key, fewest=2).values()
    return layers_ahead(log10_left(smallest, "full"), log10_left(largest, "full"))


def _as_fast(key: str, statement: str, source: str) -> Claim:
    """Claim that attention alone collapses at the same depth at both ends of a sweep."""
    return of_any_weights(
        statement=f"{statement} (layers by which the smallest {key} is ahead of the largest; within a quarter of a "
        "layer, threshold: ours).",
        source=source,
        table="collapse",
        measure=partial(_layers_between_ends, key=key),
        claimed=within(QUARTER),
        along=key,
        control=Control.beyond(
            "half a layer less at the smallest value",
            of=f"`{key}` == `{key}`.min()",
            log10_relative_residual="3 ** .5 * log10_relative_residual",
        ),
        since="2026-11-27",
    )


CLAIMS: dict[str, Claim] = {
    "kim_own_bound_holds": bound_holds(
        "one_dimension",
        "that constant",
        statement="No measured Jacobian norm is above rankbench's own constant of one head of width 1, exact for p = "
        "inf at odd N and else a bound (smallest ratio of constant to norm).",
        source="rankbench",
    ),
    "kim_fig2_exact": of_layers(
        statement="At odd N the best lower bound is the exact constant 1 + 4 W0((N - 1) e^-3/2) of one head of width "
        "1 (largest distance, to either side).",
        source="rankbench",
        measure=_off_exact,
        claimed=below(1e-3),
        applies=partial(has_row, quantity="one_dimension", kind="exact", p=np.inf),
        is_check=True,
        control=Control.beyond("each ascent ends .002 higher", of=LOWER, value="value + 0.002"),
    ),
    "kim_bound_grows": of_any_weights(  # it speaks of the steps that were taken, however many
        statement="The steps of training make the bound on Lip_inf of every attention layer grow by more than a tenth "
        "(log10 of the last over the first, of the layer where it grows least; threshold: ours, log10 of 1.1).",
        source="rankbench, with the bound of Kim et al. 2021, Theorem 3.2",
        table="dynamics",
        measure=_bound_grown,
        claimed=above(TENTH_MORE),
        applies=_bound_is_free,
        control=Control.beyond("the same steps in reverse order", step="step.max() - step"),
    ),
    "knob_exclusive_keeps": left_at(
        key="model.exclusive",
        end=-1,
        statement="With exclusive heads",
        source="rankbench, knob_exclusive: not a claim of Zhai 2026",
        table="residual",
        exists=False,
    ),
    "knob_kv_groups": _as_fast(
        "model.kv_groups",
        "Heads that share one pair of keys and values lose the rank of attention alone as fast as heads of their own",
        source="rankbench, knob_kv_groups: not a claim of Ainslie et al. 2023",
    ),
    "knob_latent_width": _as_fast(
        "model.latent_width",
        "Heads whose keys and values come from a latent of one number lose the rank of attention alone as fast as "
        "heads that see all of the token",
        source="rankbench, knob_latent_width: not a claim of DeepSeek-AI 2024",
    ),
    # threshold: the first layers' squared norms err at random by sqrt(2/128), an eighth of themselves; twice that of
    # the largest share, a fifth
    "law_path_lengths": agrees(
        law="path_lengths",
        line=0.05,
        statement="The squared norms of a fresh pre-norm network's sums of paths are by length as Stirling numbers of "
        "the first kind: the mean length grows as the logarithm of depth",
        source="rankbench, from the variance of fresh networks in Sun et al. 2025",
        control="norms behind the branches in place of before them",
    ),
    # threshold: half of the smallest change of a rank
    "law_norm_ranks": agrees(
        law="norm_ranks",
        line=0.5,
        exact=True,
        statement="Norms lower ranks although they mix no tokens: of two tokens on each of m rays, RMSNorm and "
        "LayerNorm lower the affine rank from m to m - 1, and LayerNorm lowers a full rank by one",
        source="rankbench",
        control="the same tokens without a norm",
    ),
}
