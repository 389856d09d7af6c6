"""rankbench.model.dropout and the hash beneath it: the bits, their distribution, their independence."""

import math

import numpy as np
import pytest
import torch
from drawn import transformer
from scipy.stats import binom

from rankbench.model.dropout import dropout_masks
from rankbench.seeds import random_bits, state_of, streams_of

KEEP, SURE = 0.9, 1e-9  # the share kept, and the chance that all of a test's counts together may fail for
SEEDS, STEPS, PLACES = 24, 12, 4096


def bits_by_hand(state, number):
    """The hash in Python's integers, of which only the last 32 bits are kept."""
    last, numbers = 2**32 - 1, []
    for place in range(number):
        x = (place * ((state | 1) & last) + (state >> 32)) & last
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ x >> shift) * factor) & last
        numbers.append(x - 2**32 if x >= 2**31 else x)
    return numbers


@pytest.mark.parametrize("state", [0, 1, 2**32, 2**64 - 1, state_of(7, "dropout", 3)])
def test_the_bits_are_the_hash_of_state_and_place(state):
    assert random_bits(streams_of([5, state]), 50)[1].tolist() == bits_by_hand(state, 50)


def test_the_bits_are_fixed_for_good():
    # resuming a run, and every number of a run with dropout, rests on them
    assert random_bits(streams_of([state_of(0, "dropout", 1)]), 3).tolist() == [[432085544, -289428204, -1795136357]]


@pytest.fixture(scope="module")
def kept():
    """Whether each place is kept, (seed, step, place), of neighbouring seeds and steps."""
    states = [state_of(seed, "dropout", step) for seed in range(SEEDS) for step in range(STEPS)]
    threshold = round(KEEP * 2**32) - 2**31
    return (random_bits(streams_of(states), PLACES) < threshold).view(SEEDS, STEPS, PLACES).numpy()


def within_exact_bounds(counts, number, chance):
    """Whether all counts lie where counts of a binomial distribution lie, but for a chance of SURE in all."""
    counts = np.asarray(counts).ravel()
    low, high = binom.interval(1 - SURE / len(counts), number, chance)
    return bool(((low <= counts) & (counts <= high)).all())


def test_the_right_share_is_kept(kept):
    assert within_exact_bounds(kept.sum(), kept.size, KEEP)
    assert within_exact_bounds(kept.sum(2), PLACES, KEEP)  # of every seed and step
    assert within_exact_bounds(kept.sum((0, 1)), SEEDS * STEPS, KEEP)  # at every place


AGREE = KEEP**2 + (1 - KEEP) ** 2  # chance that two independent places are alike


def test_places_are_independent(kept):
    for distance in (1, 2, 3, 7, 8, 64, 100, 128, 1024, 2048):
        pairs = kept[..., : PLACES // (2 * distance) * 2 * distance].reshape(SEEDS, STEPS, -1, 2, distance)
        alike = pairs[..., 0, :] == pairs[..., 1, :]  # every place is in one pair only, so the count is binomial
        assert within_exact_bounds(alike.sum(), alike.size, AGREE), distance
        assert within_exact_bounds(alike.sum((2, 3)), alike[0, 0].size, AGREE), distance


@pytest.mark.parametrize("axis", [0, 1], ids=["seeds", "steps"])
@pytest.mark.parametrize("shift", [0, 1, 5])
def test_seeds_and_steps_are_independent(kept, axis, shift):
    kept = np.moveaxis(kept, axis, 0)
    for distance in (1, 2, 3):
        half = len(kept) // (2 * distance) * 2 * distance
        pairs = kept[:half].reshape(-1, 2, distance, *kept.shape[1:])
        alike = pairs[:, 0] == np.roll(pairs[:, 1], shift, axis=-1)
        assert within_exact_bounds(alike.sum(), alike.size, AGREE)
        assert within_exact_bounds(alike.sum(-1), PLACES, AGREE)


def test_words_of_neighbours_are_uniform(kept):
    """All patterns of four places, and of four seeds at one place, have the frequency of independent draws."""
    for patterns in (kept.reshape(-1, 4), np.moveaxis(kept, 0, -1).reshape(-1, 4)):
        numbers = patterns @ [1, 2, 4, 8]
        for number in range(16):
            ones = number.bit_count()
            chance = KEEP**ones * (1 - KEEP) ** (4 - ones)
            assert within_exact_bounds((numbers == number).sum(), len(numbers), chance), number


def test_a_biased_or_repeated_stream_fails_these_bounds(kept):
    assert not within_exact_bounds(kept.sum(), kept.size, KEEP + 0.005)
    assert not within_exact_bounds((kept == np.roll(kept, PLACES, -1)).sum(), kept.size, AGREE)


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
def test_masks_keep_their_share_and_their_mean(rate):
    model = transformer(layers=1, width=48, dropout=rate)
    for mask in dropout_masks(model, 16, 8, streams_of([3, 4])).values():
        assert within_exact_bounds((mask > 0).flatten(1).sum(1), math.prod(mask.shape[1:]), 1 - rate)
        assert set(mask.unique().tolist()) <= {0.0, torch.tensor(1.0).div(1 - rate).item()}
