"""Networks as sequences of sub-layers, and the loop that runs them.

Shapes: B batch, N query token, M key token, D width, H head, K head width, F hidden width of the MLP, S stream, C
classes or output dimensions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rankbench.config.keys import ConfigError
from rankbench.model.attention import Heads
from rankbench.model.kinds import NO_KINDS, Kinds
from rankbench.model.linear import ReadOut
from rankbench.model.norm import Norm
from rankbench.model.sublayers import AnySublayer, AttentionSublayer, MlpSublayer, Sublayer, combined, weighted_sum

Layer = tuple[AttentionSublayer, *tuple[MlpSublayer, ...]]


class Network:
    """A network as a sequence of sub-layers, from the states that `embed` makes of inputs to the input of `read_out`.

    The Transformer is a Network, and so is the result of `without`.
    """

    name: str
    width: int
    last_norm: Norm | None  # after the last sub-layer of a pre-norm or peri-norm network
    read_out: ReadOut
    norm_kind: str  # of its norms; in a network without norms, of the norm put before the read-out of path sums
    kinds: Kinds = NO_KINDS
    sublayers: tuple[AnySublayer, ...]  # in order

    @property
    def shares(self) -> tuple[float, ...]:
        """Shares of the streams in the state that is read out."""
        return (1.0,)

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
    def attentions(self) -> Sequence[Heads]:
        """The attention of each layer, in order."""
        return [sublayer.part for sublayer in self.sublayers if isinstance(sublayer, AttentionSublayer)]

    @property
    def layers(self) -> list[Layer]:
        """The sub-layers of each layer, attention first."""
        layers: list[Layer] = []
        for sublayer in self.sublayers:
            if isinstance(sublayer, AttentionSublayer):
                layers.append((sublayer,))
            else:
                layers[-1] = (*layers[-1], sublayer)
        return layers

    @property
    def num_layers(self) -> int:
        return len(self.attentions)

    @property
    def num_heads(self) -> int:
        return self.attentions[0].heads

    @property
    def has_skips(self) -> bool:
        """Whether a path can skip the attention of a layer."""
        return any(attention.skip != 0 or attention.streams is not None for attention, *_ in self.layers)

    @property
    def has_mlps(self) -> bool:
        return any(isinstance(sublayer, MlpSublayer) for sublayer in self.sublayers)

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
        for x_BND in self.states_after_layers(inputs, kernel):  # noqa: B007
            pass
        return self.finish(x_BND)

    def states_after_layers(self, inputs: Tensor, kernel: str = "table") -> Iterator[Tensor]:
        """The state after each layer, (B, N, D): of a pre-norm network as it is before the next norm."""
        x_BND, present_BN = self.enter(self.embed(inputs)), self.present(inputs)
        for layer in self.layers:
            for sublayer in layer:
                x_BND = sublayer(x_BND, present_BN, kernel)
            yield self.leave(x_BND)

    def enter(self, x: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """The streams that enter the first sub-layer: copies of the embedding. A stream that attentions read next to
        the tokens holds the first attention's input. norm: the first sub-layer's, if x is not tokens but paths.
        """
        if len(self.shares) == 1:
            return x
        first = self.sublayers[0]
        is_beside = any(streams.beside for sublayer in self.sublayers if (streams := sublayer.streams) is not None)
        last = first.before(x, norm or first.norm) if is_beside else x
        return torch.cat([x] * (len(self.shares) - 1) + [last], -1)

    def leave(self, x: Tensor) -> Tensor:
        """The state that is read out or measured, from the streams."""
        return x if len(self.shares) == 1 else combined(self.shares, x)

    def finish(self, x_BND: Tensor) -> Tensor:
        """Input of the read-out, from the last state."""
        return x_BND if self.last_norm is None else self.last_norm(x_BND)


class Reduced(Network):
    """A network with parts of its sub-layers removed; its ends and its weights are those of the original."""

    def __init__(self, whole: Network, sublayers: list[AnySublayer], last_norm: Norm | None) -> None:
        self.whole, self.sublayers, self.last_norm = whole, tuple(sublayers), last_norm
        for name in ("name", "width", "norm_kind", "read_out", "kinds", "embed", "present", "num_tokens"):
            setattr(self, name, getattr(whole, name))

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
    sublayers = [sublayer for sublayer in network.sublayers if not (mlp and isinstance(sublayer, MlpSublayer))]
    if skip:
        sublayers = [replace(_of_own_values(sublayer), skip=0.0, streams=None) for sublayer in sublayers]
    if norm:
        sublayers = [replace(sublayer, norm=None, branch_norm=None, place="none") for sublayer in sublayers]
    return Reduced(network, sublayers, None if norm else network.last_norm)


def _of_own_values(sublayer: AnySublayer) -> AnySublayer:
    """The sub-layer without the first layer's values, which its part reads from a stream next to the tokens."""
    if not isinstance(sublayer, AttentionSublayer) or sublayer.streams is None or not sublayer.streams.beside:
        return sublayer
    part = copy.copy(sublayer.part)
    part.first = None
    return replace(sublayer, part=part)


