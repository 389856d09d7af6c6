"""A network made linear at one batch, and its paths summed by length (Dong et al. 2021, Theorem 2.1).

Attention weights, norm scales and MLP gates keep their values of the full forward pass. The network is then linear in
its input, and its output is the sum of its paths, up to rounding.

Shapes: B batch, N token, D width, H head, K head width or path length, F MLP width, L layer, P path, T term, G group.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.measures.norms import frobenius_norm
from rankbench.model.network import MlpStep, Network, run
from rankbench.model.norm import Norm
from rankbench.model.sublayers import AnySublayer, AttentionSublayer, MlpSublayer, weighted_sum

# The sweep's terms, in bytes: about what the second-level cache holds; the whole batch at once takes twice as long.
SWEEP_BYTES = 3 << 19


class PathSums(NamedTuple):
    """A network's output, split by path length: by_length_KBND[k] sums all paths of length k. With bias_BND, everything
    that does not come from the input (biases, norm shifts), they add up to state_BND, the input of the read-out."""

    by_length_KBND: Tensor
    bias_BND: Tensor
    state_BND: Tensor

    def remainder(self) -> Tensor:
        """||state - sum of all parts||_F / ||state||_F, (B,); rounding if correct, 0 if nothing is missing."""
        missing_B = frobenius_norm(self.state_BND - self.by_length_KBND.sum(0) - self.bias_BND)
        return torch.where(missing_B > 0, missing_B / frobenius_norm(self.state_BND), missing_B)


def sums_by_length(network: Network, inputs: Tensor, mlp: str = "gate") -> PathSums:
    """All paths of the frozen network, summed by length (FrozenNetwork.by_length), a few sequences at a time."""
    numbers = network.num_tokens(inputs) * network.width * (network.num_layers + 2)
    most = SWEEP_BYTES
    if inputs.device.type == "cuda":
        # so few leave a GPU idle, so the limit is its memory, for the terms and for all that is frozen
        numbers += network.num_layers * network.num_heads * network.num_tokens(inputs) ** 2 + 4 * numbers
        most = free_share(inputs.device)
    at_a_time = max(1, most // (numbers * network.read_out.weight.element_size()))
    parts = [FrozenNetwork(network, chunk, mlp).by_length() for chunk in inputs.split(at_a_time)]
    by_length, bias, state = zip(*parts, strict=True)
    return PathSums(torch.cat(by_length, dim=1), torch.cat(bias), torch.cat(state))


def free_share(device: torch.device) -> int:
    """An eighth of the bytes that are free on a CUDA device: intermediate results take several times as much."""
    return torch.cuda.mem_get_info(device)[0] // 8


@dataclass(frozen=True)
class FrozenSublayer:
    """A sub-layer made linear at one batch: the scales of its norms are frozen."""

    sublayer: AnySublayer
    scale_BN1: Tensor | None
    branch_scale_BN1: Tensor | None

    def at(self, sequences: slice) -> Self:
        """The frozen sub-layer for some of the sequences."""
        frozen: dict[str, Any] = {name: x[sequences] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **frozen)

    def norms(self, has_bias: bool) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """The norm, and the one after the part, of terms (T, B, N, D); with has_bias the first one is the bias."""
        norm = functools.partial(frozen_norm, self.sublayer.norm, self.scale_BN1, has_bias)
        return norm, functools.partial(frozen_norm, self.sublayer.branch_norm, self.branch_scale_BN1, has_bias)

    @property
    def is_plain(self) -> bool:
        """Whether the skip and the part's output are simply added, so that one product can compute both."""
        return self.sublayer.streams is None and self.sublayer.branch_norm is None


