"""Path decomposition of a Transformer (Dong et al. 2021, Theorem 2.1 and sec. 4.3).

A path picks at each layer a head 1..H or the skip, 0; its length counts the heads. Two meanings, never mixed:

- frozen: attention weights, norm scales and MLP gates stay at what the full forward pass gave. The network is then
  linear in its input and the paths are the terms of a sum that is its output, to rounding.
- recomputed: each path runs as a network of its own, with attention weights from its own states: the protocol of the
  authors' code. Its paths do not add up to the output.

Shapes: B batch, N token, D width, H head, K head width, F MLP width, L layer, P path, T term, G group of paths.
"""

import copy
from collections.abc import Callable
from itertools import combinations, pairwise, product
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rankbench.metrics import frobenius_norm
from rankbench.model.trace import Trace
from rankbench.model.transformer import Block, Norm, Transformer
from rankbench.theory import length_share as length_share
from rankbench.theory import num_paths

# States that the tree over paths holds at a time, in numbers. Larger chunks fall out of the cache, smaller ones pay
# more calls; between 2^19 and 2^22 the time is flat within 5 % on one core.
NUMBERS_AT_A_TIME = 1 << 22
# The sweep's terms, in bytes: about what the second-level cache holds; the whole batch at once takes twice as long.
SWEEP_BYTES = 3 << 19
FROZEN = ("mixing", "norm_scale", "gate", "embedding", "state")


class PathSums(NamedTuple):
    """A network's output, split by path length: by_length_KBND[k] sums all paths of length k; with bias_BND, whatever
    does not come from the input (biases, norm shifts), they add up to state_BND, what the read-out sees."""

    by_length_KBND: Tensor
    bias_BND: Tensor
    state_BND: Tensor

    def remainder(self) -> Tensor:
        """||state - sum of all parts||_F / ||state||_F of each sequence, shape (B,): rounding, if all is right.

        0 where nothing is missing, of a state of zero too.
        """
        missing_B = frobenius_norm(self.state_BND - self.by_length_KBND.sum(0) - self.bias_BND)
        return torch.where(missing_B > 0, missing_B / frobenius_norm(self.state_BND), missing_B)


