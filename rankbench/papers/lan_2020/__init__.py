"""What one layer does that is applied again and again (Lan et al. 2020, ALBERT). The closed forms are derived here.

Collapse. With uniform attention, a skip and a random value map W of variance 1/d, every token becomes x_i + a W m, m
the mean of the tokens, and m after l layers is (1 + a W)^l m. The powers of a large random W are orthogonal to one
another and keep the mean square, tr W^j (W^k)^T / d -> 1 if j = k and 0 else, so that

    E|m|^2 grows by g = sum over k of C(l, k)^2 a^(2k),    with layers of their own by g = (1 + a^2)^l.

Orthonormal tokens then have the relative residual sqrt((n-1) / (n-1+g)). With a = 1, g = C(2l, l) grows as 4^l in place
of 2^l: the logarithm of the residual falls twice as fast. With a = 1/sqrt(L), which keeps layers of their own apart,
g grows as exp(2 sqrt(L)); only a = 1/L keeps it bounded, by I_0(2) = 2.28.

End. The source's states keep moving from layer to layer ("oscillate"), where others found fixed points (Bai et al.
2019). If tokens become alike, every softmax averages, whatever its queries and keys, and x -> norm((1 + a W) x), power
iteration, is left: the eigenvalue of W with the largest |1 + a lambda| leads. If it is real, there is a fixed point. If
it is one of a pair exp(+-i theta), and W is normal, the state turns for ever by phi = arg(1 + a exp(i theta)) per
layer, a step of 2 sin(phi / 2) times its length. Here W has one such pair beside real eigenvalues up to .3, which lead
from some theta on. The temperature keeps scores small: with that of 1 a few networks (3 of 84) kept clusters of
tokens that are not alike, and turned where a fixed point was due.

Control of both: layers of their own, drawn in the same way.

Shapes: N token, D width, L layer.
"""

import cmath
import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.judging.of_laws import agrees
from rankbench.measures.law import CLAIMED, CONTROL, Law, Measured, Predicted
from rankbench.measures.norms import frobenius_norm, residual_matrix
from rankbench.model.bare import UNIFORM, drawn_network
from rankbench.model.initialise import initialise
from rankbench.model.transformer import Transformer

WIDTH = 8  # of the networks that collapse, in tokens
SCALES = (0.5, 1.0, 2.0)  # a of the networks whose end is measured
ANGLES = range(0, 181, 30)  # degrees
REAL, OTHERS = 0.3, 0.2  # the largest real eigenvalue, and the size up to which the others go
HEADS, TEMPERATURE = 4, 4.0
LAST = 20  # layers over which the last step is averaged, because the control's scatters


def states(
    network: Transformer, draw: Callable[[], object], setup: str, x_1ND: Tensor, layers: int
) -> Iterator[Tensor]:
    """States after each layer: the network's only layer again and again, in the control with new weights each time."""
    (sublayer,) = network.sublayers
    for layer in range(layers):
        if layer == 0 or setup == CONTROL:
            draw()
        x_1ND = sublayer(x_1ND)
        yield x_1ND


def growth(scale: float, layers: int) -> float:
    """E|m|^2 after this many layers over that before them."""
    root, total = 1.0, 0.0  # root: C(l, k) a^k, from one to the next, because the binomials alone exceed a float
    for k in range(layers + 1):
        total += root * root
        root *= scale * (layers - k) / (k + 1)
    return total


def predicted_collapse(tokens: int, layers: int, **_: int) -> Predicted:
    """The relative residual after each layer, by scale."""
    for name, scale in _scales(layers).items():
        for layer in range(layers + 1):
            yield name, layer, math.sqrt((tokens - 1) / (tokens - 1 + growth(scale, layer)))


def _scales(layers: int) -> dict[str, float]:
    return {"a = 1": 1.0, "a = 1/sqrt(L)": layers**-0.5, "a = 1/L": 1 / layers}


def network_of_collapse(generator: torch.Generator, tokens: int, layers: int, samples: int) -> Measured:
    """The same for networks: root of the residuals' mean square over that of the states, over `samples` networks."""
    x_1ND = torch.eye(tokens, WIDTH * tokens, dtype=torch.float64)[None]
    for name, scale in _scales(layers).items():
        keys = {"width": WIDTH * tokens, "layers": 1, "skip": True, "branch_scale": scale, **UNIFORM}
        drawn = drawn_network(generator, tokens, **keys)
        draw = partial(initialise, drawn, generator)
        for setup in (CLAIMED, CONTROL):
            squares_2L = torch.zeros(2, layers + 1, dtype=torch.float64)
            for _ in range(samples):
                x_LND = torch.cat([x_1ND, *states(drawn, draw, setup, x_1ND, layers)])
                squares_2L += torch.stack([frobenius_norm(residual_matrix(x_LND)), frobenius_norm(x_LND)]).square()
            residual_L = (squares_2L[0] / squares_2L[1]).sqrt()
            yield from ((setup, name, layer, value) for layer, value in enumerate(residual_L.tolist()))


