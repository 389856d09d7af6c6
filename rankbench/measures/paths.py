"""Path decomposition of a Transformer (Dong et al. 2021, Theorem 2.1 and sec. 4.3).

A path picks at each layer a head 1..H or the skip, 0; its length counts the heads. Two meanings, never mixed:

- frozen: attention weights, norm scales and MLP gates keep their values of the full forward pass. The network is then
  linear in its input, and its output is the sum of its paths, up to rounding.
- recomputed: each path runs as a network of its own, with attention weights from its own states: the protocol of the
  authors' code. Its paths do not add up to the output.

Shapes: B batch, N token, D width, H head, K head width, F MLP width, L layer, P path, T term, G group of paths.
"""

import copy
import functools
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.keys import ConfigError
from rankbench.measures.dong_theory import length_share as length_share
from rankbench.measures.dong_theory import num_paths
from rankbench.measures.norms import frobenius_norm
from rankbench.model.attention import Attention
from rankbench.model.network import Network, Step, Sublayer, run, weighted_sum
from rankbench.model.transformer import Norm, plain_norm

# States that the tree over paths holds at a time, in numbers. Larger chunks fall out of the cache, smaller ones pay
# more calls; between 2^19 and 2^22 the time is flat within 5 % on one core.
NUMBERS_AT_A_TIME = 1 << 22
# States of paths that are in memory together: half a GiB of float64, of which a tree holds two to three.
PATHS_NUMBERS = 1 << 26
# The sweep's terms, in bytes: about what the second-level cache holds; the whole batch at once takes twice as long.
SWEEP_BYTES = 3 << 19


class PathSums(NamedTuple):
    """A network's output, split by path length: by_length_KBND[k] sums all paths of length k. With bias_BND, everything
    that does not come from the input (biases, norm shifts), they add up to state_BND, the input of the read-out."""

    by_length_KBND: Tensor
    bias_BND: Tensor
    state_BND: Tensor

    def remainder(self) -> Tensor:
        """||state - sum of all parts||_F / ||state||_F of each sequence, shape (B,); only rounding in a correct sum.

        0 if nothing is missing, also for a state of zero.
        """
        missing_B = frobenius_norm(self.state_BND - self.by_length_KBND.sum(0) - self.bias_BND)
        return torch.where(missing_B > 0, missing_B / frobenius_norm(self.state_BND), missing_B)


