"""What a network is made of: sub-layers, in sequence, each with its skip, its norm and the norm's place.

    post:  norm(a x + b f(x))      pre:  a x + b f(norm(x))      none:  a x + b f(x)

f is attention or a map of each token by itself (an MLP); a is the factor of the skip, 0 without one; b that of the
branch. `Sublayer.apply` is the only place where this algebra is written. It runs on tokens, on sums of paths, on
residual coordinates and on Lipschitz constants alike, because what the part, the norm and a weighted sum do to them is
handed in.

Shapes: B batch, N query token, M key token, D width, H head, K head width, F hidden width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor, nn

Tokens = TypeVar("Tokens")


class HeadMaps(NamedTuple):
    """One layer's heads, each as its own linear maps: y_h = M_h (x W_V,h + b_V,h) W_O,h, and b_O once for the layer.

    M_h is what the attention multiplies the values by: P_h, or its mix with the identity and the average, or P_h with
    scaled columns. w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD; b_q_HK, b_k_HK, b_v_HK, b_o_D (zeros without biases). In w_v,
    w_o and b_v, K is the width of the values. w_q and w_k are None where scores are no product of two tokens' maps.
    """

    w_q_HDK: Tensor | None
    w_k_HDK: Tensor | None
    w_v_HDK: Tensor
    w_o_HKD: Tensor
    b_q_HK: Tensor
    b_k_HK: Tensor
    b_v_HK: Tensor
    b_o_D: Tensor


class AttentionPart(Protocol):
    """What the algebra needs of an attention; its fields as in model.attention.Heads."""

    heads: int
    head_width: int
    score_name: str
    mask: str
    window: int | None
    mixes: bool

    def __call__(self, x_BND: Tensor, present_BN: Tensor | None = None, *, kernel: str = "table") -> Tensor:
        """The layer's output, (B, N, D)."""

    def observe(self, x_BND: Tensor, present_BN: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and what it was made of: weights_BHNM, mixing_BHNM and mixed_BHNK of `Step`."""

    def maps_as_applied(self) -> HeadMaps:
        """Its heads as linear maps."""


class TokenwisePart(Protocol):
    """A map of each token by itself, act(z) W + b of a hidden z: what the algebra needs of an MLP.

    A gated one, (act(z) u) W + b with z and u of two maps: its hidden is z and u side by side, its gate is act(z), and
    `up` is the map to u.
    """

    activation_name: str

    def __call__(self, x_BND: Tensor) -> Tensor:
        """The layer's output, (B, N, D)."""

    def hidden(self, x_BND: Tensor) -> Tensor:
        """Input of the activation, z_BNF."""

    def from_hidden(self, z_BNF: Tensor) -> Tensor:
        """The rest of the part, from the input of the activation to the output."""

    def gate(self, z_BNF: Tensor) -> Tensor:
        """act(z)/z or a gated part's act(z): the factor that makes the part linear once it is frozen."""


class NormPart(Protocol):
    """A norm of each token: a linear map, times the token's own scale, and a shift."""

    kind: str
    width: int

    def __call__(self, x_BND: Tensor) -> Tensor:
        """The normed tokens."""

    def with_scale(self, x_BND: Tensor) -> tuple[Tensor, Tensor]:
        """The normed tokens, and the scale of each, (B, N, 1)."""

    def linear(self, x_BND: Tensor, scale_BN1: Tensor) -> Tensor:
        """The norm with this scale and without its shift: linear in x."""


class Sublayer(NamedTuple):
    """One sub-layer of layer `layer` (from 1). place: post | pre | none, none if and only if there is no norm."""

    layer: int
    kind: str  # attention | mlp
    part: AttentionPart | TokenwisePart
    norm: NormPart | None
    place: str
    skip: float
    branch: float

    @property
    def name(self) -> str:
        """Prefix of the names of its parameters and dropout masks: layers.0.attention."""
        return f"layers.{self.layer - 1}.{self.kind}"

    def apply(
        self,
        x: Tokens,
        part: Callable[[Tokens], Tokens],
        norm: Callable[[Tokens], Tokens] | None,
        add: Callable[[float, Tokens, float, Tokens], Tokens],
    ) -> Tokens:
        """Apply the sub-layer to tokens of any representation; add(a, x, b, y) computes a x + b y."""
        return self.after(add(self.skip, x, self.branch, part(self.before(x, norm))), norm)

    def before(self, x: Tokens, norm: Callable[[Tokens], Tokens] | None) -> Tokens:
        """Input of the part."""
        return norm(x) if self.place == "pre" else x

    def after(self, x: Tokens, norm: Callable[[Tokens], Tokens] | None) -> Tokens:
        """Output of the sub-layer, from the sum of skip and branch."""
        return norm(x) if self.place == "post" else x

    def __call__(self, x_BND: Tensor, present_BN: Tensor | None = None, kernel: str = "table") -> Tensor:
        """Output of the sub-layer on tokens; kernel as in Attention.forward."""
        return self.apply(x_BND, lambda read_BND: self.f(read_BND, present_BN, kernel), self.norm, weighted_sum)

    def f(self, read_BND: Tensor, present_BN: Tensor | None = None, kernel: str = "table") -> Tensor:
        """Output of the part, from its input tokens."""
        return self.part(read_BND, present_BN, kernel=kernel) if self.kind == "attention" else self.part(read_BND)


def weighted_sum(a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
    """a x + b y, without the products by 0 and 1."""
    y = y if b == 1.0 else b * y
    if a == 1.0:
        return x + y
    return a * x + y if a else y


class Network:
    """A network as its sub-layers, between the states that `embed` makes of inputs and what `read_out` reads.

    The Transformer is one, and so is what `without` leaves of it.
    """

    name: str
    width: int
    sublayers: tuple[Sublayer, ...]
    last_norm: NormPart | None  # behind the last sub-layer of a pre-norm network
    read_out: nn.Module
    norm_kind: str  # of its norms; in a network without norms, of the one that sums of paths are read out behind

    def embed(self, inputs: Tensor) -> Tensor:
        """The states that enter the first sub-layer, (B, N, D)."""
        raise NotImplementedError

    def present(self, inputs: Tensor) -> Tensor | None:
        """Mask of the tokens that are present in a padded batch, (B, N) bool; None if all are."""
        raise NotImplementedError

    def counted(self, inputs: Tensor) -> Tensor | None:
        """Mask of the tokens that count in measurements, (B, N) bool; None if all do. Absent tokens never count."""
        return self.present(inputs)

    def num_tokens(self, inputs: Tensor) -> int:
        """Number of tokens in the states of these inputs, absent ones included."""
        return inputs.shape[1]

    def lengths(self, inputs: Tensor) -> Tensor | None:
        """Number of tokens of each sequence, (B,); None if all are present."""
        present_BN = self.present(inputs)
        return None if present_BN is None else present_BN.sum(-1)

    @property
    def attentions(self) -> list[AttentionPart]:
        """The attention of each layer, in order."""
        return [sublayer.part for sublayer in self.sublayers if sublayer.kind == "attention"]

    @property
    def layers(self) -> list[list[Sublayer]]:
        """The sub-layers of each layer, attention first."""
        return [list(of_layer) for _, of_layer in groupby(self.sublayers, key=lambda sublayer: sublayer.layer)]

    @property
    def num_layers(self) -> int:
        return len(self.attentions)

    @property
    def num_heads(self) -> int:
        return self.attentions[0].heads

    @property
    def has_skips(self) -> bool:
        """Whether a path can skip the attention of a layer."""
        return any(sublayer.skip != 0 for sublayer in self.sublayers if sublayer.kind == "attention")

    @property
    def has_mlps(self) -> bool:
        return any(sublayer.kind == "mlp" for sublayer in self.sublayers)

    @property
    def has_norms(self) -> bool:
        return any(sublayer.norm is not None for sublayer in self.sublayers)

    @property
    def path_choices(self) -> tuple[int, int, bool]:
        """Choices of a path: the number of layers, the heads of each layer, and whether a path can skip a layer."""
        return self.num_layers, self.num_heads, self.has_skips

    @property
    def path_lengths(self) -> list[int]:
        """Numbers of heads that a path can take; without skips one in every layer."""
        return list(range(self.num_layers + 1)) if self.has_skips else [self.num_layers]

    def state(self, inputs: Tensor, kernel: str = "table") -> Tensor:
        """Input of the read-out, (B, N, D); kernel as in Attention.forward."""
        x_BND, present_BN = self.embed(inputs), self.present(inputs)
        for sublayer in self.sublayers:
            x_BND = sublayer(x_BND, present_BN, kernel)
        return self.finish(x_BND)

    def finish(self, x_BND: Tensor) -> Tensor:
        """Input of the read-out, from the last state."""
        return x_BND if self.last_norm is None else self.last_norm(x_BND)


@dataclass(frozen=True)
class Reduced(Network):
    """A network with parts of its sub-layers removed. It shares the weights of the original."""

    whole: Network
    sublayers: tuple[Sublayer, ...]
    last_norm: NormPart | None

    name, width = property(attrgetter("whole.name")), property(attrgetter("whole.width"))
    norm_kind, read_out = property(attrgetter("whole.norm_kind")), property(attrgetter("whole.read_out"))
    embed, present = property(attrgetter("whole.embed")), property(attrgetter("whole.present"))
    counted, num_tokens = property(attrgetter("whole.counted")), property(attrgetter("whole.num_tokens"))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs (B, N, C)."""
        return self.read_out(self.state(inputs))


def without(network: Network, *, skip: bool = False, mlp: bool = False, norm: bool = False) -> Reduced:
    """The network without skips, MLP sub-layers or norms (those given as True), the last norm included.

    A norm of the embedding stays, because it is in front of the layers.
    """
    changes = {"skip": 0.0} if skip else {}
    changes |= {"norm": None, "place": "none"} if norm else {}
    kept = (sublayer for sublayer in network.sublayers if not (mlp and sublayer.kind == "mlp"))
    sublayers = tuple(sublayer._replace(**changes) for sublayer in kept)
    return Reduced(network, sublayers, None if norm else network.last_norm)


class Step(NamedTuple):
    """Input, output and intermediate values of one sub-layer on a batch.

    scale_BN1: the factor of each token in the norm. Attention has weights_BHNM, P; mixing_BHNM, the matrix
    that multiplies the values; mixed_BHNK, their product. An MLP has hidden_BNF, the input of its activation.
    """

    sublayer: Sublayer
    input_BND: Tensor
    output_BND: Tensor
    scale_BN1: Tensor | None = None
    weights_BHNM: Tensor | None = None
    mixing_BHNM: Tensor | None = None
    mixed_BHNK: Tensor | None = None
    hidden_BNF: Tensor | None = None


def run(network: Network, inputs: Tensor) -> Iterator[Step]:
    """Every sub-layer's step, in order. The caller decides what to keep; this function holds only the last state."""
    x_BND, present_BN = network.embed(inputs), network.present(inputs)
    for sublayer in network.sublayers:
        step = _step(sublayer, x_BND, present_BN)
        x_BND = step.output_BND
        yield step


def _step(sublayer: Sublayer, x_BND: Tensor, present_BN: Tensor | None) -> Step:
    inside: dict[str, Tensor] = {}

    def norm(y_BND: Tensor) -> Tensor:
        normed_BND, inside["scale_BN1"] = sublayer.norm.with_scale(y_BND)
        return normed_BND

    def part(read_BND: Tensor) -> Tensor:
        if sublayer.kind == "mlp":
            inside["hidden_BNF"] = sublayer.part.hidden(read_BND)
            return sublayer.part.from_hidden(inside["hidden_BNF"])
        output_BND, tables = sublayer.part.observe(read_BND, present_BN)
        inside.update(tables)
        return output_BND

    output_BND = sublayer.apply(x_BND, part, norm, weighted_sum)
    return Step(sublayer, x_BND, output_BND, **inside)
