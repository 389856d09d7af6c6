"""The interface of a task, which makes batches from a generator, and the scoring of its answers.

Shapes: B batch, N token, C classes or output dimensions; `...` may hold a leading axis of seeds.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.seeds import generator_for

ABSENT = -1  # an absent input (padding, after all others); a target that is not scored (regression: nan)
MOST_UNSCORED = 100  # sequences of a plug-in's task in a row that may have no scored target


Draw = Callable[[int, torch.Generator], "Batch"]


@dataclass(frozen=True)
class Batch:
    """inputs: tokens (..., B, N) int64 or coordinates (..., B, N, C). targets: classes (..., B, N) int64, or numbers
    (..., B, N, C) for regression. Sequences shorter than N end in ABSENT tokens, which no attention sees."""

    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype) -> "Batch":
        """Move to `device`, coordinates in `dtype`; tokens and classes stay integers."""
        # the host need not wait for a copy to the GPU; it must wait for one into memory that it is going to read
        later = torch.device(device).type == "cuda"

        def moved(x: Tensor) -> Tensor:
            return x.to(device, dtype if x.is_floating_point() else None, non_blocking=later)

        return Batch(moved(self.inputs), moved(self.targets))

    def __getitem__(self, index: Any) -> "Batch":
        return Batch(self.inputs[index], self.targets[index])


class Score(NamedTuple):
    """Sums over the scored tokens of a batch: the loss, the number of right answers, and the number of tokens."""

    loss: Tensor
    right: Tensor
    tokens: Tensor

    @property
    def mean_loss(self) -> Tensor:
        """Loss per scored token."""
        return self.loss / self.tokens

    @property
    def accuracy(self) -> Tensor:
        """Share of the scored tokens that are right."""
        return self.right / self.tokens


class Task(Protocol):
    """A frozen dataclass of the task's keys with these members. The range of each key is checked first; then
    `__post_init__` raises ConfigError for incompatible keys. A task that reads texts also has their paths, `files`. One
    whose sequences hold class tokens, registers or separators has their positions, `token_kinds`, as {"class": (0,)}.
    """

    name: str
    train_size: int | None  # sequences of the training set; None: fresh ones at every step
    test_size: int | None  # None: tested on the training set itself
    input_kind: ClassVar[str]  # tokens | coordinates
    target_kind: ClassVar[str]  # classes | numbers (a regression)
    padded: ClassVar[bool]  # whether inputs can hold ABSENT tokens

    @property
    def num_inputs(self) -> int:
        """Alphabet size, or the dimension of the coordinates."""

    @property
    def num_outputs(self) -> int:
        """Classes per token, or the dimension of the regression's targets."""

    @property
    def length(self) -> int:
        """Number of tokens of the longest sequence."""

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        """Draw fresh sequences with their targets from `generator` only."""


def check_sample(task: Task) -> None:
    """Raise ConfigError if a few sequences of a task are not as Batch and the task's own members say, or if it scores
    no target."""
    if isinstance(task, Finite):
        check_batch(task, task.num_sequences, task.sequences(), "sequences")
    check_batch(task, 2, batch := task.sample(2, generator := generator_for(0, "check")))
    begins = f"task={task.name}: sample"
    if not torch.equal(batch.inputs, task.sample(2, generator_for(0, "check")).inputs):
        raise ConfigError(f"{begins} drew other sequences from the same generator; give generator= to all its draws")
    scores = is_scored(batch.targets).any() or is_scored(task.sample(MOST_UNSCORED, generator).targets).any()
    if not scores:
        raise ConfigError(f"{begins} gave no target that is scored, but {ABSENT} or nan alone; give others")