class WithLayerStates(nn.Module):
    """A network as a module that returns its output (B, N, C) and the states after its layers, (B, N, D) each, for what
    measures any torch module."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor, kernel: str = "table") -> dict[str, Any]:
        states = list(self.network.states_after_layers(inputs, kernel))
        return {"output": self.network.read_out(self.network.finish(states[-1])), "layers": states}


def check_one_stream(network: Network, analysis: str) -> None:
    """Raise ConfigError for a network with several streams, which this analysis does not follow."""
    if (number := len(network.shares)) > 1:
        raise ConfigError(
            f"analysis={analysis}: follows one state of a token; {network.name} has {number} side by side "
            "(model.value_residual, model.embedding_skip, model.hyper_connections); "
            "measure it with analysis=[residual], [paths] or [path_mass]"
        )


@dataclass(frozen=True, kw_only=True)
class SublayerStep:
    """Input, output and intermediate values of one sub-layer on a batch; with streams, states as `leave` sums them.

    scale_BN1: the factor of each token in the norm; branch_scale_BN1: in the norm after the part.
    """

    sublayer: Sublayer
    input_BND: Tensor
    output_BND: Tensor
    scale_BN1: Tensor | None = None
    branch_scale_BN1: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionStep(SublayerStep):
    """weights_BHNM: P. mixing_BHNM: the matrix that multiplies the values; mixed_BHNK: their product."""

    sublayer: AttentionSublayer
    weights_BHNM: Tensor
    mixing_BHNM: Tensor
    mixed_BHNK: Tensor


@dataclass(frozen=True, kw_only=True)
class MlpStep(SublayerStep):
    """hidden_BNF: the input of the activation."""

    sublayer: MlpSublayer
    hidden_BNF: Tensor


AnyStep = AttentionStep | MlpStep


def run(network: Network, inputs: Tensor) -> Iterator[AnyStep]:
    """Every sub-layer's step, in order. The caller decides what to keep; this function holds only the last state."""
    x_BND, present_BN = network.enter(network.embed(inputs)), network.present(inputs)
    input_BND = network.leave(x_BND)
    for sublayer in network.sublayers:
        x_BND, inside = _applied(sublayer, x_BND, present_BN)
        output_BND = network.leave(x_BND)
        if isinstance(sublayer, AttentionSublayer):
            yield AttentionStep(sublayer=sublayer, input_BND=input_BND, output_BND=output_BND, **inside)
        else:
            yield MlpStep(sublayer=sublayer, input_BND=input_BND, output_BND=output_BND, **inside)
        input_BND = output_BND


def attention_steps(network: Network, inputs: Tensor) -> Iterator[AttentionStep]:
    """The steps of the attentions alone."""
    return (step for step in run(network, inputs) if isinstance(step, AttentionStep))


def _applied(sublayer: AnySublayer, x_BND: Tensor, present_BN: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    """Output of the sub-layer and its intermediate values."""
    inside: dict[str, Tensor] = {}

    def keeping(norm: Norm | None, name: str) -> Callable[[Tensor], Tensor] | None:
        """The norm, which keeps its scale under this name."""
        if norm is None:
            return None

        def normed(y_BND: Tensor) -> Tensor:
            normed_BND, inside[name] = norm.with_scale(y_BND)
            return normed_BND

        return normed

    def part(read_BND: Tensor) -> Tensor:
        output_BND, values = sublayer.part.observe(read_BND, present_BN)
        inside.update(values)
        return output_BND

    norms = keeping(sublayer.norm, "scale_BN1"), keeping(sublayer.branch_norm, "branch_scale_BN1")
    return sublayer.apply(x_BND, part, norms[0], weighted_sum, norms[1]), inside
