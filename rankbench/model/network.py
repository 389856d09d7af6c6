"""Networks as sequences of sub-layers, each with its skip, its norm and the norm's place.

    post:  norm(a x + b f(x))    pre:  a x + b f(norm(x))    peri:  a x + b norm'(f(norm(x)))    none:  a x + b f(x)
    ngpt:  norm(a x + b norm'(f(x)))

f is attention or a map of each token by itself (an MLP); a is the factor of the skip, 0 without one; b is the factor of
the branch. `Sublayer.apply` is the only place where this algebra is written. It runs on tokens, on sums of paths, on
residual coordinates and on Lipschitz constants alike, because its caller passes in what the part, the norm and a
weighted sum do to them. A sub-layer can be surrounded by `Streams`: several states of a token side by side. It reads a
weighted sum of them and writes to them.

Shapes: B batch, N query token, M key token, D width, H head, K head width, F hidden width of the MLP, S stream.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from rankbench.keys import ConfigError
from rankbench.model.kinds import NO_KINDS, Kinds

Tokens = TypeVar("Tokens")


class HeadMaps(NamedTuple):
    """One layer's heads, each as its own linear maps: y_h = M_h (x W_V,h + b_V,h) W_O,h, and b_O once for the layer.

    M_h is the matrix that multiplies the values: P_h, or its mix with the identity and the average, or P_h with
    scaled columns. w_q_HDK, w_k_HDK, w_v_HDK, w_o_HKD; b_q_HK, b_k_HK, b_v_HK, b_o_D (zeros without biases). In w_v,
    w_o and b_v, K is the width of the values. w_q and w_k are None if scores are not a product of two tokens' maps.
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
    """The interface that the algebra needs of an attention; fields as in model.attention.Heads."""

    heads: int
    head_width: int
    score_name: str
    mask: str
    window: int | None
    mixes: bool

    def __call__(self, x_BND: Tensor, present_BN: Tensor | None = None, *, kernel: str = "table") -> Tensor:
        """The layer's output, (B, N, D)."""

    def observe(self, x_BND: Tensor, present_BN: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The output, and its intermediate values weights_BHNM, mixing_BHNM and mixed_BHNK, as in `SublayerStep`."""

    def maps_as_applied(self) -> HeadMaps:
        """Its heads as linear maps."""

    def maps_of_input(self) -> HeadMaps:
        """As maps_as_applied, but of the whole input: with a stream next to the tokens, of both."""


class TokenwisePart(Protocol):
    """The interface that the algebra needs of an MLP: a map of each token by itself, act(z) W + b of a hidden z.

    A gated MLP is (act(z) u) W + b, with z and u from two maps. Its `hidden` is z and u side by side, its `gate` is
    act(z), and `up` is the map to u.
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


class Streams(NamedTuple):
    """States x_1 .. x_S of a token, (..., S D), around a sub-layer. The sub-layer gets sum_j read_j x_j; with its
    output y the states become x_i' = sum_j mix_ij x_j + write_i y.

    Every entry is a number or a learned scalar. beside: whether the part also reads x_S, concatenated after
    the tokens.
    """

    read: Sequence[float] | Tensor
    mix: Sequence[Sequence[float]] | Tensor
    write: Sequence[float] | Tensor
    beside: bool = False

    def gathered(self, x: Tensor) -> Tensor:
        """What the sub-layer reads, (..., D)."""
        return combined(self.read, x)

    def mixed(self, x: Tensor) -> Tensor:
        """The states without the sub-layer's output, (..., S D)."""
        return torch.cat([combined(row, x) for row in self.mix], -1)

    def written(self, y: Tensor) -> Tensor:
        """The sub-layer's share of the states, (..., S D)."""
        return torch.cat([weight * y for weight in self.write], -1)

    def last(self, x: Tensor) -> Tensor:
        """x_S, (..., D)."""
        return x.chunk(len(self.read), -1)[-1]


def combined(weights: Sequence[float] | Tensor, x: Tensor) -> Tensor:
    """Weighted sum of the states that lie side by side in x; (..., D)."""
    states = x.chunk(len(weights), -1)
    if isinstance(weights, Tensor):
        return sum(weight * state for weight, state in zip(weights.unbind(), states, strict=True))
    used = [state if weight == 1 else weight * state for weight, state in zip(weights, states, strict=True) if weight]
    return sum(used[1:], used[0]) if used else torch.zeros_like(states[0])


class Sublayer(NamedTuple):
    """One sub-layer of layer `layer` (from 1). place: post | pre | peri | ngpt | none, none if and only if there is no
    norm.

    branch_norm: with place peri and ngpt, the norm after the part.
    """

    layer: int
    kind: str  # attention | mlp
    part: AttentionPart | TokenwisePart
    norm: NormPart | None
    place: str
    skip: float
    branch: float
    branch_norm: NormPart | None = None
    streams: Streams | None = None

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
        branch_norm: Callable[[Tokens], Tokens] | None = None,
    ) -> Tokens:
        """Apply the sub-layer to tokens of any representation; add(a, x, b, y) computes a x + b y.

        With streams, the representation is tensors whose last axis holds the states.
        """
        if (streams := self.streams) is not None:
            part_of_both = part if not streams.beside else lambda read: part(torch.cat([read, streams.last(x)], -1))
            within = self._replace(streams=None)
            y = within.apply(streams.gathered(x), part_of_both, norm, add, branch_norm)
            return add(1.0, streams.mixed(x), 1.0, streams.written(y))
        y = part(self.before(x, norm))
        if self.place in ("peri", "ngpt"):
            y = branch_norm(y)
        return self.after(add(self.skip, x, self.branch, y), norm)

    def before(self, x: Tokens, norm: Callable[[Tokens], Tokens] | None) -> Tokens:
        """Input of the part."""
        return norm(x) if self.place in ("pre", "peri") else x

    def after(self, x: Tokens, norm: Callable[[Tokens], Tokens] | None) -> Tokens:
        """Output of the sub-layer, from the sum of skip and branch."""
        return norm(x) if self.place in ("post", "ngpt") else x

    def __call__(self, x_BND: Tensor, present_BN: Tensor | None = None, kernel: str = "table") -> Tensor:
        """Output of the sub-layer on tokens; kernel as in Attention.forward."""
        part = functools.partial(self.f, present_BN=present_BN, kernel=kernel)
        return self.apply(x_BND, part, self.norm, weighted_sum, self.branch_norm)

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
    """A network as a sequence of sub-layers, from the states that `embed` makes of inputs to the input of `read_out`.

    The Transformer is a Network, and so is the result of `without`.
    """

    name: str
    width: int
    sublayers: tuple[Sublayer, ...]
    last_norm: NormPart | None  # after the last sub-layer of a pre-norm or peri-norm network
    read_out: nn.Module
    shares: tuple[float, ...] = (1.0,)  # of the streams in the state that is read out
    norm_kind: str  # of its norms; in a network without norms, of the norm put before the read-out of path sums
    kinds: Kinds = NO_KINDS

    def embed(self, inputs: Tensor) -> Tensor:
        """The states that enter the first sub-layer, (B, N, D)."""
        raise NotImplementedError

    def present(self, inputs: Tensor) -> Tensor | None:
        """Mask of the tokens that are present in a padded batch, (B, N) bool; None if all are."""
        raise NotImplementedError

    def counted(self, inputs: Tensor, without: str | None = None) -> Tensor | None:
        """Mask of the tokens that count in measurements, (B, N) bool; None if all do. Absent tokens never count.
        without: one more kind of tokens that does not (rankbench.model.kinds)."""
        return self.kinds.counted(self.present(inputs), inputs, self.num_tokens(inputs), without)

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
        attentions = (sublayer for sublayer in self.sublayers if sublayer.kind == "attention")
        return any(sublayer.skip != 0 or sublayer.streams is not None for sublayer in attentions)

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
        x_BND, present_BN = self.enter(self.embed(inputs)), self.present(inputs)
        for sublayer in self.sublayers:
            x_BND = sublayer(x_BND, present_BN, kernel)
        return self.finish(self.leave(x_BND))

    def enter(self, x: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The streams that enter the first sub-layer: copies of the embedding. A stream that attentions read next to
        the tokens holds the first attention's input. norm: the first sub-layer's, if x is not tokens but paths.
        """
        if len(self.shares) == 1:
            return x
        first = self.sublayers[0]
        is_beside = any(sublayer.streams.beside for sublayer in self.sublayers)
        last = first.before(x, norm or first.norm) if is_beside else x
        return torch.cat([x] * (len(self.shares) - 1) + [last], -1)

    def leave(self, x: Tensor) -> Tensor:
        """The state that is read out or measured, from the streams."""
        return x if len(self.shares) == 1 else combined(self.shares, x)

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
    kinds, num_tokens = property(attrgetter("whole.kinds")), property(attrgetter("whole.num_tokens"))

    @property
    def shares(self) -> tuple[float, ...]:
        return (1.0,) if self.sublayers[0].streams is None else self.whole.shares

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs (B, N, C)."""
        return self.read_out(self.state(inputs))


def without(network: Network, *, skip: bool = False, mlp: bool = False, norm: bool = False) -> Reduced:
    """The network without skips, MLP sub-layers or norms (those given as True), the last norm included.

    Streams count as skips. A norm of the embedding stays, because it comes before the layers.
    """
    changes = {"skip": 0.0, "streams": None} if skip else {}
    changes |= {"norm": None, "branch_norm": None, "place": "none"} if norm else {}
    kept = [sublayer for sublayer in network.sublayers if not (mlp and sublayer.kind == "mlp")]
    if skip:
        kept = [sublayer._replace(part=_of_own_values(sublayer)) for sublayer in kept]
    sublayers = tuple(sublayer._replace(**changes) for sublayer in kept)
    return Reduced(network, sublayers, None if norm else network.last_norm)


def _of_own_values(sublayer: Sublayer) -> AttentionPart | TokenwisePart:
    """The part without the first layer's values, which it reads from a stream next to the tokens."""
    if sublayer.streams is None or not sublayer.streams.beside:
        return sublayer.part
    part = copy.copy(sublayer.part)
    part.first = None
    return part


def check_one_stream(network: Network, analysis: str) -> None:
    """Raise ConfigError for a network with several streams, which this analysis does not follow."""
    if (number := len(network.shares)) > 1:
        raise ConfigError(
            f"analysis={analysis}: follows one state of a token; {network.name} has {number} side by side "
            "(model.value_residual, model.embedding_skip, model.hyper_connections); "
            "measure it with analysis=[residual], [paths] or [path_mass]"
        )


class SublayerStep(NamedTuple):
    """Input, output and intermediate values of one sub-layer on a batch; with streams, states as `leave` sums them.

    scale_BN1: the factor of each token in the norm; branch_scale_BN1: in the norm after the part. Attention has
    weights_BHNM, P; mixing_BHNM, the matrix that multiplies the values; mixed_BHNK, their product. An MLP
    has hidden_BNF, the input of its activation.
    """

    sublayer: Sublayer
    input_BND: Tensor
    output_BND: Tensor
    scale_BN1: Tensor | None = None
    branch_scale_BN1: Tensor | None = None
    weights_BHNM: Tensor | None = None
    mixing_BHNM: Tensor | None = None
    mixed_BHNK: Tensor | None = None
    hidden_BNF: Tensor | None = None


def run(network: Network, inputs: Tensor) -> Iterator[SublayerStep]:
    """Every sub-layer's step, in order. The caller decides what to keep; this function holds only the last state."""
    x_BND, present_BN = network.enter(network.embed(inputs)), network.present(inputs)
    input_BND = network.leave(x_BND)
    for sublayer in network.sublayers:
        x_BND, inside = _applied(sublayer, x_BND, present_BN)
        step = SublayerStep(sublayer, input_BND, network.leave(x_BND), **inside)
        input_BND = step.output_BND
        yield step


def _applied(sublayer: Sublayer, x_BND: Tensor, present_BN: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of the sub-layer and its intermediate values."""
    inside: dict[str, Tensor] = {}

    def norm(y_BND: Tensor) -> Tensor:
        normed_BND, inside["scale_BN1"] = sublayer.norm.with_scale(y_BND)
        return normed_BND

    def branch_norm(y_BND: Tensor) -> Tensor:
        normed_BND, inside["branch_scale_BN1"] = sublayer.branch_norm.with_scale(y_BND)
        return normed_BND

    def part(read_BND: Tensor) -> Tensor:
        if sublayer.kind == "mlp":
            inside["hidden_BNF"] = sublayer.part.hidden(read_BND)
            return sublayer.part.from_hidden(inside["hidden_BNF"])
        output_BND, tables = sublayer.part.observe(read_BND, present_BN)
        inside.update(tables)
        return output_BND

    return sublayer.apply(x_BND, part, norm, weighted_sum, branch_norm), inside
