"""Letters that follow each other at random, and triggers that call for a copy.

Bigram-Backcopy of Guo et al. 2024, Active-dormant attention heads.

Shapes: B sequence, N token, V letter.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rankbench.config.keys import ConfigError, key
from rankbench.seeds import generator_for
from rankbench.tasks.task import ABSENT, Batch


@dataclass(frozen=True)
class Backcopy:
    """Predict the next letter: after a trigger the one before the trigger, else a random one given the last letter.

    Letters are 0 .. alphabet - 1, of which the first ones are triggers; a sequence begins with the start, number
    `alphabet`, after which nothing is scored. With the trigger 0 and the alphabet 0 1 2, for example:

        inputs: 3 1 2 0 2 2        targets: -1 2 0 2 2 1

    Only after a trigger does a head have to read another letter. The probabilities of the next letter are softmaxes of
    Gaussian logits, the same for all seeds. The first letter is uniform; a trigger in its place calls for no copy.
    """

    name: str = key("Name of the task.")
    length: int = key("Number of tokens in a sequence, the start included.", at_least=3, why="a copy needs two letters")
    alphabet: int = key("Number of letters.", at_least=2)
    triggers: int = key("Number of letters after which the letter before them follows.", at_least=1)
    logit_deviation: float = key("Standard deviation of the logits of the next letter.", at_least=0)
    train_size: int | None = key("Size of the training set. null: fresh sequences.", unit="sequences", at_least=1)
    test_size: int = key("Size of the test set.", unit="sequences", at_least=1)

    input_kind: ClassVar[str] = "tokens"
    target_kind: ClassVar[str] = "classes"
    padded: ClassVar[bool] = False
    asks_for_next: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.triggers >= self.alphabet:
            raise ConfigError(
                f"task.triggers={self.triggers}: leaves no other letter of task.alphabet={self.alphabet}; "
                f"use at most {self.alphabet - 1}"
            )

    @property
    def num_inputs(self) -> int:
        return self.alphabet + 1

    @property
    def num_outputs(self) -> int:
        return self.alphabet

    @property
    def next_VV(self) -> torch.Tensor:
        """Probabilities of the next letter after each letter, where nothing is copied; float64."""
        shape = (self.alphabet, self.alphabet)
        draws_VV = torch.randn(shape, dtype=torch.float64, generator=generator_for(0, "next letters"))
        return (self.logit_deviation * draws_VV).softmax(-1)

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        up_to_VV = self.next_VV.cumsum(-1)
        draws_BN = torch.rand(num_sequences, self.length, dtype=torch.float64, generator=generator)
        letters = [torch.full((num_sequences,), self.alphabet), (draws_BN[:, 0] * self.alphabet).long()]
        for draw_B in draws_BN[:, 1:].unbind(1):
            before_B, last_B = letters[-2:]
            next_B = (draw_B[:, None] >= up_to_VV[last_B, :-1]).sum(-1)
            copies_B = (last_B < self.triggers) & (before_B < self.alphabet)
            letters.append(torch.where(copies_B, before_B, next_B))
        tokens_BN = torch.stack(letters, 1)
        targets_BN = tokens_BN[:, 1:].clone()
        targets_BN[:, 0] = ABSENT
        return Batch(tokens_BN[:, :-1], targets_BN)
