"""Source of all randomness: one generator for each seed, purpose and step."""

import numpy as np
import torch


def generator_for(seed: int, purpose: str, step: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """The generator of one seed for one purpose at one step; nothing else in rankbench is random.

    It depends on its arguments only: a resumed run draws the same as an uninterrupted one, and a test set shares no
    randomness with the training stream.
    """
    words = [seed, int.from_bytes(purpose.encode().ljust(16), "big"), step]
    state = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])
    return torch.Generator(device).manual_seed(state)