def check_batch(task: Task, num_sequences: int, batch: Batch, method: str = "sample") -> None:
    """Raise ConfigError if these sequences of a task are not as Batch and the task's own members say."""
    begins = f"task={task.name}: {method}"
    if not isinstance(batch, Batch) or not all(isinstance(x, Tensor) for x in (batch.inputs, batch.targets)):
        raise ConfigError(f"{begins} gave a {type(batch).__name__}; return a Batch of two tensors, inputs and targets")
    parts = {
        "inputs": (batch.inputs, task.input_kind == "tokens", task.num_inputs),
        "targets": (batch.targets, task.target_kind == "classes", task.num_outputs),
    }
    num_tokens = min(batch.inputs.shape[1], task.length) if batch.inputs.ndim > 1 else task.length
    for name, (x, is_integer, most) in parts.items():
        wanted = (num_sequences, num_tokens, *([] if is_integer else [most]))
        if tuple(x.shape) != wanted:
            raise ConfigError(
                f"{begins} gave {name} of shape {tuple(x.shape)}; allowed are {wanted}, with up to "
                f"task.length={task.length} tokens"
            )
        if (x.dtype != torch.int64) if is_integer else (not x.is_floating_point()):
            kind = "torch.int64" if is_integer else "a floating-point type"
            raise ConfigError(f"{begins} gave {name} of {x.dtype}; allowed is {kind}")
        if is_integer and not ((x >= ABSENT) & (x < most)).all():
            raise ConfigError(
                f"{begins} gave {name} from {x.min()} to {x.max()}; allowed are values from 0 to {most - 1}, and "
                f"{ABSENT} for absent ones"
            )
        if not is_integer and (x.isinf() if name == "targets" else ~x.isfinite()).any():
            raise ConfigError(
                f"{begins} gave {name} that are not finite; only targets may be nan, which are not scored"
            )
    if not task.padded and not batch.inputs.is_floating_point() and (batch.inputs == ABSENT).any():
        raise ConfigError(f"{begins} gave inputs of {ABSENT}, but padded = False; set padded = True")


def drawn(task: Task, num_sequences: int, generator: torch.Generator, draw: Draw | None = None) -> Batch:
    """Draw sequences for a training or a measurement; those of a plug-in's task are checked. draw: None for the task's
    own `sample`."""
    batch = (draw or task.sample)(num_sequences, generator)
    if not type(task).__module__.startswith("rankbench."):
        check_batch(task, num_sequences, batch)
        if not is_scored(batch.targets).any():
            raise ConfigError(
                f"task={task.name}: sample gave {num_sequences} sequences without a target that is scored, which have "
                "no loss; let every sequence have one, or draw more at a time"
            )
    return batch


class Corpus(ABC):
    """A task on a text, whose sequences are fixed and the same for every seed. Each target is the next input, so no
    model may look ahead. train_size, test_size: None for all sequences of the text."""

    target_kind: ClassVar[str] = "classes"
    asks_for_next: ClassVar[bool] = True  # targets are the next inputs, so models must not look ahead
    pad_to: int  # batches are padded to a multiple of this number of tokens

    @abstractmethod
    def splits(self) -> dict[str, Batch]:
        """The splits train, valid and test, on the CPU; read-only."""


class Finite(ABC):
    """A task on a finite set of sequences. Each seed has its own split into train_size training sequences and test_size
    of the others, so that none is in both. test_size: None for all others. Otherwise like a Task."""

    name: str
    train_size: int
    test_size: int | None

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """Number of sequences in the whole set."""

    @abstractmethod
    def sequences(self) -> Batch:
        """All sequences, in an order that never changes."""

    def __post_init__(self) -> None:
        if self.train_size is None or not 1 <= self.train_size < self.num_sequences:
            raise ConfigError(
                f"task.train_size={'null' if self.train_size is None else self.train_size}: task.name={self.name} has "
                f"{self.num_sequences} sequences in all, some of them to test on; allowed are values from 1 to "
                f"{self.num_sequences - 1}"
            )
        others = self.num_sequences - self.train_size
        if self.test_size is not None and not 1 <= self.test_size <= others:
            raise ConfigError(
                f"task.test_size={self.test_size}: of {self.num_sequences} sequences task.train_size={self.train_size} "
                f"leaves {others}; allowed are values from 1 to {others}, or null for all of them"
            )

    @property
    def num_test(self) -> int:
        """Number of test sequences."""
        return self.num_sequences - self.train_size if self.test_size is None else self.test_size

    def split(self, name: str, seed: int) -> Batch:
        """The sequences of a seed's train or test split, in random order."""
        order = torch.randperm(self.num_sequences, generator=generator_for(seed, "split"))
        rows = {"train": order[: self.train_size], "test": order[self.train_size :][: self.num_test]}
        return self.sequences()[rows[name]]

    def sample(self, num_sequences: int, generator: torch.Generator) -> Batch:
        """Draw from all sequences, with repetition."""
        return self.sequences()[torch.randint(self.num_sequences, (num_sequences,), generator=generator)]


def is_scored(targets: Tensor) -> Tensor:
    """Mask of the tokens that count in loss and accuracy, (..., B, N): the target is not ABSENT (regression: nan)."""
    return ~targets.isnan().any(-1) if targets.is_floating_point() else targets != ABSENT


