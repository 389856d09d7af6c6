"""Paths of a Transformer, and sums over chosen ones (Dong et al. 2021, Theorem 2.1 and sec. 4.3).

A path picks at each layer a head 1..H or the skip, 0; its length counts the heads. There are two kinds, never mixed:
frozen paths add up to the network's output (rankbench.measures.frozen_network), recomputed paths are networks of their
own (rankbench.measures.recomputed_network).

Shapes: B batch, N token, D width, H head, L layer, P path, G group of paths.
"""

import functools
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankbench.measures.dong_theory import num_paths
from rankbench.measures.frozen_network import FrozenNetwork, free_share
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.model.network import Network
from rankbench.model.norm import plain_norm

# Size of the states that the tree over paths holds at a time. Larger chunks fall out of the cache, smaller ones cost
# more calls; between 2^19 and 2^22 the time is flat within 5 % on one core.
NUMBERS_AT_A_TIME = 1 << 22
# Size of the states of paths that are in memory together: half a GiB in float64; a tree holds two to three times that.
PATHS_NUMBERS = 1 << 26


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


def paths_as(scheme: str, model: Network, inputs: Tensor) -> FrozenNetwork | RecomputedNetwork:
    """The network that runs the paths of a scheme, frozen or recomputed, on these inputs."""
    return FrozenNetwork(model, inputs) if scheme == "frozen" else RecomputedNetwork(model, inputs)


def chunks_of(inputs: Tensor, numbers_per_sequence: int) -> tuple[Tensor, ...]:
    """The sequences in chunks of at most NUMBERS_AT_A_TIME numbers."""
    return inputs.split(max(1, NUMBERS_AT_A_TIME // numbers_per_sequence))


def sums_of_groups(network: FrozenNetwork | RecomputedNetwork, groups: list[np.ndarray]) -> Tensor:
    """The sum over each group's paths, shape (G, B, N, D); a group is an integer array (P, L) of choices 0..H. A path
    that occurs twice in it counts twice."""
    paths_PL = np.concatenate(groups)
    group_of_path = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    _, num_tokens, width = network.start(slice(None)).shape
    batches = _batches_of_paths(paths_PL, max(1, PATHS_NUMBERS // (num_tokens * width)))
    parts = (_sums_of_tree(network, PathTree.of(paths_PL[rows]), group_of_path[rows], len(groups)) for rows in batches)
    return functools.reduce(Tensor.add_, parts)


def _batches_of_paths(paths_PL: np.ndarray, most: int) -> list[slice | np.ndarray]:
    """Which paths run together: neighbours in lexicographic order, which share the most prefixes."""
    if len(paths_PL) <= most:
        return [slice(None)]
    return [*np.array_split(np.lexsort(paths_PL.T[::-1]), -(-len(paths_PL) // most))]


def _sums_of_tree(
    network: FrozenNetwork | RecomputedNetwork, tree: PathTree, group_of_path: np.ndarray, num_groups: int
) -> Tensor:
    """The sum over each group's paths of one tree, (G, B, N, D)."""
    whole = network.start(slice(None))
    num_sequences, num_tokens, width = whole.shape
    # for each last choice (G, leaves), how often each group has each leaf: sums are sparse products that copy no leaf
    last_counts, bounds = [], np.cumsum([0, *(len(parents) for _, parents in tree.children[-1])])
    for low, high in pairwise(bounds):
        own = (low <= tree.leaf_of_path) & (tree.leaf_of_path < high)
        indices = torch.from_numpy(np.stack([group_of_path[own], tree.leaf_of_path[own] - low]))
        ones = torch.ones(indices.shape[1], dtype=whole.dtype)
        with torch.sparse.check_sparse_tensor_invariants(False):  # on CUDA torch warns unless it is told so
            counts = torch.sparse_coo_tensor(indices, ones, (num_groups, int(high - low)), device=whole.device)
            last_counts.append(counts.coalesce())
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
    drawn: dict[Any, list[int]] = {}  # keyed by number, or by path so that none repeats; a set would lose their order
    while len(drawn) < number:
        # a uniform set of layers and independent uniform heads make a uniform path
        path = torch.zeros(layers, dtype=torch.int64)
        used = torch.randperm(layers, generator=generator)[:length]
        path[used] = torch.randint(1, heads + 1, (length,), generator=generator)
        drawn[len(drawn) if replacement else tuple(path.tolist())] = path.tolist()
    return np.array(list(drawn.values()), dtype=np.int64).reshape(number, layers)


def read_out(network: Network, states: Tensor, readout: str) -> Tensor:
    """Outputs of the trained read-out for sums of paths: of the raw sum, or of the sum normalised per token without
    learned scale or shift, as in the authors' code."""
    if readout == "normalised":
        states = plain_norm(network.norm_kind, states)
    return network.read_out(states)


def joint_network(network: FrozenNetwork | RecomputedNetwork, choices: list[list[int]]) -> Tensor:
    """The output (B, N, D) of one network that adds up the results of these choices in each layer. It is the sum of all
    paths that combine them if they are frozen; recomputed attention and norms see the states of all these paths."""
    everything = slice(None)
    states_1BND = network.start(everything)[None]
    for layer, chosen in enumerate(choices):
        total: Any = sum(network.step(states_1BND, layer, choice, everything) for choice in chosen)
        states_1BND = total
    return network.finish(states_1BND, everything)[0]
