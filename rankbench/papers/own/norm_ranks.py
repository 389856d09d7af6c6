"""What a norm does to the rank of a sequence of tokens, in closed form.

Two tokens lie on each of m rays in width D > 2: positive multiples of one random direction. Their matrix has rank m,
and the differences between tokens span m directions, too (affine rank m). A norm divides each token by a length, so
that the two tokens of a ray become one:

    RMSNorm     rank m,              affine rank m - 1
    LayerNorm   rank min(m, D - 1),  affine rank m - 1

because LayerNorm first takes each token's mean away, which leaves the D - 1 directions whose entries sum to 0. So both
norms lower affine rank (tokens v and 2 v: from 1 to 0), and LayerNorm lowers a full rank (the identity: from D to
D - 1), although neither mixes tokens. RMSNorm keeps rank. All of this is for norms without the epsilon in their
denominator; torch's 1e-5 keeps two tokens of a ray that much apart.

Control: the same tokens without a norm.

Shapes: N token, D width.
"""

import torch
from torch import Tensor

from rankbench.config.model import ModelConfig
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.measures.norms import Spectrum
from rankbench.model.norm import Norm

KINDS = ("rmsnorm", "layernorm")


def predicted(width: int, **_: int) -> Predicted:
    """By how much each norm lowers rank and affine rank, by number of rays."""
    for rays in range(1, width + 1):
        for kind in _kinds(width):
            yield f"rank, {kind}", rays, max(0, rays - width + 1) if kind == "layernorm" else 0
            yield f"affine rank, {kind}", rays, 1


def network(generator: torch.Generator, width: int) -> Measured:
    """The same of norms of ours, for random rays and lengths from 1 to 3."""
    norms = {kind: Norm(ModelConfig(width=width, norm_kind=kind), affine=False) for kind in _kinds(width)}
    for norm in norms.values():
        norm.epsilon = 0.0
    for rays in range(1, width + 1):
        directions_ND = torch.randn(rays, width, dtype=torch.float64, generator=generator).repeat(2, 1)
        x_ND = directions_ND * (1 + 2 * torch.rand(2 * rays, 1, dtype=torch.float64, generator=generator))
        for kind, norm in norms.items():
            for setup, states_ND in ((CLAIMED, norm(x_ND)), (CONTROL, x_ND)):
                yield setup, f"rank, {kind}", rays, rays - rank(states_ND)
                yield setup, f"affine rank, {kind}", rays, rays - rank(states_ND, is_affine=True)


def _kinds(width: int) -> tuple[str, ...]:
    """Of two entries LayerNorm leaves a sign, so that tokens of several rays can become one."""
    return KINDS if width > 2 else KINDS[:1]


def rank(x_ND: Tensor, is_affine: bool = False) -> float:
    """Number of singular values of the tokens, or of their differences from the first, above the tokens' rounding."""
    of_tokens = Spectrum.of(x_ND)
    singular_R = torch.linalg.svdvals(x_ND - x_ND[:1]) if is_affine else of_tokens.relative * of_tokens.largest
    return (singular_R > of_tokens.tolerance * of_tokens.largest).sum().item()


LAW = Law(
    sizes={"width": 8},
    predicted=predicted,
    network=network,
    x_label="rays on which the tokens lie",
    value_label="rank lost",
)
