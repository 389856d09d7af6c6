"""The number of paths through a recorded network, counted on the graph of its attention calls and heads."""

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rankbench.tape.reading import Reading
from rankbench.tape.replay import Node, Replay, Slots, Step
from rankbench.tape.steps import Affine, Mixed, Sum, by_head
from rankbench.tape.tags import Site

Counts = Sequence[Any]  # by length: whole numbers of any size, or an array of one for each head
Links = dict[tuple[Site, Site], Tensor]  # which heads of a call lead to which of a next one, (H, H)


class Paths(NamedTuple):
    """Numbers of paths to a tensor. by_length: of k heads. through: those that pass one head of each call, the mean
    over its heads."""

    by_length: list[int]
    through: dict[Site, int]

    @classmethod
    def of(
        cls, before: dict[Site, set[Site | None]], last: set[Site | None], reading: Reading, links: Links
    ) -> "Paths":
        """From the calls that lead to each call, and to the tensor; None: paths may begin there. links: of the calls
        not all of whose heads lead to all heads of the next."""
        heads = {key: reading.by_key[key].lead.heads for key in before}
        order = sorted(before, key=lambda key: reading.by_key[key].number)
        linked: dict[tuple[Site | None, Site], Any] = {
            pair: np.array(link.tolist(), dtype=object) * 1 for pair, link in links.items()
        }
        upto: dict[Site | None, Counts] = {None: [np.array([1], dtype=object)]}  # the paths that end with each head
        totals: dict[Site | None, list[int]] = {None: [1]}
        for key in order:
            ends = [
                [count @ linked[x, key] for count in upto[x]] if (x, key) in linked else totals[x] for x in before[key]
            ]
            upto[key] = [np.full(heads[key], 0, dtype=object) + count for count in (0, *_sum_of(ends))]
            totals[key] = [count.sum() for count in upto[key]]
        # the ways to go on behind each head
        after = {key: np.full(heads[key], int(key in last), dtype=object) for key in order}
        for key in reversed(order):
            for x in filter(None, before[key]):
                after[x] = after[x] + (linked[x, key] @ after[key] if (x, key) in linked else after[key].sum())
        through = {key: int((sum(upto[key]) * after[key]).sum()) // heads[key] for key in order}
        return cls(_sum_of([totals[x] for x in last]), through)


def _sum_of(counts: Sequence[Counts]) -> list[Any]:
    return [sum(each) for each in zip_longest(*counts, fillvalue=0)]


def paths_of(nodes: Sequence[Node], counted_as: Callable[[Node], Site], reading: Reading) -> Paths:
    """The number of paths to the last node. counted_as: the attention call whose heads a node passes."""
    before: dict[Site, set[Site | None]] = {}  # those that lead to a call without another in between; None: none
    last: dict[Node, set[Site | None]] = {}
    links: Links = {}
    for number, node in enumerate(nodes):
        known = set().union(*(last[x] if isinstance(x, Node) else _begun(x, node) for x in node.parents or (None,)))
        last[node] = known
        if isinstance(node.step, Mixed):
            key = counted_as(node)
            before.setdefault(key, set()).update(known)
            last[node] = {key}
            for later, link in _links(node, nodes[number + 1 :], counted_as, reading):
                pair = key, counted_as(later)
                links[pair] = link | links.get(pair, torch.zeros_like(link))
    links = {pair: link for pair, link in links.items() if not link.all()}
    return Paths.of(before, last[nodes[-1]] if nodes else {None}, reading, links)


def _begun(x: Tensor | None, node: Node) -> set[Site | None]:
    """The beginning of a path, at a source or a constant; none at zeros, to which others are added or written, and at a
    bias: a vector that is added to all tokens alike."""
    if x is None:
        return {None}
    is_bias = isinstance(node.step, Sum) and 0 < x.dim() < len(node.shape) and x.numel() == max(x.shape)
    return {None} if bool(x.any()) and not is_bias else set()


@torch.no_grad()
def _links(
    first: Node, nodes: Sequence[Node], counted_as: Callable[[Node], Site], reading: Reading
) -> Iterator[tuple[Node, Tensor]]:
    """The attention calls among these nodes that read what a call makes, and which of its heads each of their heads
    reads, (H, H). Numbers of one head at a time show it, until a map of all heads joins them."""
    sweep, lead = Replay(shift=0, constants=False), reading.by_key[counted_as(first)].lead
    width, joined = first.shape[-1], set[Node]()
    like = next(x for x, _ in first.held if x.is_floating_point())
    made = torch.rand(first.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[None] + 1
    values = {first: Slots(0, by_head(made.to(like), lead.numbers(first.shape[:-2]), lead.heads))}
    for node in nodes:
        is_joined = any(x in joined for x in node.parents)
        parents = [values.get(x) if isinstance(x, Node) else None for x in node.parents]
        if not is_joined and not any(parents):
            continue
        if isinstance(node.step, Mixed):
            yield node, _heads_of(node, None if is_joined else parents[0], lead.heads, counted_as, reading)
        elif is_joined or _is_of_all(node.step, width, lead.heads):
            joined.add(node)
        else:
            made_here = node.step(sweep, sweep.filled(node, parents), [False] * len(parents))
            if bool((made_here.rows != 0).all()):
                joined.add(node)
            else:
                values[node] = made_here


def _is_of_all(step: Step, width: int, heads: int) -> bool:
    """Whether a step is a map of the numbers of so many heads of this width, side by side."""
    return isinstance(step, Affine) and width < step.weight_FD.shape[1] >= width * heads


def _heads_of(
    node: Node, values: Slots | None, heads: int, counted_as: Callable[[Node], Site], reading: Reading
) -> Tensor:
    """Which of so many heads each head of an attention call reads, (H, H); all if these are joined, and have no values
    of their own. values: (H, *lead, M, K)."""
    lead = reading.by_key[counted_as(node)].lead
    if values is None:
        return torch.ones(heads, lead.heads, dtype=torch.bool)
    read = (values.rows != 0).flatten(-2).any(-1).cpu()
    if read.shape[1:] != (wanted := node.shape[:-2]):  # groups of heads share their values
        read = read.repeat_interleave(wanted[-1] // read.shape[-1], -1)
    numbers = lead.numbers(wanted)
    return torch.stack([(read & (numbers == head)).flatten(1).any(1) for head in range(lead.heads)], 1)
