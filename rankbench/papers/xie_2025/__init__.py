"""Claims of Xie et al. 2025: doubly stochastic mixing keeps the size of the states, and makes the streams one."""

import pandas as pd

from rankbench.judging.claim import Claim, Control, below
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import ends, keeps
from rankbench.judging.sweeps import at_value
from rankbench.papers.xie_2025.stream_collapse import LAW

PAPERS = {"Xie et al. 2025": "mHC: Manifold-constrained hyper-connections"}
LAWS = {"stream_collapse": LAW}
XIE = "Xie et al. 2025, mHC: Manifold-constrained hyper-connections"


def _growth_in_size(rows: pd.DataFrame) -> float:
    """Size of the state after the last layer over that of the embedding, or its inverse if it shrinks."""
    first, last = ends(rows)
    growth = (last.residual / last.relative_residual) / (first.residual / first.relative_residual)
    return max(growth, 1 / growth)


def _trained_streams(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the sub-layers of trained networks that mix streams."""
    return rows[(rows.weights == "trained") & (rows.variant == "full")].dropna(subset="mixing_gain")


def _nearer_to_identity(rows: pd.DataFrame) -> float:
    """Mean distance of the mixing matrices to the identity over that to the matrix that makes the streams equal."""
    streams = _trained_streams(rows)
    return streams.mixing_from_identity.mean() / streams.mixing_from_mean.mean()


CLAIMS: dict[str, Claim] = {
    "knob_hyper_connections": keeps(
        statement="Doubly stochastic mixing matrices keep the size of the states within a factor of ten of the "
        "embedding's, and free ones that are as far from the identity do not (the factor).",
        source=XIE,
        table="residual",
        claimed=below(10.0),
        **at_value("model.hyper_connections", "doubly_stochastic", "free", _growth_in_size),
    ),
    "xie_mixing_near_identity": keeps(
        statement="In trained networks the mixing of the streams is nearer to the identity than to the matrix that "
        "makes them equal (ratio of the mean distances).",
        source=f"{XIE}; measured here",
        table="residual",
        measure=_nearer_to_identity,
        claimed=below(1.0),
        sourced=True,
        control=Control.beyond(
            "the two distances exchanged",
            mixing_from_identity="mixing_from_mean",
            mixing_from_mean="mixing_from_identity",
        ),
    ),
    "xie_streams_become_one": keeps(
        statement="With doubly stochastic mixing the streams of trained networks are one, and with free mixing they "
        "are not (distance from their mean over their size, behind the sub-layer where it is largest; threshold: "
        "ours).",
        source=f"{XIE}; measured here",
        table="residual",
        claimed=below(0.1),
        **at_value(
            "model.hyper_connections",
            "doubly_stochastic",
            "free",
            lambda rows: _trained_streams(rows).stream_residual.max(),
        ),
    ),
    # the line: three times the random error of 4 networks, whose tokens share the permutations
    "law_stream_collapse": agrees(
        law="stream_collapse",
        line=0.1,
        statement="Doubly stochastic mixing at a distance e from the identity keeps what makes the streams of a token "
        "differ for about 1/e sub-layers, so that with depth the streams become one",
        source=f"{XIE}; closed form derived here",
        control="mixing by the identity, which keeps the streams apart",
    ),
}
