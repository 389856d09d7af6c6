"""Source of all randomness: one generator, or one stream of bits, for each seed, purpose and step.

Shapes: S seed.
"""

import numpy as np
import torch
from torch import Tensor

# The multipliers and shifts of the hash lowbias32 (Wellons 2018), the multipliers as int32 has them.
ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32))


def state_of(seed: int, purpose: str, step: int = 0) -> int:
    """64 bits that depend on seed, purpose and step only, and differ where any of them does."""
    words = [seed, int.from_bytes(purpose.encode().ljust(16), "big"), step]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])


def generator_for(seed: int, purpose: str, step: int = 0) -> torch.Generator:
    """The generator, on the CPU, of one seed for one purpose at one step; nothing in rankbench draws from another.

    It depends on its arguments only: a resumed run draws the same as an uninterrupted one, and a test set shares no
    randomness with the training stream.
    """
    return torch.Generator().manual_seed(state_of(seed, purpose, step))


def random_bits(states: list[int], number: int, device: torch.device | str = "cpu") -> Tensor:
    """Random int32, uniform over all of int32, (S, number): for each of the states (of `state_of`) a stream of its own.

    Each is a hash of its state and its place in the stream, computed in integers, whose products wrap around alike on
    every device. A generator would draw other numbers on a GPU, and one seed after the other. The upper bits are the
    better ones.
    """
    halves = [[(state | 1) & 0xFFFFFFFF, state >> 32] for state in states]
    factor_S1, shift_S1 = torch.tensor(halves).to(torch.int32).to(device, non_blocking=True)[..., None].unbind(1)
    bits = torch.arange(number, dtype=torch.int32, device=device) * factor_S1
    bits += shift_S1
    for shift, factor in ROUNDS:
        bits ^= (bits >> shift).bitwise_and_((1 << 32 - shift) - 1)  # >> copies the sign, which the mask removes
        bits *= factor
    return bits