@dataclass(frozen=True)
class FrozenAttention(FrozenSublayer):
    """An attention whose matrices that mix the values are frozen."""

    sublayer: AttentionSublayer
    mixing_BHNM: Tensor

    def all_heads(self, terms_TBND: Tensor) -> Tensor:
        """Terms (bias, paths by length) after all heads; one more, because a path that takes a head is one longer."""
        norm, branch_norm = self.norms(has_bias=True)
        if self.is_plain:
            return self.sublayer.apply(terms_TBND, self._mix_all_heads, norm, self._skip_and_lengthen)
        return self.sublayer.apply(terms_TBND, self._lengthened_heads, norm, _add_longer, branch_norm)

    def one_head(self, states_PBND: Tensor, choice: int) -> Tensor:
        """Path prefixes that take the skip (choice 0) or head `choice`, without biases."""
        norm, branch_norm = self.norms(has_bias=False)
        if choice == 0:
            streams = self.sublayer.streams
            if streams is None:
                return self.sublayer.after(self.sublayer.skip * states_PBND, norm)
            skipped_PBND = self.sublayer.after(self.sublayer.skip * streams.gathered(states_PBND), norm)
            return streams.mixed(states_PBND) + streams.written(skipped_PBND)
        maps, p_BNM = self.sublayer.part.maps_of_input(), self.mixing_BHNM[:, choice - 1]

        def head(read_PBND: Tensor) -> Tensor:
            return (p_BNM @ (read_PBND @ maps.w_v_HDK[choice - 1])) @ maps.w_o_HKD[choice - 1]

        return self.sublayer.apply(states_PBND, head, norm, lambda a, x, b, y: b * y, branch_norm)

    def _mix_all_heads(self, x_TBND: Tensor) -> Tensor:
        """The mixed values of all heads side by side, before the map back to the width: (T, B, N, H K)."""
        num_terms, num_sequences, num_tokens, _ = x_TBND.shape
        attention = self.sublayer.part
        maps = attention.maps_of_input()
        v_TBNHK = F.linear(x_TBND, maps.w_v_HDK.mT.flatten(0, 1)).unflatten(-1, (attention.heads, -1))
        v_TBNHK[0] += maps.b_v_HK
        # all terms in one product with P: (B H, N, M) @ (B H, M, T K)
        v_BHMTK = v_TBNHK.permute(1, 3, 2, 0, 4).reshape(num_sequences * attention.heads, num_tokens, -1)
        mixed = torch.bmm(self.mixing_BHNM.flatten(0, 1), v_BHMTK)
        mixed = mixed.view(num_sequences, attention.heads, num_tokens, num_terms, -1)
        return mixed.permute(3, 0, 2, 1, 4).reshape(num_terms, num_sequences, num_tokens, -1)

    def _skip_and_lengthen(self, skip: float, terms_TBND: Tensor, branch: float, mixed_TBND: Tensor) -> Tensor:
        # the skip keeps term t and a head moves it to t + 1, except the bias, which has no length
        out = self.sublayer.part.out
        longer_TBND = F.pad(terms_TBND, (0, 0, 0, 0, 0, 0, 0, 1))
        if skip != 1:
            longer_TBND *= skip
        longer_TBND[0].flatten(0, 1).addmm_(mixed_TBND[0].flatten(0, 1), out.weight.T, alpha=branch)
        if out.bias is not None:
            longer_TBND[0] += branch * out.bias
        longer_TBND[2:].flatten(0, 2).addmm_(mixed_TBND[1:].flatten(0, 2), out.weight.T, alpha=branch)
        return longer_TBND

    def _lengthened_heads(self, x_TBND: Tensor) -> Tensor:
        """Output of all heads, with one term more."""
        out = self.sublayer.part.out
        y_TBND = F.linear(self._mix_all_heads(x_TBND), out.weight)
        if out.bias is not None:
            y_TBND[0] += out.bias
        return torch.cat([y_TBND[:1], torch.zeros_like(y_TBND[:1]), y_TBND[1:]])


