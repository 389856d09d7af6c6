"""Claims of Xie et al. 2025: doubly stochastic mixing keeps the size of the states, and lets streams become one."""

import pandas as pd

from rankbench.judging.claim import Claim, below
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import ends, keeps
from rankbench.judging.sweeps import rows_at, with_exchanged

XIE = "Xie et al. 2025, mHC: Manifold-constrained hyper-connections"


def _growth_in_size(rows: pd.DataFrame) -> float:
    """Size of the state after the last layer over that of the embedding, or its inverse if it shrinks."""
    first, last = ends(rows)
    growth = (last.residual / last.relative_residual) / (first.residual / first.relative_residual)
    return max(growth, 1 / growth)


CLAIMS: dict[str, Claim] = {
    "knob_hyper_connections": keeps(
        statement="Doubly stochastic mixing matrices keep the size of the states within a factor of ten of the "
        "embedding's, and free ones that are as far from the identity do not (the factor).",
        source=XIE,
        table="residual",
        measure=lambda rows: _growth_in_size(rows_at(rows, "model.hyper_connections", "doubly_stochastic")),
        claimed=below(10.0),
        along="model.hyper_connections",
        control=with_exchanged("model.hyper_connections", "doubly_stochastic", "free"),
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
