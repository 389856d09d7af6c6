"""Views of a state in which single tokens count less: without sink tokens, and with every token of length 1.

One token that is much longer than the others decides a raw residual or stable rank alone. Each view is a map of the
states together with the lengths of the sequences that it leaves, so that every metric and every noise floor can be
taken in it.

Shapes: B sequence, N token, D width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

VIEWS = ("all", "without_sinks", "unit_length")


class View(NamedTuple):
    """What is looked at: one of VIEWS, and by how much a sink is longer than the median token of its sequence."""

    name: str = "all"
    sink_ratio: float = 10.0

    def of(self, x_BND: Tensor, lengths_B: Tensor | None) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """The map of states like x_BND, in which the same tokens are sinks, and how many tokens each sequence keeps."""
        if self.name == "all":
            return _unchanged, lengths_B
        if self.name == "unit_length":
            return _of_unit_length, lengths_B
        is_sink_BN = sinks(x_BND, lengths_B, self.sink_ratio)
        if not is_sink_BN.any():
            return _unchanged, lengths_B
        present_BN = _present(x_BND, lengths_B)
        # kept tokens first, in their order; the others stand where padding does
        order_BN = (is_sink_BN | ~present_BN).to(torch.int8).argsort(dim=1, stable=True)
        kept_B = (present_BN & ~is_sink_BN).sum(1)
        return lambda y_BND: y_BND.gather(1, order_BN[..., None].expand_as(y_BND)), kept_B


def sinks(x_BND: Tensor, lengths_B: Tensor | None, ratio: float) -> Tensor:
    """Which tokens are more than `ratio` times as long as the median token of their sequence, (B, N) bool."""
    present_BN = _present(x_BND, lengths_B)
    length_BN = x_BND.norm(dim=-1).masked_fill(~present_BN, torch.nan)
    return (length_BN > ratio * length_BN.nanmedian(1, keepdim=True).values) & present_BN


def num_sinks(x_BND: Tensor, lengths_B: Tensor | None, ratio: float) -> Tensor:
    """How many sink tokens each sequence has, (B,), in the state's number type."""
    return sinks(x_BND, lengths_B, ratio).sum(1).to(x_BND.dtype)


def _present(x_BND: Tensor, lengths_B: Tensor | None) -> Tensor:
    position_N = torch.arange(x_BND.shape[1], device=x_BND.device)
    if lengths_B is None:
        return torch.ones_like(position_N, dtype=torch.bool).expand(x_BND.shape[:2])
    return position_N < lengths_B[:, None]


def _unchanged(x_BND: Tensor) -> Tensor:
    return x_BND


def _of_unit_length(x_BND: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x_BND, dim=-1, eps=torch.finfo(x_BND.dtype).tiny)