@dataclass(frozen=True)
class FrozenMlp(FrozenSublayer):
    """An MLP whose gate is frozen, or with mlp="source" its whole output."""

    sublayer: MlpSublayer
    gate_BNF: Tensor | None = None
    source_BND: Tensor | None = None

    @classmethod
    def of(cls, step: MlpStep, mlp: str) -> Self:
        """The sub-layer frozen at its step on a batch."""
        norms, part = (step.sublayer, step.scale_BN1, step.branch_scale_BN1), step.sublayer.part
        if mlp == "gate":
            return cls(*norms, gate_BNF=part.gate(step.hidden_BNF))
        return cls(*norms, source_BND=part.from_hidden(step.hidden_BNF))

    def mlp(self, x: Tensor, has_bias: bool) -> Tensor:
        """Terms or path prefixes after the MLP, computed in place if that saves a copy."""
        norm, branch_norm = self.norms(has_bias)
        if not self.is_plain:
            part = functools.partial(self._frozen_mlp, has_bias=has_bias)
            return self.sublayer.apply(x, part, norm, weighted_sum, branch_norm)
        if self.source_BND is not None:
            x = self.sublayer.skip * x
            if has_bias:
                x[0] += self.sublayer.branch * self.source_BND
            return self.sublayer.after(x, norm)
        part = functools.partial(self._gated, has_bias=has_bias)
        return self.sublayer.apply(x, part, norm, functools.partial(self._add_gated, has_bias))

    def _frozen_mlp(self, x: Tensor, has_bias: bool) -> Tensor:
        """Output of the MLP on terms or path prefixes, without its skip."""
        if self.source_BND is not None:
            y = torch.zeros_like(x)
            if has_bias:
                y[0] = self.source_BND
            return y
        down = self.sublayer.part.down
        y = F.linear(self._gated(x, has_bias), down.weight)
        if has_bias and down.bias is not None:
            y[0] += down.bias
        return y

    def _gated(self, x: Tensor, has_bias: bool) -> Tensor:
        up = self.sublayer.part.up
        z = F.linear(x, up.weight)
        if has_bias and up.bias is not None:
            z[0] += up.bias
        assert self.gate_BNF is not None  # else the source is frozen, and nothing is gated
        return z.mul_(self.gate_BNF)

    def _add_gated(self, has_bias: bool, skip: float, x: Tensor, branch: float, z: Tensor) -> Tensor:
        down = self.sublayer.part.down
        # skip and MLP in one product, skip * x + z W, in place, because nothing else needs x
        x.flatten(0, -2).addmm_(z.flatten(0, -2), down.weight.T, beta=skip, alpha=branch)
        if has_bias and down.bias is not None:
            x[0] += branch * down.bias
        return x


def _add_longer(a: float, x_TBND: Tensor, b: float, y_TBND: Tensor) -> Tensor:
    """a X + b Y for terms X and Y, where Y has one term more."""
    return a * F.pad(x_TBND, (0, 0, 0, 0, 0, 0, 0, 1)) + b * y_TBND


