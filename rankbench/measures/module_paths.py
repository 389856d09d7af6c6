"""Sums of all paths by length, for a torch module from outside rankbench, a few sequences at a time
(rankbench.model.tape).

Shapes: B sequence, K path length; `...` the axes of the module's output after the sequences.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rankbench.keys import ConfigError
from rankbench.measures.frozen_network import free_share
from rankbench.measures.norms import euclidean_norm
from rankbench.measures.rounding import FLOOR_SEQUENCES, FloorsOfSums, RandomRounding, num_passes
from rankbench.model.modules import Example
from rankbench.model.tape import COVERED, AttentionCall, Sums, Tape, record, tap
from rankbench.model.tape.recording import tensors_in
from rankbench.tasks.task import Score, score

# In the sums of all lengths, on a CPU. Four times as many take up to 1.2 times as long, because no call then fits the
# caches; a quarter as many take up to 1.3 times as long, because each recorded pass costs 20 ms of Python.
BYTES_AT_A_TIME = 1 << 24


class Heads(NamedTuple):
    """The heads of a module, as a forward pass of one sequence shows them.

    by_depth: number of heads side by side at each depth of attention. in_batch_axis: number of heads that share the
    first axis of attention weights with the sequences; None if heads have an axis of their own. first: for each
    attention call in turn, its depth and the number of its first head there, both from 1. output: the largest tensor of
    the sequence's output.
    """

    by_depth: list[int]
    in_batch_axis: int | None
    first: list[tuple[int, int]]
    output: Tensor

    @property
    def num_paths(self) -> list[int]:
        """Number of choices of k heads, at most one at each depth; k = 0 .. L."""
        counts = [1]
        for heads in self.by_depth:
            counts = [a + heads * b for a, b in zip([*counts, 0], [0, *counts], strict=True)]
        return counts

    def num_paths_through(self, depth: int) -> int:
        """Number of these choices that include one given head of this depth."""
        return math.prod(heads + 1 for other, heads in enumerate(self.by_depth, start=1) if other != depth)


@torch.no_grad()
def heads_of(module: nn.Module, example: Example) -> Heads:
    """The module's heads, from a forward pass of one sequence."""
    by_depth: dict[int, int] = {}
    first: list[tuple[int, int]] = []
    flattened: set[int] = set()

    def watch(call: AttentionCall) -> None:
        shape = call.weights.shape
        heads = shape[-3] if len(shape) > 2 else 1
        first.append((call.depth, by_depth.get(call.depth, 0) + 1))
        by_depth[call.depth] = by_depth.get(call.depth, 0) + heads
        if len(shape) == 3 and heads > 1:
            flattened.add(heads)

    sequence = example[:1]
    output = tap(module, watch, *sequence.args, **sequence.kwargs)
    if not by_depth:
        raise ConfigError(f"{type(module).__name__}: made no attention call that the tape knows; covered: {COVERED}")
    floating = [x for x in tensors_in(output) if x.is_floating_point() and x.numel()]
    if not floating:
        raise ConfigError(f"{type(module).__name__}: its output has no floating-point numbers; return its last states")
    largest = max(floating, key=Tensor.numel)
    return Heads([by_depth[depth] for depth in sorted(by_depth)], min(flattened, default=None), first, largest)


def check_sums(module: nn.Module, example: Example) -> None:
    """ConfigError if the module's output is not the sum of its paths, tried on one sequence."""
    sequence = example[:1]
    for _ in sums_by_length(module, sequence, heads_of(module, sequence)):
        pass


@torch.no_grad()
def recorded(module: nn.Module, example: Example, heads: Heads) -> Iterator[tuple[Example, Tape]]:
    """Yield a few sequences at a time, with their tape."""
    for chunk in example.split(_at_a_time(heads)):
        yield chunk, record(module, *chunk.args, **chunk.kwargs)


def _at_a_time(heads: Heads) -> int:
    """Number of sequences that a CPU's cache, or a GPU's memory, has room for."""
    most = free_share(heads.output.device) if heads.output.is_cuda else BYTES_AT_A_TIME
    return max(1, most // (heads.output.nbytes * (len(heads.by_depth) + 1)))


@torch.no_grad()
def parts_with_floors(
    module: nn.Module,
    example: Example,
    heads: Heads,
    parts_of: Callable[[Tape], Iterable[Tensor]],
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor | None, FloorsOfSums]]:
    """Yield a few parts of the first sequences' outputs at a time, (T, B, N, C), with the tokens that count and floors.

    parts_of(tape): yields a few parts at a time, (T, B, ...). The plain and the perturbed passes advance together, so
    only those few parts are in memory. generator: on the CPU. An output of one vector per sequence has N = 1.
    """
    chunk, rounding = example[: min(FLOOR_SEQUENCES, _at_a_time(heads))], RandomRounding(generator)

    def parts() -> Iterator[Tensor]:
        for part_TB in parts_of(record(module, *chunk.args, **chunk.kwargs)):
            yield part_TB if part_TB.dim() > 3 else part_TB[:, :, None]

    perturbed = [parts() for _ in range(num_passes(*heads.output.shape[-2:]))]
    for part_TBNC in parts():
        with rounding:
            perturbed_parts = [next(of_pass) for of_pass in perturbed]
        counted_BN = chunk.counted(part_TBNC.shape[2]) if part_TBNC.shape[2] > 1 else None
        yield part_TBNC, counted_BN, FloorsOfSums.of(part_TBNC, perturbed_parts, counted_BN)


@torch.no_grad()
def sums_by_length(
    module: nn.Module, example: Example, heads: Heads, value_biases: str = "head", refuse: bool = True
) -> Iterator[tuple[Example, Sums]]:
    """The module's output as the sum of its paths by length, a few sequences at a time. ConfigError if it is not that
    sum, unless refuse=False (rankbench.model.tape)."""
    for chunk, tape in recorded(module, example, heads):
        yield chunk, tape.sums(value_biases=value_biases, refuse=refuse)


def of_counted(x: Tensor, example: Example) -> Tensor:
    """x, (..., B, N, C), with zeros in place of tokens that do not count."""
    counted_BN = example.counted(x.shape[-2]) if x.dim() > 2 else None
    return x if counted_BN is None else x * counted_BN[..., None]


def norms(x: Tensor, batch_axis: int) -> Tensor:
    """Frobenius norm of each sequence's part, (..., B)."""
    return euclidean_norm(x.flatten(batch_axis + 1))


def scores(outputs: Tensor, example: Example) -> list[Score]:
    """The score of each sequence against the example's targets."""
    return [score(*pair) for pair in zip(outputs.split(1), example.targets.split(1), strict=True)]
