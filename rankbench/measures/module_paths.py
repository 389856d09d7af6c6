"""Sums of all paths by length, for a torch module from outside rankbench, a few sequences at a time
(rankbench.tape).

Shapes: B sequence, K path length, N token; `...` the axes of what is measured after the sequences.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.measures.frozen_network import free_share
from rankbench.measures.module_reading import ReadModule
from rankbench.measures.norms import euclidean_norm
from rankbench.measures.rounding import FLOOR_SEQUENCES, FloorsOfSums, RandomRounding, num_passes
from rankbench.model.modules import Example
from rankbench.tape import Sums, Tape
from rankbench.tape.counting import Paths
from rankbench.tasks.task import ABSENT, Score, check_shape, score

# In the sums of all lengths, on a CPU. Four times as many take up to 1.2 times as long, because no call then fits the
# caches; a quarter as many take up to 1.3 times as long, because each recorded pass costs 20 ms of Python.
BYTES_AT_A_TIME = 1 << 24


def check_sums(reads: Mapping[str, ReadModule]) -> None:
    """ConfigError if what is measured of a module is not the sum of its paths, tried on one sequence, or if the targets
    do not fit it."""
    for read in reads.values():
        _check_sequences(read)
        check_targets(read)
        list(module_sums(read, read.example[:1]))


def _check_sequences(read: ReadModule) -> None:
    """ConfigError if what is measured has other sequences than the inputs."""
    given = {x.shape[x.axes.batch] for x in read.reading.inputs if x.is_touched and x.axes.batch is not None}
    if given and read.target.shape[read.axes.batch or 0] not in given:
        raise ConfigError(
            f"{type(read.module).__name__}: {read.target.name} has shape {read.target.shape} for {max(given)} "
            "sequences; return a tensor with an axis of all sequences, or give output=<a submodule>"
        )


def check_targets(read: ReadModule) -> None:
    """ConfigError if the targets do not fit what is measured, whose sequences come first and tokens next."""
    targets, name = read.example.targets, type(read.module).__name__
    if targets is None:
        return
    of_few = read.arranged(torch.empty(read.target.shape, device="meta"))
    shape = (read.example.num_sequences, *of_few.shape[1 : None if read.has_channels else -1])
    check_shape(targets, shape, read.has_channels, f"{name}: ")
    if not targets.is_floating_point() and not ((targets.long() >= ABSENT) & (targets.long() < shape[-1])).all():
        raise ConfigError(
            f"{name}: targets from {targets.min()} to {targets.max()}; allowed are classes from 0 to {shape[-1] - 1}, "
            f"and {ABSENT} for tokens that are not scored; give that in place of torch's -100"
        )


def paths_of(read: ReadModule) -> Paths:
    """The numbers of paths to what is measured."""
    return read.record(read.example[:1]).paths(read.upto, read.choose)


@torch.no_grad()
def recorded(read: ReadModule, example: Example) -> Iterator[tuple[Example, Tape]]:
    """Yield a few sequences at a time, with their tape."""
    for chunk in example.split(_at_a_time(read)):
        yield chunk, read.record(chunk)


def with_tokens(x_TB: Tensor) -> Tensor:
    """Parts of what is measured, (T, B, ...), with an axis of tokens: one vector per sequence has N = 1."""
    return x_TB if x_TB.dim() > 3 else x_TB[:, :, None]


def sequences_of(read: ReadModule, most: int | None) -> Example:
    """The first sequences of the module's inputs, None: all, with targets that fit the sums below."""
    example = read.example[:most]
    if example.targets is None or read.has_channels:
        return example
    return replace(example, targets=example.targets[..., None])


def _at_a_time(read: ReadModule) -> int:
    """Number of sequences that a CPU's cache, or a GPU's memory, has room for."""
    x = read.example.tensors[0]
    most = free_share(x.device) if x.is_cuda else BYTES_AT_A_TIME
    return max(1, most // (read.bytes_of_sequence * (len({call.depth for call in read.heads}) + 1)))


@torch.no_grad()
def floors_of_parts(
    read: ReadModule, example: Example, parts_of: Callable[[Tape], Iterable[Tensor]], generator: torch.Generator
) -> Iterator[FloorsOfSums]:
    """Yield a few parts of what is measured at a time, (T, B, N, C), of the first sequences, with their floors.

    parts_of(tape): yields a few parts at a time, (T, B, ...). The plain and the perturbed passes advance together, so
    only those few parts are in memory. generator: on the CPU. One vector per sequence has N = 1.
    """
    chunk, rounding = example[: min(FLOOR_SEQUENCES, _at_a_time(read))], RandomRounding(generator)

    def parts() -> Iterator[Tensor]:
        for part_TB in parts_of(read.record(chunk)):
            yield with_tokens(part_TB)

    perturbed = [parts() for _ in range(num_passes(*read.shape_of_sequence))]
    counted_BN = read.counted(chunk)
    for part_TBNC in parts():
        with rounding:
            perturbed_parts = [next(of_pass) for of_pass in perturbed]
        yield FloorsOfSums(part_TBNC, perturbed_parts, counted_BN if part_TBNC.shape[2] > 1 else None)


@torch.no_grad()
def module_sums(read: ReadModule, example: Example) -> Iterator[tuple[Example, Sums]]:
    """What is measured as the sum of its paths by length, a few sequences at a time. ConfigError if it is not that
    sum."""
    for chunk, tape in recorded(read, example):
        yield chunk, read.sums(tape)


def norms(x: Tensor, batch_axis: int) -> Tensor:
    """Frobenius norm of each sequence's part, (..., B)."""
    return euclidean_norm(x.flatten(batch_axis + 1))


def scores(outputs: Tensor, targets: Tensor) -> list[Score]:
    """The score of each sequence against its targets."""
    return [score(*pair) for pair in zip(outputs.split(1), targets.split(1), strict=True)]
