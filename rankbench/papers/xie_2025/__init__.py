"""Streams that collapse: what doubly stochastic mixing leaves of their differences (Xie et al. 2025, mHC).

Hyper-connections turn the S streams X of a token into M X + w y, where y is what the sub-layer writes. Here w writes to
one stream, the streams begin equal, and y has variance 1 and is independent of the streams, as with fresh weights
behind a norm. A doubly stochastic M keeps the streams' mean and multiplies the expected squared size of their
differences by q:

    average       M = (1 - e) I + e 1 1^T / S                    q = (1 - e)^2
    permutation   M = (1 - e) I + e Pi, Pi a random permutation  q = (1 - e)^2 + e^2

The second holds because the mean of Pi is 1 1^T / S, which takes the differences to 0. After l sub-layers the
differences have the squared size C = (1 - 1/S) (1 + q + ... + q^(l-1)) and the means S + l/S, so that the streams are
sqrt(C / (C + S + l/S)) apart (rankbench.measures.streams.stream_residual). However near to I, mixing forgets what was
written more than about 1/e sub-layers ago: from then on C stands still while the mean goes on growing, and the streams
become one. The closed form is derived here.

Control: M = I, which forgets nothing. The streams end sqrt(1 - 1/S) apart.

Shapes: N token, D width, S stream.
"""

import pandas as pd
import torch
from torch import Tensor

from rankbench.judging.claim import Claim, Control, below
from rankbench.judging.of_laws import agrees
from rankbench.judging.residual_left import ends, keeps
from rankbench.judging.sweeps import at_value
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.measures.streams import streams_by_layer
from rankbench.model.bare import BY_ITSELF, drawn_network

STREAMS = 4
MIXES = {"average, e = 0.1": ("average", 0.1), "average, e = 0.02": ("average", 0.02)}
MIXES |= {"permutation, e = 0.3": ("permutation", 0.3)}
KEYS = BY_ITSELF | {"norm": "pre", "hyper_connections": "free", "streams": STREAMS}


def kept(kind: str, share: float) -> float:
    """q, the factor of the squared differences; share: e."""
    return (1 - share) ** 2 + (share**2 if kind == "permutation" else 0)


def apart(layers: int, kept: float) -> float:
    """How far the streams are apart after this many sub-layers."""
    differences = (1 - 1 / STREAMS) * sum(kept**layer for layer in range(layers))
    return float((differences / (differences + STREAMS + layers / STREAMS)) ** 0.5)


def mixing(kind: str, share: float, generator: torch.Generator, streams: int = STREAMS) -> Tensor:
    """M, (S, S)."""
    identity_SS = torch.eye(streams, dtype=torch.float64)
    other_SS = torch.full_like(identity_SS, 1 / streams)
    if kind == "permutation":
        other_SS = identity_SS[torch.randperm(streams, generator=generator)]
    return (1 - share) * identity_SS + share * other_SS


def predicted(layers: int, **_: int) -> Predicted:
    """How far the streams are apart after each layer, by kind of mixing."""
    for name, mix in MIXES.items():
        yield from ((name, layer, apart(layer, kept(*mix))) for layer in range(1, layers + 1))


def network(generator: torch.Generator, tokens: int, layers: int, width: int, samples: int) -> Measured:
    """The same for networks on random tokens, mean over `samples` networks."""
    for setup, factor in ((CLAIMED, 1.0), (CONTROL, 0.0)):
        for name, (kind, share) in MIXES.items():
            sums_L = torch.zeros(layers, dtype=torch.float64)
            for _ in range(samples):
                drawn = drawn_network(generator, tokens, width=width, layers=layers, **KEYS)
                for number, block in enumerate(drawn.blocks):
                    block.attention_streams.mix.copy_(mixing(kind, factor * share, generator))
                    block.attention_streams.write.zero_()[number % STREAMS] = 1
                x_1ND = torch.randn(1, tokens, width, dtype=torch.float64, generator=generator)
                sums_L += torch.stack([residual_B[0] for _, (residual_B, _) in streams_by_layer(drawn, x_1ND)])
            yield from ((setup, name, layer, value / samples) for layer, value in enumerate(sums_L.tolist(), 1))


PAPERS = {"Xie et al. 2025": "mHC: Manifold-constrained hyper-connections"}
LAWS = {
    "stream_collapse": Law(
        sizes={"tokens": 8, "layers": 60, "width": 64, "samples": 4},
        predicted=predicted,
        network=network,
        x_label="sub-layer",
        value_label="distance of the streams",
    )
}
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
    streams = _trained_streams(rows)
    return streams.mixing_from_identity.mean() / streams.mixing_from_mean.mean()


CLAIMS: dict[str, Claim] = {
    "knob_hyper_connections": keeps(
        statement="Doubly stochastic mixing matrices keep the size of the last layer's states within a factor of ten "
        "of the embedding's, and free ones that are as far from the identity do not (the factor).",
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
    # threshold: three times the random error of 4 networks, whose tokens share the permutations
    "law_stream_collapse": agrees(
        law="stream_collapse",
        line=0.1,
        statement="Doubly stochastic mixing at a distance e from the identity keeps what makes the streams of a token "
        "differ for about 1/e sub-layers, so that with depth the streams become one",
        source=f"{XIE}; closed form derived here",
        control="mixing by the identity, which keeps the streams apart",
    ),
}
