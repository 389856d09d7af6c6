"""Dropout masks of one step, for the networks of several seeds together.

Shapes: S seed.
"""

import math

import torch
from torch import Tensor

from rankbench.model.lstm import Lstm
from rankbench.model.transformer import Transformer
from rankbench.seeds import random_bits


def largest_kept_bits(keep: float) -> int:
    """The largest of `random_bits` with which an entry is kept; keep: the share of entries that are."""
    return round(keep * 2**32) - 2**31 - 1


def dropout_masks(
    model: Transformer | Lstm,
    num_sequences: int,
    num_tokens: int,
    streams_S2: Tensor,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor] | None:
    """Masks (0 or 1/(1-p)) by name, each (S, ...); None for a model without dropout.

    streams_S2: one for each seed, from `rankbench.seeds.streams_of`. Equal streams give equal masks on every device.
    """
    if model.cfg.dropout == 0:
        return None
    shapes, keep = model.dropout_shapes(num_sequences, num_tokens), 1 - model.cfg.dropout
    sizes = [math.prod(shape) for shape in shapes.values()]
    kept = random_bits(streams_S2, sum(sizes)) <= largest_kept_bits(keep)
    parts = kept.to(dtype).div_(keep).split(sizes, 1)
    return {name: part.unflatten(1, shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
