"""Sorting letters (Dong et al. 2021, sec. 4.3).

Shapes: B batch, N letter.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rankbench.config import ConfigError
from rankbench.tasks.task import Batch

LABELS = ("position", "value")


@dataclass(frozen=True)
class Sorting:
    """Sequences of letters, uniform over the alphabet.

    label=position, as the paper says: each letter's place in the sorted sequence, equal letters in the order of their
    appearance. label=value, as the authors' code does: at slot i the i-th smallest letter. For the letters 3 1 3 0:

        position: 2 1 3 0        value: 0 1 3 3
    """

    name: str
    length: int
    alphabet: int
    label: str
    repeats: bool
    train_size: int | None
    test_size: int

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ConfigError(f"task.length={self.length}: a sequence to sort needs at least 2 letters")
        if self.alphabet < 2:
            raise ConfigError(f"task.alphabet={self.alphabet}: sorting needs at least 2 letters to tell apart")
        if not self.repeats and self.alphabet < self.length:
            raise ConfigError(
                f"task.alphabet={self.alphabet}: too few letters for task.length={self.length} without repeats; "
                f"use at least {self.length}, or task.repeats=true"
            )
        if self.label not in LABELS:
            raise ConfigError(f"task.label={self.label}: unknown; allowed are {', '.join(LABELS)}")
        for key, size in (("train_size", self.train_size), ("test_size", self.test_size)):
            if size is not None and size < 1:
                raise ConfigError(f"task.{key}={size}: at least one sequence is needed")

    @property
    def num_inputs(self) -> int:
        return self.alphabet

    @property
    def num_outputs(self) -> int:
        return self.length if self.label == "position" else self.alphabet

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        if self.repeats:
            letters_BN = torch.randint(self.alphabet, (num_sequences, self.length), generator=generator)
        else:
            # the ranks of independent uniform numbers are a uniform permutation of the alphabet
            draws = torch.rand(num_sequences, self.alphabet, generator=generator)
            letters_BN = draws.argsort(-1)[:, : self.length].contiguous()
        sorted_BN, order_BN = letters_BN.sort(dim=-1, stable=True)
        return Batch(letters_BN, order_BN.argsort(-1) if self.label == "position" else sorted_BN)
