"""rankbench.seeds: equal arguments, equal draws; otherwise different ones; the global generator is left alone."""

import torch

from rankbench.seeds import generator_for


def draws(seed, purpose, step=0):
    return torch.randint(2**62, (4,), generator=generator_for(seed, purpose, step)).tolist()


def test_neighbouring_seeds_purposes_and_steps_all_differ():
    everything = [
        tuple(draws(seed, purpose, step))
        for seed in range(10)
        for purpose in ("train", "test", "order")
        for step in range(10)
    ]
    assert len(set(everything)) == len(everything) == 300


def test_every_bit_of_seed_and_step_counts():
    triples = [(2**bit, "train", 0) for bit in range(32)] + [(0, "train", 2**bit) for bit in range(41)]
    assert len({tuple(draws(*triple)) for triple in [(0, "train", 0), *triples]}) == 1 + 32 + 41


def test_long_purposes_that_begin_alike_differ():
    assert draws(0, "lipschitz samples, inner") != draws(0, "lipschitz samples, outer")


def test_the_largest_state_is_accepted():
    # manual_seed refuses what does not fit 64 bits; 2000 draws reach states above 2^63 (each does with chance 1/2)
    states = [generator_for(seed, "train").initial_seed() for seed in range(2000)]
    assert max(states) >= 2**63 and len(set(states)) == 2000


def test_the_states_are_fixed_for_good():
    # numpy promises that SeedSequence never changes. Neither may this: every published number rests on it
    assert generator_for(0, "train", 1).initial_seed() == 16017394688238340686


def test_the_global_generators_are_left_alone():
    before = torch.get_rng_state()
    draws(5, "dropout", 7)
    assert torch.equal(torch.get_rng_state(), before)
