"""What a task is: it makes batches from a generator, and nothing else; and how its answers are scored.

Shapes: B batch, N token, C classes or output dimensions; `...` may hold a leading axis of seeds.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """inputs: tokens (..., B, N) int64 or coordinates (..., B, N, C); targets: classes (..., B, N) int64, or for
    regression numbers (..., B, N, C)."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """On `device`, coordinates in `dtype`; tokens and classes stay integers."""
        return Batch(*(x.to(device, dtype if x.is_floating_point() else None) for x in (self.inputs, self.targets)))

    def __getitem__(self, index: Any) -> "Batch":
        return Batch(self.inputs[index], self.targets[index])


class Task(Protocol):
    """A frozen dataclass of its options with these members; `__post_init__` raises ConfigError for what cannot be."""

    name: str
    train_size: int | None  # sequences of the training set; None: fresh ones at every step
    test_size: int
    input_kind: ClassVar[str]  # tokens | coordinates

    @property
    def num_inputs(self) -> int:
        """Alphabet size, or the dimension of the coordinates."""

    @property
    def num_outputs(self) -> int:
        """Classes per token, or the dimension of what is to be regressed."""

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        """Fresh sequences with their targets, drawn from `generator` alone."""


def loss_per_sequence(outputs_BNC: Tensor, targets: Tensor) -> Tensor:
    """What training minimises, mean over the tokens of each sequence; shape (B,).

    Cross-entropy in nats for classes (targets_BN); for regression (targets_BNC) the squared error, mean over C.
    """
    if targets.is_floating_point():
        return (outputs_BNC - targets).square().mean((-1, -2))
    per_token = F.cross_entropy(outputs_BNC.flatten(0, -2), targets.flatten(), reduction="none")
    return per_token.view(targets.shape).mean(-1)


def accuracy_per_sequence(outputs_BNC: Tensor, targets: Tensor) -> Tensor:
    """Share of the tokens whose largest output is the target's, shape (B,); nan for regression, which has none."""
    if targets.is_floating_point():
        return torch.full_like(outputs_BNC[..., 0, 0], float("nan"), dtype=torch.float64)
    return (outputs_BNC.argmax(-1) == targets).double().mean(-1)


def majority_baselines(train: Batch, test: Batch, num_classes: int) -> dict[str, float]:
    """Accuracy on `test` of always the commonest training class: one for all tokens, and one for each position; nan
    for regression."""
    if train.targets.is_floating_point():
        return {"majority": float("nan"), "position_majority": float("nan")}
    counts_NC = F.one_hot(train.targets, num_classes).sum(0)
    return {
        "majority": float((test.targets == counts_NC.sum(0).argmax()).double().mean()),
        "position_majority": float((test.targets == counts_NC.argmax(-1)).double().mean()),
    }