def check_shape(targets: Tensor, outputs: Sequence[int], has_classes: bool = True, begins: str = "") -> None:
    """Raise ConfigError if targets do not fit outputs of this shape exactly: whatever broadcasts has another loss.

    Numbers have the outputs' shape, classes that shape without its last axis. has_classes: whether that axis counts
    classes.
    """
    numbers, classes = tuple(outputs), tuple(outputs[:-1])
    are_numbers = targets.is_floating_point()
    if tuple(targets.shape) != (numbers if are_numbers else classes) or not (are_numbers or has_classes):
        of_classes = f", or classes (whole numbers) of shape {classes}" if has_classes else ""
        raise ConfigError(
            f"{begins}targets of {targets.dtype} and shape {tuple(targets.shape)} do not fit an output of shape "
            f"{numbers}, sequences first; allowed are floating-point numbers of that shape{of_classes}; reshape them, "
            "or leave them out"
        )


def score(outputs_BNC: Tensor, targets: Tensor) -> Score:
    """Loss and right answers of a batch, summed over its scored tokens.

    The loss is cross-entropy in nats for classes (targets_BN); for regression (targets_BNC) the squared error, mean
    over C. Regression has no right answers: nan. ConfigError for targets of another shape.
    """
    check_shape(targets, outputs_BNC.shape)
    scored_BN = is_scored(targets)
    loss = token_losses(outputs_BNC, targets, scored_BN).sum()
    if targets.is_floating_point():
        return Score(loss, torch.full_like(loss, float("nan"), dtype=torch.float64), scored_BN.sum())
    right_BN = outputs_BNC.detach().argmax(-1) == targets  # never true at an absent target
    return Score(loss, right_BN.sum(dtype=torch.float64), scored_BN.sum())


def token_losses(outputs_BNC: Tensor, targets: Tensor, scored_BN: Tensor) -> Tensor:
    """The loss of each token, (B, N), 0 where a token is not scored; their sum is the loss of `score`."""
    if targets.is_floating_point():
        # replace nan targets: a nan error would have a nan gradient, even times 0
        error_BN = (outputs_BNC - torch.where(scored_BN[..., None], targets, 0.0)).square().mean(-1)
        return torch.where(scored_BN, error_BN, 0.0)
    # equal to cross_entropy to the bit; for several seeds side by side torch would decompose that, and import sympy
    class_BN1 = torch.where(scored_BN, targets, 0)[..., None]
    return torch.where(scored_BN, -outputs_BNC.log_softmax(-1).gather(-1, class_BN1).squeeze(-1), 0.0)


def majority_baselines(train: Batch, test: Batch, num_classes: int) -> dict[str, float]:
    """Accuracy on `test` of the commonest training class, over all tokens and at each position; nan for regression.

    At positions where nothing was trained, as in texts longer than any of training, it is the commonest of all.
    """
    if train.targets.is_floating_point():
        return {"majority": float("nan"), "position_majority": float("nan")}
    num_tokens = max(batch.targets.shape[-1] for batch in (train, test))
    position_BN = torch.arange(train.targets.shape[-1], device=train.targets.device).expand_as(train.targets)
    number_P = (position_BN * num_classes + train.targets)[is_scored(train.targets)]
    counts_NC = torch.bincount(number_P, minlength=num_tokens * num_classes).view(num_tokens, num_classes)
    scored, commonest = is_scored(test.targets), counts_NC.sum(0).argmax()
    at_position_N = torch.where(counts_NC.any(-1), counts_NC.argmax(-1), commonest)[: test.targets.shape[-1]]
    return {
        "majority": float((test.targets == commonest)[scored].double().mean()),
        "position_majority": float((test.targets == at_position_N)[scored].double().mean()),
    }


def repeated_token_ceiling(batch: Batch) -> float:
    """Best accuracy on this batch of a network without positions and masks, which cannot tell equal tokens apart.

    Such a network can at best answer each token of a sequence with the commonest of its targets. nan for regression.
    """
    if batch.targets.is_floating_point() or batch.inputs.is_floating_point():
        return float("nan")
    scored_BN = is_scored(batch.targets)
    sequence_BN = torch.arange(len(batch.inputs), device=batch.inputs.device)[:, None].expand_as(batch.inputs)
    seen_P3 = torch.stack([sequence_BN[scored_BN], batch.inputs[scored_BN], batch.targets[scored_BN]], dim=-1)
    kinds_K3, counts_K = seen_P3.unique(dim=0, return_counts=True)  # of (sequence, token, target), how often
    _, group_K = kinds_K3[:, :2].unique(dim=0, return_inverse=True)
    best_G = counts_K.new_zeros(int(group_K.max()) + 1).scatter_reduce(0, group_K, counts_K, "amax")
    return int(best_G.sum()) / len(seen_P3)
