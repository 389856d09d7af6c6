"""Training and test data of a run's seeds: sequences drawn at every step, a set for each seed, or one corpus for all.

Shapes: S seed (those still training), B batch, N token.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from rankbench.model.fused import MOST_SEQUENCES
from rankbench.runs.machine import Machine
from rankbench.seeds import generator_for
from rankbench.tasks import Batch, Corpus, Finite, Task
from rankbench.tasks.task import drawn, majority_baselines
from rankbench.training.batches import batches_of_epoch, chunks_by_length, padded_lengths

BASELINE_SEQUENCES = 1000  # drawn from an endless stream, enough to find its most frequent class
EVALUATION_SEQUENCES = 1000  # test sequences in one forward pass
EVALUATION_TOKENS = 16384  # tokens in one forward pass on a corpus, whose sequences are longer


class Stream:
    """Fresh training sequences at every step, and a test set for each seed.

    train: the training sets, (all seeds, B, ...) on the machine's device; None for a stream and a corpus.
    test: the test sets, likewise.
    baselines: test accuracies of constant answers, by seed; empty for a regression and a corpus.
    """

    train: Batch | None = None
    splits: tuple[str, ...] = ("test",)  # that an evaluation scores
    batches_per_epoch = 1

    def __init__(self, task: Task, machine: Machine, seeds: list[int], batch_size: int) -> None:
        self.task, self.machine, self.seeds, self.batch_size = task, machine, seeds, batch_size
        self._read()
        self.baselines = self._baselines()
        self.keep(list(range(len(seeds))))

    def _read(self) -> None:
        assert self.task.test_size is not None  # only a training set can be the test set, too
        self.test = self._drawn(self.seeds, self.task.test_size, "test")

    def keep(self, alive: list[int]) -> None:
        """From now on, give batches for these seeds only; alive: their indices in `seeds`."""
        self.alive, self._alive_S = alive, torch.tensor(alive, device=self.machine.device)
        self._order: tuple[int, Any] | None = None  # an epoch and its batches

    def batch(self, step: int) -> Batch:
        """Training sequences of this step, for every seed that is kept."""
        return self._drawn([self.seeds[index] for index in self.alive], self.batch_size, "train", step)

    def chunks(self, split: str) -> Iterator[Batch]:
        """Pieces of the split, for every seed that is kept."""
        at_a_time = min(EVALUATION_SEQUENCES, MOST_SEQUENCES // len(self.alive))
        starts = range(0, self.test.inputs.shape[1], at_a_time)
        return (self.test[self._alive_S, start : start + at_a_time] for start in starts)

    def _drawn(self, seeds: list[int], num_sequences: int, purpose: str, step: int = 0) -> Batch:
        draw = self.task.sample
        if purpose == "train" and hasattr(self.task, "sample_at"):  # a curriculum
            draw = partial(self.task.sample_at, step)
        of_seed = (drawn(self.task, num_sequences, generator_for(seed, purpose, step), draw) for seed in seeds)
        return self._side_by_side(list(of_seed))

    def _side_by_side(self, batches: list[Batch]) -> Batch:
        stacked = Batch(torch.stack([b.inputs for b in batches]), torch.stack([b.targets for b in batches]))
        return stacked.to(self.machine.device, self.machine.dtype)

    def _baselines(self) -> list[dict[str, float]]:
        if isinstance(self.task, Corpus) or self.test.targets.is_floating_point():
            return [{} for _ in self.seeds]
        train = self._drawn(self.seeds, BASELINE_SEQUENCES, "train") if self.train is None else self.train
        num_classes, indices = self.task.num_outputs, range(len(self.seeds))
        accuracies = [majority_baselines(train[index], self.test[index], num_classes) for index in indices]
        return [{f"{name}_accuracy": x for name, x in of_seed.items()} for of_seed in accuracies]


class Sets(Stream):
    """A training set for each seed, in a new order every epoch."""

    train: Batch

    def _read(self) -> None:
        task, seeds = self.task, self.seeds
        self._size = task.train_size or 0  # None is that of a stream
        if isinstance(task, Finite):
            self.train, self.test = (
                self._side_by_side([task.split(name, seed) for seed in seeds]) for name in ("train", "test")
            )
        else:
            self.train = self._drawn(seeds, self._size, "train")
            self.test = self.train if task.test_size is None else self._drawn(seeds, task.test_size, "test")
        self._of_all = Batch(self.train.inputs.flatten(0, 1), self.train.targets.flatten(0, 1))
        self.batches_per_epoch = math.ceil(self._size / self.batch_size)

    def batch(self, step: int) -> Batch:
        """The step's piece of the epoch, for every seed that is kept, each in its own random order."""
        epoch, piece = divmod(step, self.batches_per_epoch)
        if self._order is None or self._order[0] != epoch:
            order_of = [generator_for(self.seeds[index], "order", epoch) for index in self.alive]
            rows = [torch.randperm(self._size, generator=generator) for generator in order_of]
            first_S1 = self._size * torch.tensor(self.alive)[:, None]  # among the sequences of all seeds
            self._order = epoch, (first_S1 + torch.stack(rows)).to(self.machine.device, non_blocking=True)
        return self._of_all[self._order[1][:, piece * self.batch_size : (piece + 1) * self.batch_size]]


class OneCorpus(Stream):
    """A corpus on the device, as one copy for all seeds; its batches have sequences of similar length."""

    task: Any  # a Corpus
    splits = ("valid", "test")

    def _read(self) -> None:
        splits = self.task.splits()
        self._lengths_B = padded_lengths(splits["train"], self.task.pad_to)
        on_device = {name: split.to(self.machine.device, self.machine.dtype) for name, split in splits.items()}
        self._train = on_device["train"]
        self._chunks = {
            name: chunks_by_length(on_device[name], self.task.pad_to, EVALUATION_TOKENS) for name in self.splits
        }
        self.test = self._of_each(on_device["test"], len(self.seeds))
        self.batches_per_epoch = math.ceil(len(self._train.inputs) / self.batch_size)

    def batch(self, step: int) -> Batch:
        """The step's batch of the epoch, for every seed that is kept: each has its own sequences, all of one width."""
        epoch, piece = divmod(step, self.batches_per_epoch)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, batches_of_epoch(self._lengths_B, self.batch_size, self.seeds, epoch)
        width, rows_SB = self._order[1][piece]
        return self._train[:, :width][rows_SB[self.alive].to(self.machine.device, non_blocking=True)]

    def chunks(self, split: str) -> Iterator[Batch]:
        """Pieces of the split with sequences of similar length, the same for every seed that is kept."""
        return (self._of_each(chunk, len(self.alive)) for chunk in self._chunks[split])

    def _of_each(self, batch: Batch, num_seeds: int) -> Batch:
        return Batch(*(x.expand(num_seeds, *x.shape) for x in (batch.inputs, batch.targets)))  # no copies


def data_of(task: Task, machine: Machine, seeds: list[int], batch_size: int) -> Stream:
    """Put the training and test data of these seeds on the device."""
    if isinstance(task, Corpus):
        return OneCorpus(task, machine, seeds, batch_size)
    has_training_set = isinstance(task, Finite) or task.train_size is not None
    return (Sets if has_training_set else Stream)(task, machine, seeds, batch_size)