def last_step(scale: float, degrees: float) -> float:
    """Step of the state from one layer to the next in the end, over its length."""
    turned = 1 + scale * cmath.exp(1j * math.radians(degrees))
    return 2 * math.sin(cmath.phase(turned) / 2) if abs(turned) > 1 + scale * REAL else 0.0


def predicted_end(**_: int) -> Predicted:
    """The last step by scale and theta."""
    yield from ((f"a = {scale:g}", angle, last_step(scale, angle)) for scale in SCALES for angle in ANGLES)


def network_of_end(generator: torch.Generator, tokens: int, layers: int, width: int) -> Measured:
    """The same for networks with random queries and keys, on random tokens."""
    if width % HEADS:
        raise ConfigError(f"analysis.laws.width={width}: law=looped_end has {HEADS} heads; use a multiple of {HEADS}")
    x_1ND = torch.randn(1, tokens, width, dtype=torch.float64, generator=generator)
    keys: dict = {"width": width, "layers": 1, "heads": HEADS, "temperature": TEMPERATURE, "skip": True}
    keys |= {"norm": "post", "norm_kind": "rmsnorm", "norm_affine": False}
    for setup in (CLAIMED, CONTROL):
        for scale in SCALES:
            drawn = drawn_network(generator, tokens, branch_scale=scale, **keys)
            for angle in ANGLES:
                draw = partial(_draw_turning, drawn, generator, angle)
                last = deque(states(drawn, draw, setup, x_1ND, layers), maxlen=LAST + 1)
                steps = [((y - x).norm() / x.norm()).item() for x, y in pairwise(last)]
                yield setup, f"a = {scale:g}", angle, sum(steps) / LAST


def _draw_turning(drawn: Transformer, generator: torch.Generator, degrees: float) -> None:
    """Draw queries, keys, and a normal W = W_O W_V in random directions, with eigenvalues exp(+-i theta), REAL,
    and others up to OTHERS to either side of 0."""
    initialise(drawn, generator)
    (attention,) = drawn.attentions
    q_DD = torch.linalg.qr(torch.randn(drawn.width, drawn.width, dtype=torch.float64, generator=generator)).Q
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    others = torch.linspace(-OTHERS, OTHERS, drawn.width - 3, dtype=torch.float64)
    pair = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    w_DD = torch.block_diag(pair, torch.tensor([[REAL]], dtype=torch.float64), others.diag())
    attention.qkv.weight.split(attention.rows)[-1].copy_(q_DD.T)
    attention.out.weight.copy_(q_DD @ w_DD)


PAPERS = {"Lan et al. 2020": "ALBERT: A lite BERT for self-supervised learning of language representations"}
LAWS = {
    "looped_collapse": Law(
        sizes={"tokens": 32, "layers": 16, "samples": 16},
        predicted=predicted_collapse,
        network=network_of_collapse,
        x_label="layer",
        value_label="relative residual",
        log_value=True,
    ),
    "looped_end": Law(
        sizes={"tokens": 16, "layers": 300, "width": 32},
        predicted=predicted_end,
        network=network_of_end,
        x_label="theta of the leading values, in degrees",
        value_label="last step over length of the state",
    ),
}
CLAIMS = {
    "law_looped_collapse": agrees(
        law="looped_collapse",
        # threshold: twice the random error of a seed of 16 networks, which is largest at the last layers with a = 1
        line=0.3,
        statement="One random layer that is applied again and again makes tokens alike sooner than layers of their "
        "own: its residual falls with g = sum of C(l, k)^2 a^2k in place of (1 + a^2)^l",
        source="Lan et al. 2020, whose layers share their weights; closed form derived here",
        control="layers of their own",
        relative=True,
    ),
    "law_looped_end": agrees(
        law="looped_end",
        # threshold: what is left of the slowest start after 300 layers, and of tokens that are not alike, is a few .001
        line=0.02,
        statement="With post-norm, a layer that is applied again and again ends at a fixed point if the leading "
        "eigenvalue of its values is real, and else turns for ever, by the angle of 1 + a lambda",
        source="Lan et al. 2020, whose states oscillate; closed form derived here",
        control="layers of their own",
    ),
}
