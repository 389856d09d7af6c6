"""Batches of sequences of similar length, for tasks whose sequences differ in length.

Shapes: S seed, B batch, N token.
"""

import torch
from torch import Tensor

from rankbench.seeds import generator_for
from rankbench.tasks.task import Batch, is_scored


def padded_lengths(batch: Batch, multiple: int) -> Tensor:
    """Length of each sequence, rounded up to a multiple but not beyond the batch's width; (B,), CPU."""
    lengths_B = is_scored(batch.targets).sum(-1).cpu()
    return (-(-lengths_B // multiple) * multiple).clamp(max=batch.targets.shape[-1])


def batches_of_epoch(padded_B: Tensor, batch_size: int, seeds: list[int], epoch: int) -> list[tuple[int, Tensor]]:
    """Batches of an epoch in order, each as its width in tokens and the indices of its sequences, (S, batch).

    Every seed shuffles the sequences and sorts them, stably, by padded length. The sorted lengths are then the same for
    all seeds, so that each piece of batch_size sequences has one width. (The last piece, with the longest sequences,
    may be smaller.) The order of the pieces is random and the same for all seeds. Nothing depends on which seeds train
    side by side.
    """
    orders = []
    for seed in seeds:
        shuffled_B = torch.randperm(len(padded_B), generator=generator_for(seed, "order", epoch))
        orders.append(shuffled_B[padded_B[shuffled_B].argsort(stable=True)])
    pieces = torch.stack(orders).split(batch_size, dim=1)
    widths = [int(padded_B[piece_SB[0, -1]]) for piece_SB in pieces]
    piece_order = torch.randperm(len(pieces), generator=generator_for(0, "buckets", epoch)).tolist()
    return [(widths[piece], pieces[piece]) for piece in piece_order]


def chunks_by_length(batch: Batch, multiple: int, num_tokens: int) -> list[Batch]:
    """Cut a batch, shortest sequences first, into pieces of at most num_tokens tokens (or one sequence) each.

    Each piece is only as wide as its longest sequence.
    """
    padded_B = padded_lengths(batch, multiple)
    order_B, chunks = padded_B.argsort(stable=True), []
    while len(order_B):
        widths_B = padded_B[order_B]
        fits_B = widths_B * torch.arange(1, len(order_B) + 1) <= num_tokens
        num_taken = max(int(fits_B.sum()), 1)  # the size grows with each sequence, so those that fit come first
        rows_B = order_B[:num_taken].to(batch.inputs.device)
        chunks.append(batch[rows_B, : int(widths_B[num_taken - 1])])
        order_B = order_B[num_taken:]
    return chunks
