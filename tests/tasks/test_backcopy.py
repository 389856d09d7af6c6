"""The task backcopy against loops over its letters, and against the probabilities that it states."""

import dataclasses

import numpy as np
import pytest
import scipy.stats
import torch
from shipped import task_of

from rankbench.config.keys import ConfigError
from rankbench.model import skeleton
from rankbench.seeds import generator_for
from rankbench.tasks.task import ABSENT


@pytest.fixture
def task():
    return task_of("backcopy")


def test_letters_after_triggers_are_copies_and_targets_are_the_next_tokens(task):
    batch = task.sample(50, generator_for(0, "train"))
    copies = 0
    for tokens, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        assert tokens[0] == task.alphabet and targets[0] == ABSENT and task.alphabet not in tokens[1:]
        assert targets[1:-1] == tokens[2:]
        for place in range(2, task.length):
            if tokens[place] < task.triggers:
                assert targets[place] == tokens[place - 1]
                copies += 1
    assert copies > 100


def test_other_letters_have_their_stated_probabilities(task):
    task = dataclasses.replace(task, alphabet=4, triggers=1)
    batch = task.sample(2000, generator_for(0, "train"))
    for letter in range(4):
        # after a trigger only where it is the first letter, where nothing is copied
        places_BN = batch.inputs == letter
        places_BN[:, 2:] &= letter >= task.triggers
        counts = np.bincount(batch.targets[places_BN], minlength=4)
        wanted = counts.sum() * task.next_VV[letter].numpy()
        # with a fixed seed the test cannot flicker, and a biased sampler has p near 0
        assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-3
    assert scipy.stats.chisquare(np.bincount(batch.inputs[:, 1])).pvalue > 1e-3


def test_the_example_of_the_docstring(task, monkeypatch):
    """Draws that choose the letters 1 2 0, the copy, 2, 1 by the probabilities in turn."""
    task = dataclasses.replace(task, length=6, alphabet=3, triggers=1)
    up_to_VV = task.next_VV.cumsum(-1)
    middles_VV = up_to_VV - task.next_VV / 2
    draws = [0.5, middles_VV[1, 2], middles_VV[2, 0], 0.0, middles_VV[2, 2], middles_VV[2, 1]]
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([draws], dtype=torch.float64))
    batch = task.sample(1, torch.Generator())
    assert batch.inputs.tolist() == [[3, 1, 2, 0, 2, 2]] and batch.targets.tolist() == [[-1, 2, 0, 2, 2, 1]]


def test_letters_that_are_all_triggers_are_refused(task):
    with pytest.raises(ConfigError, match=r"^task.triggers=16: .* use at most 15"):
        dataclasses.replace(task, triggers=16)


def test_models_that_would_see_the_next_letter_are_refused(task, model_config):
    skeleton(model_config(mask="causal"), task)
    with pytest.raises(ConfigError, match=r"^model.mask=none: task=backcopy asks for the next token"):
        skeleton(model_config(mask="none"), task)
