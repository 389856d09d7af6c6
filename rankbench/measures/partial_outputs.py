"""The outputs of paths up to a length beside the whole output: as distributions over classes, and from which length on
they stay close.

A mean over tokens can be close while the tokens are not: errors of both signs cancel in a mean loss. So tokens are
asked one by one.

Shapes: K path lengths, B sequence, N token, C class; ... axes of tokens.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from rankbench.tasks.task import is_scored


class BesideWhole(NamedTuple):
    """Of each token: the Kullback-Leibler divergence from the whole output's distribution to that of the paths up to
    each length, in nats; whether both have the same most likely class; and the loss minus the whole one's, in nats, 0
    where a token is not scored (None without targets). (K, B, ...). whole_loss: the whole output's, likewise, (B, ...).
    """

    divergence: Tensor
    agrees: Tensor
    excess: Tensor | None
    whole_loss: Tensor | None


def beside_whole(outputs_K: Iterable[Tensor], whole: Tensor, targets: Tensor | None) -> BesideWhole:
    """Compare logits (B, ..., C), one for each length, with the whole ones.

    The divergence of p from q is sum_c p_c (log p_c - log q_c); p is the whole output's. What rounding puts below 0 is
    set to 0.
    """
    log_p = whole.log_softmax(-1)
    p, best = log_p.exp(), whole.argmax(-1)
    parts = []
    for output in outputs_K:
        difference = log_p - output.log_softmax(-1)
        divergence = torch.where(p > 0, p * difference, 0).sum(-1).clamp(min=0)
        parts.append((divergence, output.argmax(-1) == best, _at(targets, difference)))
    divergences, agreements, excesses = zip(*parts, strict=True)
    excess = None if targets is None else torch.stack(excesses)
    return BesideWhole(torch.stack(divergences), torch.stack(agreements), excess, _at(targets, -log_p))


def _at(targets: Tensor | None, values: Tensor) -> Tensor | None:
    """The values (B, ..., C) of the targets, (B, ...), 0 where a token is not scored."""
    if targets is None:
        return None
    known = is_scored(targets)
    return torch.where(known, values.gather(-1, torch.where(known, targets, 0)[..., None]).squeeze(-1), 0)


def stays_within(sizes_K: Tensor, most: float) -> Tensor:
    """Whether a size is below `most` from each length on, (K, ...) bool; nan is not."""
    return (sizes_K < most).int().flip(0).cummin(0).values.flip(0).bool()


def first_within(sizes_K: Tensor, most: float) -> Tensor:
    """The first length from which on a size is below `most`, (...); K where it is not even at the last one."""
    return (~stays_within(sizes_K, most)).sum(0)


def last_third_later(lengths: Tensor, order: Tensor, counted: Tensor) -> Tensor:
    """Mean of the lengths of the third of a sequence's counted tokens that is last in `order`, less that of the first
    third; nan with fewer than three such tokens. (B, ...) each; returns (B,)."""
    differences = []
    for lengths_T, order_T, counted_T in zip(*(x.reshape(len(x), -1) for x in (lengths, order, counted)), strict=True):
        in_order_T = lengths_T[counted_T][order_T[counted_T].argsort(stable=True)].double()
        third = len(in_order_T) // 3
        differences.append(in_order_T[len(in_order_T) - third :].mean() - in_order_T[:third].mean())
    return torch.stack(differences)
