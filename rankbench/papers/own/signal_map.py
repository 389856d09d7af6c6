"""Claims on the map of depth and inverse temperature (table `signal_map`): one number for each draw of all networks."""

from functools import partial

import pandas as pd

from rankbench.judging.claim import Claim, Control, below, require
from rankbench.judging.sweeps import MOSTLY

SOURCE = "rankbench, experiment=depth_temperature_map"


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that theory covers, of more than one depth and temperature."""
    cells = rows.dropna(subset=["theory_cosine"])
    is_map = cells.layers.nunique() > 1 and cells.beta.nunique() > 1
    require(is_map, "this needs a map over model.layers and model.query_gains")
    return cells


def _distance(rows: pd.DataFrame) -> float:
    cells = _cells(rows)
    return (cells.theory_cosine - cells.initial_cosine).abs().mean()


def _rank_correlation(rows: pd.DataFrame) -> float:
    cells = _cells(rows)
    return cells.theory_cosine.rank().corr(cells.test_accuracy.rank())


def _lost_above(rows: pd.DataFrame) -> float:
    cells = _cells(rows)
    is_above = cells.beta > cells.critical_beta
    by_depth = cells.groupby(["layers", is_above]).test_accuracy.mean().unstack()
    require(len(by_depth.columns) > 1, "all inverse temperatures lie on one side of the critical one")
    return (by_depth[True] - by_depth[False]).mean()


_of_map = partial(
    Claim, source=SOURCE, table="signal_map", why_untrained=None, across=True, repeats="draw", since="2026-11-27"
)

CLAIMS: dict[str, Claim] = {
    "map_theory": _of_map(
        statement="Theory's cosine of two tokens after the last layer is that of initialised networks (mean distance "
        "over the map; threshold: ours, that of law_signal_propagation).",
        measure=_distance,
        claimed=below(0.12),
        control=Control.beyond("tokens that stay as far apart as at the start", theory_cosine=0.0),
    ),
    "map_collapse_hurts": _of_map(
        statement="Where theory has tokens alike after the last layer, trained accuracy is lower (Spearman's rank "
        "correlation over the map).",
        measure=_rank_correlation,
        claimed=below(-MOSTLY),
        control=Control.beyond("cosines in reverse order", theory_cosine="1 - theory_cosine"),
    ),
    "map_condensation_hurts": _of_map(
        statement="Networks that start above the critical inverse temperature, where attention concentrates on few "
        "tokens, learn less than those of the same depth below it (difference of accuracies, mean over depths).",
        measure=_lost_above,
        claimed=below(0.0),
        control=Control.beyond("inverse temperatures mirrored at the critical one", beta="critical_beta ** 2 / beta"),
    ),
}
