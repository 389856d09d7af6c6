"""Sorting letters (Dong et al. 2021, sec. 4.3).

Shapes: B batch, N letter.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rankbench.config.keys import ConfigError, key
from rankbench.tasks.task import Batch


@dataclass(frozen=True)
class Sorting:
    """Sequences of letters, uniform over the alphabet.

    label=position (the paper): each letter's position in the sorted sequence, equal letters in the order of appearance.
    label=value (the authors' code): at position i the i-th smallest letter. For the letters 3 1 3 0:

        position: 2 1 3 0        value: 0 1 3 3
    """

    name: str = key("Name of the task.")
    length: int = key("Number of letters in a sequence.", at_least=2, why="a single letter is sorted")
    alphabet: int = key("Number of letters in the alphabet.", at_least=2, why="there must be letters to tell apart")
    label: str = key(
        "Class of a token: the rank of its letter, or the letter at its rank.", choices=("position", "value")
    )
    repeats: bool = key("Whether a letter may occur more than once.")
    train_size: int | None = key("Size of the training set. null: fresh sequences.", unit="sequences", at_least=1)
    test_size: int = key("Size of the test set.", unit="sequences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.repeats and self.alphabet < self.length:
            raise ConfigError(
                f"task.alphabet={self.alphabet}: too few letters for task.length={self.length} without repeats; "
                f"use at least {self.length}, or task.repeats=true"
            )

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