def sums_by_length(network: Network, inputs: Tensor, mlp: str = "gate") -> PathSums:
    """All paths of a network, frozen, summed by length (FrozenNetwork.sums_by_length), a few sequences at a time."""
    numbers = network.num_tokens(inputs) * network.width * (network.num_layers + 2)
    most = SWEEP_BYTES
    if inputs.device.type == "cuda":
        # a GPU is idle with so few, so memory is the limit: of the terms, and of what is frozen
        numbers += network.num_layers * network.num_heads * network.num_tokens(inputs) ** 2 + 4 * numbers
        most = free_share(inputs.device)
    at_a_time = max(1, most // (numbers * network.read_out.weight.element_size()))
    parts = [FrozenNetwork(network, chunk, mlp).sums_by_length() for chunk in inputs.split(at_a_time)]
    by_length, bias, state = zip(*parts, strict=True)
    return PathSums(torch.cat(by_length, dim=1), torch.cat(bias), torch.cat(state))


def free_share(device: torch.device) -> int:
    """An eighth of the bytes that are free on a CUDA device: intermediate results take several times as much."""
    return torch.cuda.mem_get_info(device)[0] // 8


class FrozenSublayer(NamedTuple):
    """A sub-layer made linear at one batch. Fixed are the scales of its norm, the matrices by which its attention mixes
    values, and the gate of its MLP or, with mlp="source", the MLP's whole output."""

    sublayer: Sublayer
    scale_BN1: Tensor | None
    branch_scale_BN1: Tensor | None
    mixing_BHNM: Tensor | None = None
    gate_BNF: Tensor | None = None
    source_BND: Tensor | None = None

    @classmethod
    def of(cls, step: Step, mlp: str) -> "FrozenSublayer":
        """The sub-layer frozen at its step on a batch."""
        norms = step.sublayer, step.scale_BN1, step.branch_scale_BN1
        if step.sublayer.kind == "attention":
            return cls(*norms, mixing_BHNM=step.mixing_BHNM)
        if mlp == "gate":
            return cls(*norms, gate_BNF=step.sublayer.part.gate(step.hidden_BNF))
        return cls(*norms, source_BND=step.sublayer.part.from_hidden(step.hidden_BNF))

    def at(self, sequences: slice) -> "FrozenSublayer":
        """The same for some of the sequences."""
        return FrozenSublayer(self.sublayer, *(None if frozen is None else frozen[sequences] for frozen in self[1:]))

    def norm(self, x: Tensor, has_bias: bool) -> Tensor:
        """The norm with frozen scale. x (T, B, N, D): terms; with has_bias the first one is the bias."""
        return frozen_norm(x, self.sublayer.norm, self.scale_BN1, has_bias)

    def branch_norm(self, x: Tensor, has_bias: bool) -> Tensor:
        """The same for the norm behind the part."""
        return frozen_norm(x, self.sublayer.branch_norm, self.branch_scale_BN1, has_bias)

    @property
    def is_plain(self) -> bool:
        """Whether skip and part's output are simply added up, so that both can be one product."""
        return self.sublayer.streams is None and self.sublayer.branch_norm is None

    def all_heads(self, terms_TBND: Tensor) -> Tensor:
        """Terms (the bias, then paths by length) after attention with all its heads.

        There is one term more, because a path that takes a head is longer by one.
        """
        plain = self.is_plain
        return self.sublayer.apply(
            terms_TBND,
            part=self._mix_all_heads if plain else self._lengthened_heads,
            norm=functools.partial(self.norm, has_bias=True),
            add=self._skip_and_lengthen if plain else _add_longer,
            branch_norm=functools.partial(self.branch_norm, has_bias=True),
        )

    def one_head(self, states_PBND: Tensor, choice: int) -> Tensor:
        """Path prefixes that take the skip (choice 0) or head `choice`, without biases."""
        norm, branch_norm = (functools.partial(of_kind, has_bias=False) for of_kind in (self.norm, self.branch_norm))
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

    def mlp(self, x: Tensor, has_bias: bool) -> Tensor:
        """Terms or path prefixes after the MLP, computed in place if that saves a copy."""
        norm, branch_norm = (functools.partial(of_kind, has_bias=has_bias) for of_kind in (self.norm, self.branch_norm))
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

    def _mix_all_heads(self, x_TBND: Tensor) -> Tensor:
        """The mixed values of all heads side by side, before the way back to the width: (T, B, N, H K)."""
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
        """Output of all heads, with one term more, because a path that takes a head is longer by one."""
        out = self.sublayer.part.out
        y_TBND = F.linear(self._mix_all_heads(x_TBND), out.weight)
        if out.bias is not None:
            y_TBND[0] += out.bias
        return torch.cat([y_TBND[:1], torch.zeros_like(y_TBND[:1]), y_TBND[1:]])

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
        return z.mul_(self.gate_BNF)

    def _add_gated(self, has_bias: bool, skip: float, x: Tensor, branch: float, z: Tensor) -> Tensor:
        down = self.sublayer.part.down
        # skip and MLP in one product, skip * x + z W, in place, because nothing else needs x
        x.flatten(0, -2).addmm_(z.flatten(0, -2), down.weight.T, beta=skip, alpha=branch)
        if has_bias and down.bias is not None:
            x[0] += branch * down.bias
        return x


def _add_longer(a: float, x_TBND: Tensor, b: float, y_TBND: Tensor) -> Tensor:
    """a X + b Y of terms, of which Y has one more."""
    return a * F.pad(x_TBND, (0, 0, 0, 0, 0, 0, 0, 1)) + b * y_TBND


class FrozenNetwork:
    """A network made linear at one batch of inputs, with two treatments of the MLP.

    mlp="gate": the elementwise factor act(z)/z is frozen, so the MLP is a linear map that every path passes.
    mlp="source": the MLP's output is a constant, counted with the biases, and paths take its skip only.

    layers: the frozen sub-layers of each layer, attention first. embedding_BND, state_BND: the input of the first
    one, and that of the read-out.
    """

    def __init__(self, network: Network, inputs: Tensor, mlp: str = "gate") -> None:
        self.network, self.last_norm = network, network.last_norm
        with torch.no_grad():
            steps = list(run(network, inputs))
            frozen = [FrozenSublayer.of(step, mlp) for step in steps]
            starts = [number for number, step in enumerate(steps) if step.sublayer.kind == "attention"]
            self.embedding_BND, last_BND = steps[0].input_BND, steps[-1].output_BND
            norm = self.last_norm
            self.state_BND, self.last_scale_BN1 = (last_BND, None) if norm is None else norm.with_scale(last_BND)
        self.layers = [frozen[begin:end] for begin, end in pairwise([*starts, len(frozen)])]

    @torch.no_grad()
    def sums_by_length(self) -> PathSums:
        """Every path, summed by length in one sweep over the layers: S_k <- a S_k + sum_h P_h S_(k-1) W_V,h W_O,h.

        O(L^2) applications of a layer instead of (H+1)^L paths.
        """
        # term 0 is the bias; term 1 + k holds the paths of length k
        terms_TBND = torch.stack([torch.zeros_like(self.embedding_BND), self.embedding_BND])
        terms_TBND = self.network.enter(terms_TBND, functools.partial(self.layers[0][0].norm, has_bias=True))
        for attention, *mlps in self.layers:
            terms_TBND = attention.all_heads(terms_TBND)
            for mlp in mlps:
                terms_TBND = mlp.mlp(terms_TBND, has_bias=True)
        terms_TBND = self.network.leave(terms_TBND)
        if self.last_norm is not None:
            terms_TBND = frozen_norm(terms_TBND, self.last_norm, self.last_scale_BN1, has_bias=True)
        return PathSums(terms_TBND[1:], terms_TBND[0], self.state_BND)

    @torch.no_grad()
    def step(self, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        """Path prefixes after layer `layer` (from 0), in which they take the skip (choice 0) or head `choice`."""
        attention, *mlps = (frozen.at(sequences) for frozen in self.layers[layer])
        states_PBND = attention.one_head(states_PBND, choice)
        for mlp in mlps:
            states_PBND = mlp.mlp(states_PBND, has_bias=False)
        return states_PBND

    @torch.no_grad()
    def all_choices(self, states_PBND: Tensor, layer: int) -> Tensor:
        """The sum over all choices of `step`: as MLPs are linear here, one passage of theirs instead of H + 1."""
        attention, *mlps = self.layers[layer]
        states_PBND = sum(attention.one_head(states_PBND, choice) for choice in range(self.network.num_heads + 1))
        for mlp in mlps:
            states_PBND = mlp.mlp(states_PBND, has_bias=False)
        return states_PBND

    def start(self, sequences: slice) -> Tensor:
        """The path of no layers: the embedded inputs, (B, N, D), or their streams."""
        first = self.layers[0][0].at(sequences)
        return self.network.enter(self.embedding_BND[sequences], functools.partial(first.norm, has_bias=False))

    def finish(self, states_GBND: Tensor, sequences: slice) -> Tensor:
        """Leave the streams, and apply the frozen last norm of a pre-norm or peri-norm network."""
        states_GBND = self.network.leave(states_GBND)
        if self.last_norm is None:
            return states_GBND
        return frozen_norm(states_GBND, self.last_norm, self.last_scale_BN1[sequences], has_bias=False)


def frozen_norm(x: Tensor, norm: Norm, scale_BN1: Tensor, has_bias: bool) -> Tensor:
    """A norm with frozen scale, of path prefixes or (has_bias) of terms of which the first is the bias."""
    normed = norm.linear(x, scale_BN1)
    if has_bias and norm.shift is not None:
        normed[0] += norm.factor * norm.shift
    return normed


def check_recomputed(network: Network, analysis: str) -> None:
    """Raise ConfigError for weights that depend on more than one head, and for streams: no path can then run as its own
    network."""
    if len(network.shares) > 1:
        raise ConfigError(
            f"{network.name}: its tokens have {len(network.shares)} states side by side, which a path alone does not "
            f"have, so no path can be run as a network of its own; take analysis.{analysis}.schemes=[frozen]"
        )
    for attention in network.attentions:
        if not attention.weighting.by_head:
            raise ConfigError(
                f"{network.name}: its scores, {attention.score_name}, are not those of one head's queries and keys "
                f"alone, so no path can be run as a network of its own; take analysis.{analysis}.schemes=[frozen]"
            )


class RecomputedNetwork:
    """Each path as a network of its own, as the authors' code evaluates it.

    Each layer that a path uses computes attention of one head on the path's own state, adds the whole output bias, and
    applies the norm without its learned scale and shift (the network's kind; none in a network without norms). Skips,
    MLPs and layers that the path skips do nothing. mlp=True keeps the MLP sub-layers, which the authors' code leaves
    out.
    """

    def __init__(self, network: Network, inputs: Tensor, mlp: bool = False) -> None:
        check_recomputed(network, "paths")
        with torch.no_grad():
            self.embedding_BND, self.present_BN = network.embed(inputs), network.present(inputs)
            self.layers = network.layers if mlp else [[attention] for attention, *_ in network.layers]
            # per layer and head: query, key and value of one head in one product, and the way back to the width
            heads = [attention.maps_as_applied() for attention in network.attentions]
            self.read = [
                [
                    (torch.cat([w_DK.T for w_DK in (q, k, v)]), torch.cat(biases))
                    for q, k, v, *biases in zip(
                        w.w_q_HDK, w.w_k_HDK, w.w_v_HDK, w.b_q_HK, w.b_k_HK, w.b_v_HK, strict=True
                    )
                ]
                for w in heads
            ]
            self.write = [[(w_o_KD.T.contiguous(), w.b_o_D) for w_o_KD in w.w_o_HKD] for w in heads]

    @torch.no_grad()
    def step(self, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        """Path prefixes after layer `layer` (from 0), which they skip (choice 0) or pass by head `choice`."""
        if choice == 0:
            return states_PBND
        for sublayer in self.layers[layer]:
            if sublayer.kind == "attention":
                states_PBND = self._one_head(sublayer.part, states_PBND, layer, choice, sequences)
            else:
                states_PBND = sublayer.part(states_PBND)
            states_PBND = sublayer.branch * states_PBND
            if sublayer.norm is not None:
                states_PBND = plain_norm(sublayer.norm.kind, states_PBND)
        return states_PBND

    def _one_head(self, attention: Attention, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        widths = [attention.head_width] * 2 + [attention.value_width]
        q_PBNK, k_PBNK, v_PBNK = F.linear(states_PBND, *self.read[layer][choice - 1]).split(widths, dim=-1)
        # the weights are of (B, H, N, K): paths stand where heads do
        present_BN = None if self.present_BN is None else self.present_BN[sequences]
        seen_BNM = attention.seen(present_BN, q_PBNK.shape[-2], q_PBNK.device)
        p_PBNM = attention.weights(q_PBNK, k_PBNK, seen_BNM)
        gains_PBM = attention.gains(v_PBNK, present_BN)
        return F.linear(attention.mixing(p_PBNM, seen_BNM, gains_PBM, v_PBNK) @ v_PBNK, *self.write[layer][choice - 1])

    def start(self, sequences: slice) -> Tensor:
        """The path of no layers: the embedded inputs, (B, N, D)."""
        return self.embedding_BND[sequences]

    def finish(self, states_GBND: Tensor, sequences: slice) -> Tensor:
        """Return x: the read-out normalises."""
        return states_GBND


class PathTree(NamedTuple):
    """Distinct paths as a tree over layers, so that a prefix that many of them share is computed once."""

    children: list[list[tuple[int, np.ndarray]]]  # for each layer: its choices with the prefixes that they continue
    num_leaves: int
    leaf_of_path: np.ndarray  # leaf of each given path

    @classmethod
    def of(cls, paths_PL: np.ndarray) -> "PathTree":
        """The tree of these paths; repeated ones share a leaf."""
        node_P, num_nodes = np.zeros(len(paths_PL), dtype=np.int64), 1
        children = []
        for layer in range(paths_PL.shape[1]):
            # sorted by choice first: the prefixes that one step makes lie side by side
            keys, node_P = np.unique(paths_PL[:, layer] * num_nodes + node_P, return_inverse=True)
            choices, parents = np.divmod(keys, num_nodes)
            children.append([(int(choice), parents[choices == choice]) for choice in np.unique(choices)])
            num_nodes = len(keys)
        return cls(children, num_nodes, node_P)

    @property
    def num_steps(self) -> tuple[int, int]:
        """How many steps of prefixes pass a head, and how many there are with those that skip."""
        sizes = [(choice, len(parents)) for layer in self.children for choice, parents in layer]
        return sum(size for choice, size in sizes if choice), sum(size for _, size in sizes)


def sums_of_groups(network: FrozenNetwork | RecomputedNetwork, groups: list[np.ndarray]) -> Tensor:
    """The sum over each group's paths, shape (G, B, N, D); a group is an integer array (P, L) of choices 0..H.

    A path that occurs twice in a group counts twice. Of more paths than memory should hold, some run at a time.
    """
    paths_PL = np.concatenate(groups)
    group_of_path = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    _, num_tokens, width = network.start(slice(None)).shape
    batches = _batches_of_paths(paths_PL, max(1, PATHS_NUMBERS // (num_tokens * width)))
    parts = (_sums_of_tree(network, PathTree.of(paths_PL[some]), group_of_path[some], len(groups)) for some in batches)
    return functools.reduce(Tensor.add_, parts)


def _batches_of_paths(paths_PL: np.ndarray, most: int) -> list[slice | np.ndarray]:
    """Which paths run together: neighbours in lexicographic order, which share the most prefixes."""
    if len(paths_PL) <= most:
        return [slice(None)]
    return np.array_split(np.lexsort(paths_PL.T[::-1]), -(-len(paths_PL) // most))


def _sums_of_tree(
    network: FrozenNetwork | RecomputedNetwork, tree: PathTree, group_of_path: np.ndarray, num_groups: int
) -> Tensor:
    """The sum over each group's paths of one tree, (G, B, N, D)."""
    whole = network.start(slice(None))
    num_sequences, num_tokens, width = whole.shape
    # (G, leaves), how often each group has each leaf: the sums are a sparse product that copies no leaf
    counts = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([group_of_path, tree.leaf_of_path])),
        torch.ones(len(group_of_path), dtype=whole.dtype),
        (num_groups, tree.num_leaves),
        device=whole.device,
        check_invariants=False,
    )
    last_counts = _split_columns(counts, [len(parents) for _, parents in tree.children[-1]])
    sums = []
    most = NUMBERS_AT_A_TIME if whole.device.type != "cuda" else free_share(whole.device) // whole.element_size()
    at_a_time = max(1, most // (tree.num_leaves * num_tokens * width))
    for begin in range(0, num_sequences, at_a_time):
        sequences = slice(begin, begin + at_a_time)
        states_PBND = network.start(sequences)[None]
        for layer, children in enumerate(tree.children):
            after = (
                network.step(_rows(states_PBND, parents), layer, choice, sequences) for choice, parents in children
            )
            if layer < len(tree.children) - 1:
                states_PBND = torch.cat(list(after))
        part_GBND = whole.new_zeros(num_groups, *whole[sequences].shape)
        for counts_of_choice, leaves_PBND in zip(last_counts, after, strict=True):
            part_GBND += torch.sparse.mm(counts_of_choice, leaves_PBND.flatten(1)).view_as(part_GBND)
        sums.append(network.finish(part_GBND, sequences))
    return torch.cat(sums, 1)


def _split_columns(counts: Tensor, widths: list[int]) -> list[Tensor]:
    counts = counts.coalesce()
    bounds = np.cumsum([0, *widths])
    return [
        counts.index_select(1, torch.arange(low, high, device=counts.device)).coalesce()
        for low, high in pairwise(bounds)
    ]


def _rows(states_PBND: Tensor, rows: np.ndarray) -> Tensor:
    if len(rows) == len(states_PBND) and (rows == np.arange(len(rows))).all():
        return states_PBND  # all of them in order: no copy
    return states_PBND[torch.from_numpy(rows).to(states_PBND.device)]


def all_paths(layers: int, heads: int, length: int, skip: bool = True) -> np.ndarray:
    """Every path of this length, (P, L), in lexicographic order."""
    paths = np.zeros((num_paths(layers, heads, length, skip), layers), dtype=np.int64)
    if len(paths):
        choices = np.array(list(product(range(1, heads + 1), repeat=length)), dtype=np.int64)
        for number, used in enumerate(combinations(range(layers), length)):
            paths[number * len(choices) : (number + 1) * len(choices), list(used)] = choices
    return paths[np.lexsort(paths.T[::-1])]


def sample_paths(
    layers: int, heads: int, length: int, number: int, generator: torch.Generator, replacement: bool, skip: bool = True
) -> np.ndarray:
    """Paths of this length, (P, L), uniform over all of them; without replacement at most all of them."""
    count = num_paths(layers, heads, length, skip)
    if count == 0 or (not replacement and count <= number):
        return all_paths(layers, heads, length, skip)
    drawn: dict[Any, list[int]] = {}  # by number, or by path, which then none repeats; a set would lose their order
    while len(drawn) < number:
        # a uniform set of layers and independent uniform heads make a uniform path
        path = torch.zeros(layers, dtype=torch.int64)
        used = torch.randperm(layers, generator=generator)[:length]
        path[used] = torch.randint(1, heads + 1, (length,), generator=generator)
        drawn[len(drawn) if replacement else tuple(path.tolist())] = path.tolist()
    return np.array(list(drawn.values()), dtype=np.int64).reshape(number, layers)


def read_out(network: Network, states: Tensor, readout: str) -> Tensor:
    """Outputs of the trained read-out for sums of paths: of the raw sum, or of the sum normalised per token without
    learned scale or shift, as the authors' code does."""
    if readout == "normalised":
        states = plain_norm(network.norm_kind, states)
    return network.read_out(states)


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
        through_TBND, all_1BND = torch.cat([through_TBND, *by_choice[1:]]), sum(by_choice)
    return network.finish(through_TBND, everything).unflatten(0, (len(network.layers), heads))


def sums_by_last_head(network: FrozenNetwork) -> Tensor:
    """The path without heads, then for each layer and head the sum of all frozen paths whose last head it is, (1 + L H,
    B, N, D), in one sweep. Each path is in one of the sums, so that with the bias term they add up to the output."""
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
        [attention._replace(mixing_BHNM=attention.mixing_BHNM * signs_H[:, None, None]), *mlps]
        for (attention, *mlps), signs_H in zip(network.layers, signs_LH, strict=True)
    ]
    return signed


def joint_network(network: FrozenNetwork | RecomputedNetwork, choices: list[list[int]]) -> Tensor:
    """The output (B, N, D) of one network that has only these choices in each layer, and adds up their results there.

    Frozen, it is the sum of all paths that combine these choices, up to rounding. Recomputed it is not, because the
    attention and norms of a path then see the states of the others.
    """
    everything = slice(None)
    states_1BND = network.start(everything)[None]
    for layer, chosen in enumerate(choices):
        states_1BND = sum(network.step(states_1BND, layer, choice, everything) for choice in chosen)
    return network.finish(states_1BND, everything)[0]
