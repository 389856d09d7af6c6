"""Kinds of tokens that are not content: those that begin, end or divide a sequence, gather it, or are not scored.

Shapes: B sequence, N token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.seeds import generator_for
from rankbench.tasks.task import ABSENT, Batch, Task, is_scored

TYPICAL_SEQUENCES = 64


@dataclass(frozen=True)
class Kinds:
    """Tokens of each kind, by their positions in every sequence or by their ids, and the kinds that do not count."""

    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def check(self, kinds: Iterable[str], name: str) -> None:
        """Raise ConfigError for a kind of which no token is known. name: of the key that asks for it."""
        known = ["first", *(kind for kind, which in {**self.positions, **self.ids}.items() if len(which))]
        for kind in kinds:
            if kind not in known:
                raise ConfigError(f"{name}={kind}: no token of this kind is known here; known are {', '.join(known)}")

    def of(self, kind: str, inputs: Tensor, num_tokens: int) -> Tensor:
        """Mask of the tokens of a kind, (B, N) bool. inputs: token ids, or numbers or pixels, which have no ids."""
        self.check([kind], "kind")
        positions = (0,) if kind == "first" else self.positions.get(kind, ())
        mask_N = torch.zeros(num_tokens, dtype=torch.bool, device=inputs.device)
        mask_N[[position for position in positions if position < num_tokens]] = True
        mask_BN = mask_N.expand(len(inputs), -1)
        if (ids := self.ids.get(kind)) and inputs.shape == mask_BN.shape:
            mask_BN = mask_BN | torch.isin(inputs, inputs.new_tensor(ids))
        return mask_BN

    def counted(self, present_BN: Tensor | None, inputs: Tensor, num_tokens: int, without: str | None) -> Tensor | None:
        """Mask of the present tokens that count, (B, N) bool; None if all are. without: one more kind that does not.

        ConfigError if no token of a sequence is left.
        """
        kinds = [*self.left_out, *([] if without is None else [without])]
        left_out = [mask_BN for kind in kinds if (mask_BN := self.of(kind, inputs, num_tokens)).any()]
        if not left_out:
            return present_BN
        counted_BN = ~torch.stack(left_out).any(0)
        counted_BN = counted_BN if present_BN is None else counted_BN & present_BN
        if not counted_BN.any(1).all():
            raise ConfigError(f"{', '.join(kinds)}: a sequence has no other tokens; leave it out, or count more kinds")
        return counted_BN


NO_KINDS = Kinds()


def kinds_of_task(task: Task, sequences: Batch | None = None) -> Kinds:
    """The kinds of tokens of a task: those that it names itself, and the unscored ones, if these are at the same
    positions in all sequences. sequences: those that are measured; None: some that show the same kinds."""
    if sequences is None:
        sequences = task.sample(TYPICAL_SEQUENCES, generator_for(0, "kinds"))
    unscored_BN, positions = ~is_scored(sequences.targets), dict(getattr(task, "token_kinds", {}))
    if task.padded:
        unscored_BN = unscored_BN & (sequences.inputs != ABSENT)
    if (unscored_BN == unscored_BN[:1]).all():
        positions["unscored"] = unscored_BN[0].nonzero().flatten().tolist()
    return Kinds(positions)
