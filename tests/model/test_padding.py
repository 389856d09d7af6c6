"""Sequences of several lengths in one batch: absent tokens change nothing, in the model, its paths and its metrics."""

import pytest
import torch
from by_hand import KINDS as ATTENTIONS
from drawn import generator, initialised, label_of

from rankbench.measures.attention_matrices import attention_metrics
from rankbench.measures.frozen_network import FrozenNetwork, sums_by_length
from rankbench.measures.paths import all_paths, sums_of_groups
from rankbench.measures.recomputed_network import RecomputedNetwork
from rankbench.measures.states import state_metrics
from rankbench.model.attention import visible_keys
from rankbench.model.network import run
from rankbench.tasks.task import ABSENT

LENGTHS = (5, 1, 3, 5, 2)


def build(**changes):
    return initialised(3, **{"width": 8, "num_outputs": 3, "length": 200, "padded": True, **changes})


def padded_inputs():
    inputs = torch.full((len(LENGTHS), max(LENGTHS)), ABSENT)
    for row, length in enumerate(LENGTHS):
        inputs[row, :length] = torch.randint(7, (length,), generator=generator(row))
    return inputs


KINDS = [
    {"norm": "post"},
    {"norm": "pre", "mask": "causal"},
    {"norm": "none", "mask": "window", "window": 1, "positions": "sinusoidal"},
    *ATTENTIONS,
]


@pytest.mark.parametrize("kind", KINDS, ids=label_of)
def test_paths_of_a_padded_batch_are_those_of_each_sequence(kind):
    model, inputs = build(**kind), padded_inputs()
    sums = sums_by_length(model, inputs)
    assert sums.remainder().max() < 1e-12
    groups = [all_paths(2, 2, length) for length in range(3)]
    for network in (FrozenNetwork, RecomputedNetwork):
        together = sums_of_groups(network(model, inputs), groups)
        for row, length in enumerate(LENGTHS):
            alone = sums_of_groups(network(model, inputs[row : row + 1, :length]), groups)
            torch.testing.assert_close(together[:, row, :length], alone[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_metrics_of_a_padded_batch_are_those_of_each_sequence(mask):
    model, inputs = build(mask=mask), padded_inputs()
    first, *_, last = (step for step in run(model, inputs) if step.sublayer.kind == "attention")
    lengths, p_BHNM, embedding_BND = model.lengths(inputs), last.weights_BHNM, first.input_BND
    assert lengths.tolist() == list(LENGTHS)
    states = state_metrics(embedding_BND, lengths)
    visible_NM = visible_keys(mask, None, max(LENGTHS))
    weights = attention_metrics(p_BHNM, visible_NM, lengths)
    for row, length in enumerate(LENGTHS):
        alone = state_metrics(embedding_BND[row : row + 1, :length])
        assert states.keys() == alone.keys()
        visible = None if visible_NM is None else visible_NM[:length, :length]
        alone |= attention_metrics(p_BHNM[row : row + 1, :, :length, :length], visible)
        for name, value in alone.items():
            torch.testing.assert_close((states | weights)[name][row], value[0], rtol=1e-12, atol=0, equal_nan=True)