def sums_by_length(model: Transformer, inputs: Tensor, mlp: str = "gate") -> PathSums:
    """All paths of a network, frozen, summed by length (FrozenNetwork.sums_by_length), a few sequences at a time."""
    numbers = inputs.shape[1] * model.cfg.width * (model.cfg.layers + 2)
    at_a_time = max(1, SWEEP_BYTES // (numbers * model.read_out.weight.element_size()))
    parts = [FrozenNetwork(model, some, mlp).sums_by_length() for some in inputs.split(at_a_time)]
    by_length, bias, state = zip(*parts, strict=True)
    return PathSums(torch.cat(by_length, dim=1), torch.cat(bias), torch.cat(state))


class FrozenNetwork:
    """A Transformer made linear at one batch of inputs, in two ways of looking at the MLP.

    mlp="gate": the elementwise factor act(z)/z is frozen, so the MLP is a linear map that every path passes.
    mlp="source": the MLP's output is a constant of its own, counted with the biases, and paths pass by its skip alone.
    """

    def __init__(self, model: Transformer, inputs: Tensor, mlp: str = "gate") -> None:
        self.model, self.mlp = model, mlp
        # a source needs the MLP's own output: the trace of the inputs to it is enough
        self.trace = Trace(*FROZEN, *(("mlp.input",) if mlp == "source" else ()))
        with torch.no_grad():
            model(inputs, trace=self.trace)

    @torch.no_grad()
    def sums_by_length(self) -> PathSums:
        """Every path, summed by length in one sweep over the layers: S_k <- a S_k + sum_h P_h S_(k-1) W_V,h W_O,h.

        O(L^2) applications of a layer instead of (H+1)^L paths.
        """
        embedding_BND = self.trace["embedding"]
        # term 0 is the bias; term 1 + k holds the paths of length k
        terms_TBND = torch.stack([torch.zeros_like(embedding_BND), embedding_BND])
        for layer, block in enumerate(self.model.blocks):
            name = f"layers.{layer}.attention"
            read_TBND = self._before(terms_TBND, block.attention_norm, name, block)
            mixed_TBND = self._mix_all_heads(read_TBND, layer)  # before the way back to the width: (T, B, N, H K)
            # term t stays by the skip and moves to t + 1 by a head, but for the bias, which has no length
            longer_TBND = F.pad(terms_TBND, (0, 0, 0, 0, 0, 0, 0, 1))
            if block.attention_skip != 1:
                longer_TBND *= block.attention_skip
            way_back = block.attention.out.weight.T
            branch = block.branch_scale
            longer_TBND[0].flatten(0, 1).addmm_(mixed_TBND[0].flatten(0, 1), way_back, alpha=branch)
            if block.attention.out.bias is not None:
                longer_TBND[0] += branch * block.attention.out.bias
            longer_TBND[2:].flatten(0, 2).addmm_(mixed_TBND[1:].flatten(0, 2), way_back, alpha=branch)
            terms_TBND = self._after(longer_TBND, block.attention_norm, name, block)
            terms_TBND = self._mlp(terms_TBND, layer, has_bias=True)
        if self.model.last_norm is not None:
            terms_TBND = _norm(terms_TBND, self.model.last_norm, self.trace["last_norm_scale"], has_bias=True)
        return PathSums(terms_TBND[1:], terms_TBND[0], self.trace["state"])

    @torch.no_grad()
    def step(self, states_PBND: Tensor, layer: int, choice: int, sequences: slice) -> Tensor:
        """What layer `layer` makes of path prefixes that take the skip (choice 0) or head `choice`."""
        block, name = self.model.blocks[layer], f"layers.{layer}.attention"
        if choice == 0:
            states_PBND = block.attention_skip * states_PBND
        else:
            read_PBND = self._before(states_PBND, block.attention_norm, name, block, False, sequences)
            w = block.attention.head_weights()
            p_BNM = self.trace[f"{name}.mixing"][sequences, choice - 1]
            states_PBND = block.branch_scale * ((p_BNM @ (read_PBND @ w.w_v_HDK[choice - 1])) @ w.w_o_HKD[choice - 1])
        states_PBND = self._after(states_PBND, block.attention_norm, name, block, False, sequences)
        return self._mlp(states_PBND, layer, has_bias=False, sequences=sequences)

    def start(self, sequences: slice) -> Tensor:
        """The path that has not begun: the embedded inputs, (B, N, D)."""
        return self.trace["embedding"][sequences]

    def finish(self, states_GBND: Tensor, sequences: slice) -> Tensor:
        """After the last layer: the last norm of a pre-norm network, frozen."""
        if self.model.last_norm is None:
            return states_GBND
        return _norm(states_GBND, self.model.last_norm, self.trace["last_norm_scale"][sequences], has_bias=False)

    def _mix_all_heads(self, x_TBND: Tensor, layer: int) -> Tensor:
        attention = self.model.blocks[layer].attention
        num_terms, num_sequences, num_tokens, _ = x_TBND.shape
        w = attention.head_weights()
        v_TBNHK = F.linear(x_TBND, w.w_v_HDK.mT.flatten(0, 1)).unflatten(-1, (attention.heads, -1))
        v_TBNHK[0] += w.b_v_HK
        # all terms in one product with P: (B H, N, M) @ (B H, M, T K)
        v_BHMTK = v_TBNHK.permute(1, 3, 2, 0, 4).reshape(num_sequences * attention.heads, num_tokens, -1)
        p_BHNM = self.trace[f"layers.{layer}.attention.mixing"].flatten(0, 1)
        mixed = torch.bmm(p_BHNM, v_BHMTK).view(num_sequences, attention.heads, num_tokens, num_terms, -1)
        return mixed.permute(3, 0, 2, 1, 4).reshape(num_terms, num_sequences, num_tokens, -1)

    def _before(
        self, x: Tensor, norm: Norm | None, name: str, block: Block, has_bias: bool = True, at: slice = slice(None)
    ) -> Tensor:
        return _norm(x, norm, self.trace[f"{name}.norm_scale"][at], has_bias) if block.place == "pre" else x

    def _after(
        self, x: Tensor, norm: Norm | None, name: str, block: Block, has_bias: bool = True, at: slice = slice(None)
    ) -> Tensor:
        return _norm(x, norm, self.trace[f"{name}.norm_scale"][at], has_bias) if block.place == "post" else x

    def _mlp(self, x: Tensor, layer: int, has_bias: bool, sequences: slice = slice(None)) -> Tensor:
        block, name = self.model.blocks[layer], f"layers.{layer}.mlp"
        if block.mlp is None:
            return x
        if self.mlp == "source":
            out = block.mlp_skip * x
            if has_bias:
                read = self.trace[f"{name}.input"][sequences]
                read = block.mlp_norm(read, "", None) if block.place == "pre" else read
                out[0] += block.branch_scale * block.mlp(read, "", None)
        else:
            z = F.linear(self._before(x, block.mlp_norm, name, block, has_bias, sequences), block.mlp.up.weight)
            if has_bias and block.mlp.up.bias is not None:
                z[0] += block.mlp.up.bias
            z.mul_(self.trace[f"{name}.gate"][sequences])
            # skip and MLP in one product, skip * x + z W, in place: nothing else needs x any more
            out, branch = x, block.branch_scale
            out.flatten(0, -2).addmm_(z.flatten(0, -2), block.mlp.down.weight.T, beta=block.mlp_skip, alpha=branch)
            if has_bias and block.mlp.down.bias is not None:
                out[0] += branch * block.mlp.down.bias
        return self._after(out, block.mlp_norm, name, block, has_bias, sequences)


class RecomputedNetwork:
    """Each path as a network of its own, as the authors' code evaluates it.

    At each layer that a path uses: attention of its one head on the path's own state, the whole output bias, then the
    norm without its learned scale and shift (the network's kind; none in a network without norms). Skips, MLPs and
    layers that the path skips do nothing. mlp=True keeps the MLP sub-layers, which the authors' code leaves out.
    """

    def __init__(self, model: Transformer, inputs: Tensor, mlp: bool = False) -> None:
        self.model, self.mlp = model, mlp
        with torch.no_grad():
            self.embedding_BND, self.present_BN = model.embed(inputs), model.present(inputs)
            # per layer and head: query, key and value of one head in one product, and the way back to the width
            heads = [block.attention.head_weights() for block in model.blocks]
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
        """What layer `layer` makes of path prefixes that skip it (choice 0) or take its head `choice`."""
        if choice == 0:
            return states_PBND
        block = self.model.blocks[layer]
        widths = [block.attention.head_width] * 2 + [block.attention.value_width]
        q_PBNK, k_PBNK, v_PBNK = F.linear(states_PBND, *self.read[layer][choice - 1]).split(widths, dim=-1)
        # the score functions take (B, H, N, K): paths stand where heads do
        present_BN = None if self.present_BN is None else self.present_BN[sequences]
        seen_BNM = block.attention.seen(present_BN, q_PBNK.shape[-2], q_PBNK.device)
        p_PBNM = block.attention.weights(q_PBNK, k_PBNK, seen_BNM)
        gains_PBM = block.attention.gains(v_PBNK, present_BN)
        mixed_PBNK = block.attention.mixing(p_PBNM, seen_BNM, gains_PBM) @ v_PBNK
        out_PBND = block.branch_scale * F.linear(mixed_PBNK, *self.write[layer][choice - 1])
        if block.attention_norm is not None:
            out_PBND = block.attention_norm.plain(out_PBND)
        if self.mlp and block.mlp is not None:
            out_PBND = block.branch_scale * block.mlp(out_PBND, "", None)
            if block.mlp_norm is not None:
                out_PBND = block.mlp_norm.plain(out_PBND)
        return out_PBND

    def start(self, sequences: slice) -> Tensor:
        """The path that has not begun: the embedded inputs, (B, N, D)."""
        return self.embedding_BND[sequences]

    def finish(self, states_GBND: Tensor, sequences: slice) -> Tensor:
        """Nothing: the read-out normalises."""
        return states_GBND


class PathTree(NamedTuple):
    """Distinct paths as a tree over layers, so that a prefix that many of them share is computed once."""

    children: list[list[tuple[int, np.ndarray]]]  # per layer: each choice, and the prefixes that it continues
    num_leaves: int
    leaf_of_path: np.ndarray  # for each given path: its leaf

    @classmethod
    def of(cls, paths_PL: np.ndarray) -> "PathTree":
        """The tree of these paths, repeated ones sharing a leaf."""
        node_P, num_nodes = np.zeros(len(paths_PL), dtype=np.int64), 1
        children = []
        for layer in range(paths_PL.shape[1]):
            # sorted by choice first: the prefixes that one step makes lie side by side
            keys, node_P = np.unique(paths_PL[:, layer] * num_nodes + node_P, return_inverse=True)
            choices, parents = np.divmod(keys, num_nodes)
            children.append([(int(choice), parents[choices == choice]) for choice in np.unique(choices)])
            num_nodes = len(keys)
        return cls(children, num_nodes, node_P)


def sums_of_groups(network: FrozenNetwork | RecomputedNetwork, groups: list[np.ndarray]) -> Tensor:
    """The sum over each group's paths, shape (G, B, N, D); a group is an integer array (P, L) of choices 0..H.

    A path that stands twice in a group counts twice.
    """
    tree = PathTree.of(np.concatenate(groups))
    group_of_path = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    whole = network.start(slice(None))
    num_sequences, num_tokens, width = whole.shape
    # (G, leaves), how often each group has each leaf: sums are a sparse product, without a copy of any leaf
    counts = torch.sparse_coo_tensor(
        torch.from_numpy(np.stack([group_of_path, tree.leaf_of_path])),
        torch.ones(len(group_of_path), dtype=whole.dtype),
        (len(groups), tree.num_leaves),
        device=whole.device,
        check_invariants=False,
    )
    last_counts = _split_columns(counts, [len(parents) for _, parents in tree.children[-1]])
    sums_GBND = whole.new_zeros(len(groups), *whole.shape)
    at_a_time = max(1, NUMBERS_AT_A_TIME // (tree.num_leaves * num_tokens * width))
    for begin in range(0, num_sequences, at_a_time):
        sequences = slice(begin, begin + at_a_time)
        states_PBND = network.start(sequences)[None]
        for layer, children in enumerate(tree.children):
            made = (network.step(_rows(states_PBND, parents), layer, choice, sequences) for choice, parents in children)
            if layer < len(tree.children) - 1:
                states_PBND = torch.cat(list(made))
        for part, leaves_PBND in zip(last_counts, made, strict=True):
            sums_GBND[:, sequences] += torch.sparse.mm(part, leaves_PBND.flatten(1)).view_as(sums_GBND[:, sequences])
        sums_GBND[:, sequences] = network.finish(sums_GBND[:, sequences], sequences)
    return sums_GBND


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
        choices = np.array(list(product(range(1, heads + 1), repeat=length)), dtype=np.int64).reshape(
            heads**length, length
        )
        for number, used in enumerate(combinations(range(layers), length)):
            paths[number * len(choices) : (number + 1) * len(choices), list(used)] = choices
    return paths[np.lexsort(paths.T[::-1])]


def sample_paths(
    layers: int,
    heads: int,
    length: int,
    number: int,
    generator: torch.Generator,
    *,
    replacement: bool,
    skip: bool = True,
) -> np.ndarray:
    """Paths of this length, (P, L), uniform over all of them; without replacement all, where there are no more."""
    count = num_paths(layers, heads, length, skip)
    if count == 0 or (not replacement and count <= number):
        return all_paths(layers, heads, length, skip)
    drawn: dict[tuple[int, ...], None] | list = [] if replacement else {}
    while len(drawn) < number:
        # a uniform set of layers and independent uniform heads make a uniform path
        path = torch.zeros(layers, dtype=torch.int64)
        used = torch.randperm(layers, generator=generator)[:length]
        path[used] = torch.randint(1, heads + 1, (length,), generator=generator)
        key = tuple(path.tolist())
        if replacement:
            drawn.append(key)
        else:
            drawn[key] = None  # a set would lose the order of drawing
    return np.array(list(drawn), dtype=np.int64).reshape(number, layers)


def read_out(model: Transformer, states: Tensor, readout: str) -> Tensor:
    """Outputs of the trained read-out for sums of paths: of the raw sum, or of the sum normalised per token without
    learned scale or shift, as the authors' code does."""
    if readout == "normalised":
        states = _plain_norm(model)(states)
    return model.read_out(states)


def _plain_norm(model: Transformer) -> Callable[[Tensor], Tensor]:
    return Norm(model.cfg, affine=False).plain


def _norm(x: Tensor, norm: Norm, scale_BN1: Tensor, has_bias: bool) -> Tensor:
    out = norm.linear(x, scale_BN1)
    if has_bias and norm.shift is not None:
        out[0] += norm.shift
    return out


def sums_through_heads(network: FrozenNetwork) -> Tensor:
    """For each layer and head the sum of all frozen paths through it, (L, H, B, N, D), in one sweep.

    Those of a layer's heads and the paths that skip it add up to the output without its bias term; those of all layers
    and heads count each path by its length, sum_k k S_k.
    """
    cfg, everything = network.model.cfg, slice(None)
    terms_TBND = network.start(everything)[None]  # term 0: all paths; the others: all paths through one head
    for layer in range(cfg.layers):
        made = [network.step(terms_TBND, layer, choice, everything) for choice in range(cfg.heads + 1)]
        through_HBND = torch.stack([by_head_TBND[0] for by_head_TBND in made[1:]])
        terms_TBND = torch.cat([sum(made), through_HBND])
    return network.finish(terms_TBND[1:], everything).unflatten(0, (cfg.layers, cfg.heads))


def with_signs(network: FrozenNetwork, signs_LH: Tensor) -> FrozenNetwork:
    """The same frozen network with each head's output multiplied by a sign; its paths by their heads' signs.

    With independent signs of mean 0, E||S_k(signs)||^2 = sum over the paths p of length k of ||Y_p||^2: a path has one
    head or none in each layer, so two different paths have different sets of heads, and the product of their signs
    keeps at least one sign, whose mean is 0. Only sums of paths are meant: biases do not follow the signs.
    """
    signed = copy.copy(network)
    signed.trace = dict(network.trace)
    for layer, signs_H in enumerate(signs_LH):
        name = f"layers.{layer}.attention.mixing"
        signed.trace[name] = network.trace[name] * signs_H[:, None, None]
    return signed


def joint_network(network: FrozenNetwork | RecomputedNetwork, choices: list[list[int]]) -> Tensor:
    """The output (B, N, D) of one network that has only these choices in each layer: every layer adds up what its
    choices make of one and the same state.

    Frozen, it is the sum of all paths that these choices make up, to rounding. Recomputed it is not: a path's
    attention and norms then see the others' states.
    """
    everything = slice(None)
    states_1BND = network.start(everything)[None]
    for layer, chosen in enumerate(choices):
        states_1BND = sum(network.step(states_1BND, layer, choice, everything) for choice in chosen)
    return network.finish(states_1BND, everything)[0]
