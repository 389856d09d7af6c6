"""Views of a state in which single tokens count less: without sink tokens, with every token of length 1, or without
the tokens of a kind.

A single token that is much longer than the others decides a raw residual or stable rank. Each view is a map of the
states, together with the lengths of the sequences that the map leaves, so that every metric and every noise floor can
be taken in it.

Shapes: B sequence, N token, D width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from rankbench.config.schema import KINDS_OF_TOKENS

DEFAULT_VIEWS = ("all", "without_sinks", "unit_length")
WITHOUT = {f"without_{kind}": kind for kind in KINDS_OF_TOKENS}
VIEWS = (*DEFAULT_VIEWS, *WITHOUT)


class View(NamedTuple):
    """One of VIEWS, and how many times longer than the median token of its sequence a sink is."""

    name: str = "all"
    sink_ratio: float = 10.0

    @property
    def without(self) -> str | None:
        """The kind of tokens that the view leaves out of those that count; None for the others."""
        return WITHOUT.get(self.name)

    def of(self, x_BND: Tensor, counted_BN: Tensor | None) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """The map of states like x_BND, in which the same tokens are sinks, and how many tokens each sequence keeps.

        counted_BN: mask of the tokens that count at all, (B, N) bool, less those of the kind `without`; None: all.
        """
        if self.name == "without_sinks":
            is_sink_BN = sinks(x_BND, counted_BN, self.sink_ratio)
            if is_sink_BN.any():
                counted_BN = ~is_sink_BN if counted_BN is None else counted_BN & ~is_sink_BN
        seen, kept_B = counted_first(counted_BN)
        if self.name != "unit_length":
            return seen, kept_B
        return lambda y_BND: normalize(seen(y_BND), dim=-1, eps=torch.finfo(y_BND.dtype).tiny), kept_B


def counted_first(counted_BN: Tensor | None) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
    """The map of states that moves the tokens that count to the front, in their order, as in a padded batch; and their
    number in each sequence, None if all count."""
    kept_B = None if counted_BN is None else counted_BN.sum(1)
    if counted_BN is None or not (counted_BN[:, 1:] & ~counted_BN[:, :-1]).any():
        return lambda y_BND: y_BND, kept_B
    order_BN = (~counted_BN).to(torch.int8).argsort(dim=1, stable=True)
    return lambda y_BND: y_BND.gather(1, order_BN[..., None].expand_as(y_BND)), kept_B


def sinks(x_BND: Tensor, counted_BN: Tensor | None, ratio: float) -> Tensor:
    """Mask of the tokens more than `ratio` times as long as the median token of their sequence, (B, N) bool."""
    length_BN = x_BND.norm(dim=-1)
    if counted_BN is not None:
        length_BN = length_BN.masked_fill(~counted_BN, torch.nan)
    return length_BN > ratio * length_BN.nanmedian(1, keepdim=True).values
