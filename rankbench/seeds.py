"""Source of all randomness: one generator, or one stream of bits, for each seed, purpose and step.

Shapes: S seed.
"""

import numpy as np
import torch
from torch import Tensor

# The shifts and multipliers of the hash lowbias32 (Wellons 2018), the multipliers written as int32.
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))


def state_of(seed: int, purpose: str, step: int = 0) -> int:
    """64 bits that depend on seed, purpose and step only, and differ where any of them does."""
    words = [seed, int.from_bytes(purpose.encode().ljust(16), "big"), step]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def generator_for(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """The CPU generator of one seed for one purpose at one step. Nothing in rankbench draws from any other generator.

    It depends only on its arguments: a resumed run draws the same as an uninterrupted one, and a test set shares no
    randomness with the training stream.
    """
    return torch.Generator().manual_seed(state_of(seed, purpose, step))


def streams_of(states: list[int]) -> Tensor:
    """Factor and shift of the stream of each state (of `state_of`), of 32 bits each, (S, 2) int64; the factor is
    odd."""
    return torch.tensor([((state | 1) & 0xFFFFFFFF, state >> 32) for state in states])


def random_bits(streams_S2: Tensor, number: int) -> Tensor:
    """Random int32, uniform over all of int32, (S, number): one stream for each of `streams_of`, on their device.

    Each number is a hash of the stream and of its position in it, in integer arithmetic, whose products wrap around
    identically on every device. A generator would draw other numbers on a GPU, and one seed after the other. The upper
    bits are the better ones.
    """
    factor_S1, shift_S1 = streams_S2.to(torch.int32)[..., None].unbind(1)
    bits = torch.arange(number, dtype=torch.int32, device=streams_S2.device) * factor_S1
    bits += shift_S1
    for shift, factor in ROUNDS:
        bits ^= (bits >> shift).bitwise_and_((1 << 32 - shift) - 1)  # >> copies the sign, which the mask removes
        bits *= factor
    return bits