class FrozenNetwork:
    """A network made linear at one batch of inputs, with two treatments of the MLP.

    mlp="gate": the elementwise factor act(z)/z is frozen, so the MLP is a linear map that every path passes.
    mlp="source": the MLP's output is a constant, counted with the biases, and paths take only its skip.

    layers: the frozen sub-layers of each layer, attention first. embedding_BND: the input of the first layer.
    state_BND: the input of the read-out.
    """

    def __init__(self, network: Network, inputs: Tensor, mlp: str = "gate") -> None:
        self.network, self.last_norm = network, network.last_norm
        with torch.no_grad():
            steps = list(run(network, inputs))
            self.layers: list[tuple[FrozenAttention, list[FrozenMlp]]] = []
            for step in steps:
                if isinstance(step, MlpStep):
                    self.layers[-1][1].append(FrozenMlp.of(step, mlp))
                else:
                    scales = step.scale_BN1, step.branch_scale_BN1
                    self.layers.append((FrozenAttention(step.sublayer, *scales, step.mixing_BHNM), []))
            self.embedding_BND, self.state_BND = steps[0].input_BND, steps[-1].output_BND
            self.last_scale_BN1: Tensor | None = None
            if self.last_norm is not None:
                self.state_BND, self.last_scale_BN1 = self.last_norm.with_scale(self.state_BND)

    @torch.no_grad()
    def by_length(self) -> PathSums:
        """Every path, summed by length in one sweep over the layers: S_k <- a S_k + sum_h P_h S_(k-1) W_V,h W_O,h, in
        O(L^2) applications of a layer instead of (H+1)^L paths."""
        # term 0 is the bias; term 1 + k holds the paths of length k
        terms_TBND = torch.stack([torch.zeros_like(self.embedding_BND), self.embedding_BND])
        terms_TBND = self.network.enter(terms_TBND, self.layers[0][0].norms(has_bias=True)[0])
        for attention, mlps in self.layers:
            terms_TBND = attention.all_heads(terms_TBND)
            for mlp in mlps:
                terms_TBND = mlp.mlp(terms_TBND, has_bias=True)
        terms_TBND = self.network.leave(terms_TBND)
        terms_TBND = frozen_norm(self.last_norm, self.last_scale_BN1, True, terms_TBND)
        return PathSums(terms_TBND[1:], terms_TBND[0], self.state_BND)

    @torch.no_grad()
    def step(self, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        """Path prefixes after layer `layer` (from 0), in which they take the skip (choice 0) or head `choice`."""
        attention, mlps = self.layers[layer]
        states_PBND = attention.at(sequences).one_head(states_PBND, choice)
        for mlp in mlps:
            states_PBND = mlp.at(sequences).mlp(states_PBND, has_bias=False)
        return states_PBND

    @torch.no_grad()
    def all_choices(self, states_PBND: Tensor, layer: int) -> Tensor:
        """The sum of `step` over all choices. MLPs are linear here, so they run once instead of H + 1 times."""
        attention, mlps = self.layers[layer]
        total: Any = sum(attention.one_head(states_PBND, choice) for choice in range(self.network.num_heads + 1))
        states_PBND = total
        for mlp in mlps:
            states_PBND = mlp.mlp(states_PBND, has_bias=False)
        return states_PBND

    def start(self, sequences: slice) -> Tensor:
        """The path of no layers: the embedded inputs, (B, N, D), or their streams."""
        norm, _ = self.layers[0][0].at(sequences).norms(has_bias=False)
        return self.network.enter(self.embedding_BND[sequences], norm)

    def finish(self, states_GBND: Tensor, sequences: slice) -> Tensor:
        """Leave the streams, and apply the frozen last norm of a pre-norm or peri-norm network."""
        states_GBND = self.network.leave(states_GBND)
        scale_BN1 = None if self.last_scale_BN1 is None else self.last_scale_BN1[sequences]
        return frozen_norm(self.last_norm, scale_BN1, False, states_GBND)


def frozen_norm(norm: Norm | None, scale_BN1: Tensor | None, has_bias: bool, x: Tensor) -> Tensor:
    """Apply a norm, if there is one, with frozen scale to path prefixes or (has_bias) to terms, the first of which is
    the bias."""
    if norm is None or scale_BN1 is None:
        return x
    normed = norm.linear(x, scale_BN1)
    if has_bias and norm.shift is not None:
        normed[0] += norm.factor * norm.shift
    return normed


def sums_through_heads(network: FrozenNetwork) -> Tensor:
    """For each layer and head the sum of all frozen paths through it, (L, H, B, N, D), in one sweep.

    The sums of a layer's heads and the paths that skip it add up to the output without its bias term. The sums of all
    layers and heads count each path once per head: they add up to sum_k k S_k.
    """
    everything, heads = slice(None), network.layers[0][0].sublayer.part.heads
    all_1BND = network.start(everything)[None]
    through_TBND = all_1BND[:0]
    for layer in range(len(network.layers)):
        by_choice = [network.step(all_1BND, layer, choice, everything) for choice in range(heads + 1)]
        if layer:
            through_TBND = network.all_choices(through_TBND, layer)
        through_TBND, all_1BND = torch.cat([through_TBND, *by_choice[1:]]), functools.reduce(Tensor.add, by_choice)
    return network.finish(through_TBND, everything).unflatten(0, (len(network.layers), heads))


def sums_by_last_head(network: FrozenNetwork) -> Tensor:
    """The path without heads, then for each layer and head the sum of all frozen paths whose last head it is, (1 + L H,
    B, N, D), in one sweep. Each path is in exactly one sum, so with the bias term they add up to the output."""
    everything, heads = slice(None), network.layers[0][0].sublayer.part.heads
    sums_PBND = network.start(everything)[None]
    for layer in range(len(network.layers)):
        prefixes_1BND = sums_PBND.sum(0, keepdim=True)
        by_choice = [network.step(prefixes_1BND, layer, head, everything) for head in range(1, heads + 1)]
        sums_PBND = torch.cat([network.step(sums_PBND, layer, 0, everything), *by_choice])
    return network.finish(sums_PBND, everything)


def with_signs(network: FrozenNetwork, signs_LH: Tensor) -> FrozenNetwork:
    """The frozen network with each head's output multiplied by a sign, and each path by the signs of its heads.

    With independent signs of mean 0, E||S_k(signs)||^2 = sum over the paths p of length k of ||Y_p||^2: a path has one
    head or none in each layer, so two different paths have different sets of heads, and the product of their signs
    keeps at least one sign, whose mean is 0. This holds for sums of paths only: biases have no signs.
    """
    signed = copy.copy(network)
    signed.layers = [
        (replace(attention, mixing_BHNM=attention.mixing_BHNM * signs_H[:, None, None]), mlps)
        for (attention, mlps), signs_H in zip(network.layers, signs_LH, strict=True)
    ]
    return signed
