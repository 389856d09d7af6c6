"""Batches of sequences of similar length, for tasks whose sequences differ in it.

Shapes: S seed, B batch, N token.
"""

import torch
from torch import Tensor

from rankbench.seeds import generator_for
from rankbench.tasks.task import Batch, is_scored


def padded_lengths(batch: Batch, multiple: int) -> Tensor:
    """How many tokens each sequence takes up, rounded up to a multiple but for the longest there can be; (B,), CPU."""
    lengths_B = is_scored(batch.targets).sum(-1).cpu()
    return (-(-lengths_B // multiple) * multiple).clamp(max=batch.targets.shape[-1])


def batches_of_epoch(padded_B: Tensor, batch_size: int, seeds: list[int], epoch: int) -> list[tuple[int, Tensor]]:
    """The batches of an epoch in their order, each as its width in tokens and its sequences' numbers, (S, batch).

    Every seed shuffles the sequences and sorts them, stably, by padded length; then all sorted orders have the same
    length at the same place, and cut into pieces of batch_size (the last, with the longest, may have fewer) each piece
    has the same width for all seeds. The order of the pieces is random too, and also the same for all seeds. Nothing
    depends on which seeds go side by side.
    """
    orders = []
    for seed in seeds:
        shuffled_B = torch.randperm(len(padded_B), generator=generator_for(seed, "order", epoch))
        orders.append(shuffled_B[padded_B[shuffled_B].argsort(stable=True)])
    pieces = torch.stack(orders).split(batch_size, dim=1)
    widths = [int(padded_B[piece_SB[0, -1]]) for piece_SB in pieces]
    turns = torch.randperm(len(pieces), generator=generator_for(0, "buckets", epoch)).tolist()
    return [(widths[turn], pieces[turn]) for turn in turns]


def chunks_by_length(batch: Batch, multiple: int, num_tokens: int) -> list[Batch]:
    """All sequences of a batch, the shortest first, in pieces without needless padding of at most num_tokens tokens
    each (or of one sequence)."""
    padded_B = padded_lengths(batch, multiple)
    order_B, chunks = padded_B.argsort(stable=True), []
    while len(order_B):
        widths_B = padded_B[order_B]
        fits_B = widths_B * torch.arange(1, len(order_B) + 1) <= num_tokens
        taken = max(int(fits_B.sum()), 1)  # grows with each sequence: those that fit stand in front
        rows_B = order_B[:taken].to(batch.inputs.device)
        chunks.append(batch[rows_B, : int(widths_B[taken - 1])])
        order_B = order_B[taken:]
    return chunks
