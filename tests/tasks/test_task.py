"""rankbench.tasks: labels against python's sorted(), scores against loops, draws against their distribution."""

import itertools
import math
from collections import Counter

import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import task_of

from rankbench.config.keys import ConfigError
from rankbench.seeds import generator_for
from rankbench.tasks import TASKS, Batch
from rankbench.tasks.task import ABSENT, check_sample, majority_baselines, repeated_token_ceiling, score

every = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def sorting_options(draw):
    repeats = draw(st.booleans())
    length = draw(st.integers(2, 12))
    return {"length": length, "alphabet": draw(st.integers(2 if repeats else length, 16)), "repeats": repeats}


# --- sorting ---------------------------------------------------------------------------------------------------------


@every
@given(sorting_options(), seeds)
def test_labels_are_those_of_pythons_stable_sort(sorting_task, options, seed):
    for label, num_outputs in (("position", options["length"]), ("value", options["alphabet"])):
        task = sorting_task(label=label, **options)
        check_sample(task)
        assert (task.num_inputs, task.num_outputs) == (options["alphabet"], num_outputs)
        batch = task.sample(5, generator_for(seed, "train"))
        for letters, targets in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
            order = sorted(range(task.length), key=letters.__getitem__)
            assert targets == ([order.index(n) for n in range(task.length)] if label == "position" else sorted(letters))
            assert options["repeats"] or len(set(letters)) == options["length"]


def test_the_example_of_the_docstring(sorting_task, monkeypatch):
    letters = torch.tensor([[3, 1, 3, 0]])
    monkeypatch.setattr(torch, "randint", lambda *_, **__: letters)
    for label, targets in {"position": [2, 1, 3, 0], "value": [0, 1, 3, 3]}.items():
        assert sorting_task(length=4, label=label).sample(1, torch.Generator()).targets.tolist() == [targets]


@pytest.mark.parametrize("repeats", [True, False])
def test_letters_are_uniform_and_independent_of_place(sorting_task, repeats):
    task = sorting_task(length=3, alphabet=5, repeats=repeats)
    drawn = Counter(map(tuple, task.sample(12_000, generator_for(0, "train")).inputs.tolist()))
    possible = list(itertools.product(range(5), repeat=3) if repeats else itertools.permutations(range(5), 3))
    assert set(drawn) <= set(possible)
    # about 100 draws in each cell; with a fixed seed the test cannot flicker, and a biased sampler has p near 0
    assert scipy.stats.chisquare([drawn[triple] for triple in possible]).pvalue > 1e-3


@pytest.mark.parametrize("name", TASKS)
def test_a_sample_is_what_the_task_says_and_a_function_of_its_generator(name):
    task, before = task_of(name), torch.get_rng_state()
    check_sample(task)
    first, same, other = (task.sample(20, generator_for(seed, "train")) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.inputs, same.inputs) and not torch.equal(first.inputs, other.inputs)
    torch.testing.assert_close(first.targets, same.targets, rtol=0, atol=0, equal_nan=True)


# --- batches and scores ----------------------------------------------------------------------------------------------


def test_a_batch_casts_coordinates_and_leaves_integers():
    targets = torch.zeros(2, 3, dtype=torch.int64)
    tokens = Batch(torch.ones(2, 3, dtype=torch.int64), targets).to("cpu", torch.float64)
    coordinates = Batch(torch.ones(2, 3, 4), targets).to("cpu", torch.float64)
    assert tokens.inputs.dtype == tokens.targets.dtype == coordinates.targets.dtype == torch.int64
    assert coordinates.inputs.dtype == torch.float64


@st.composite
def answers(draw):
    generator = torch.Generator().manual_seed(draw(seeds))
    num_sequences, num_tokens, num_classes = (draw(st.integers(1, 5)) for _ in range(3))
    outputs = 5 * torch.randn(num_sequences, num_tokens, num_classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(num_classes, (num_sequences, num_tokens), generator=generator)
    absent = torch.rand(num_sequences, num_tokens, generator=generator) < draw(st.sampled_from((0.0, 0.3)))
    return outputs, targets.masked_fill(absent, ABSENT)


@every
@given(answers())
def test_loss_and_accuracy_are_those_of_a_loop(case):
    outputs, targets = case
    got = score(outputs, targets)
    every = zip(outputs.flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True)
    tokens = [(logits, target) for logits, target in every if target != ABSENT]
    each = [math.log(math.fsum(math.exp(x) for x in logits)) - logits[target] for logits, target in tokens]
    assert got.tokens == len(each)
    # logits up to about 25, 25 tokens: a few roundings of numbers that size
    assert got.loss.item() == pytest.approx(math.fsum(each), abs=1e-11)
    right = [max(range(len(logits)), key=logits.__getitem__) == target for logits, target in tokens]
    assert got.right == sum(right) and got.right.dtype == torch.float64
    if tokens:
        assert got.mean_loss.item() == pytest.approx(math.fsum(each) / len(tokens), abs=1e-12)
        assert got.accuracy.item() == pytest.approx(sum(right) / len(tokens), rel=1e-15)  # one division


@pytest.mark.parametrize(
    "targets", [torch.zeros(4), torch.zeros(4, 1), torch.zeros(3), torch.zeros(4, 3, dtype=torch.int64)]
)
def test_targets_that_only_broadcast_have_no_score(targets):
    with pytest.raises(ConfigError, match=r"do not fit an output of shape \(4, 3\), sequences first; .* shape \(4,\);"):
        score(torch.zeros(4, 3), targets)


def test_a_regression_is_scored_where_its_target_is_a_number():
    outputs = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
    targets = torch.tensor([[[0.0, 0.0], [float("nan"), 4.0], [5.0, 8.0]]])
    got = score(outputs, targets)
    assert got.tokens == 2 and got.loss == (1 + 4) / 2 + 4 / 2 and got.right.isnan()


@every
@given(seeds, st.integers(1, 6), st.integers(1, 8), st.integers(1, 3))
def test_the_ceiling_of_repeated_tokens_is_the_best_of_all_answers(seed, num_sequences, num_tokens, num_letters):
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(n, (num_sequences, num_tokens), generator=generator) for n in (num_letters, 2))
    absent = torch.rand(num_sequences, num_tokens, generator=generator) < 0.2
    absent[0, 0] = False
    inputs, targets = inputs.masked_fill(absent, ABSENT), targets.masked_fill(absent, ABSENT)
    best = 0
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        pairs = [(letter, label) for letter, label in zip(row, wanted, strict=True) if label != ABSENT]
        # one answer a letter: all that such a network can give
        every_answer = itertools.product((0, 1), repeat=num_letters)
        best += max(sum(answers[letter] == label for letter, label in pairs) for answers in every_answer)
    got = repeated_token_ceiling(Batch(inputs, targets))
    assert got == pytest.approx(best / int((targets != ABSENT).sum()), rel=1e-15)


@every
@given(seeds, st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_majority_baselines_are_those_of_a_counter(seed, num_sequences, num_tokens, num_classes):
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_sequences, num_tokens), (9, 3)  # texts of the one may be longer than those of the other
    train, test = (torch.randint(num_classes, shape, generator=generator) for shape in shapes)
    got = majority_baselines(Batch(train, train), Batch(test, test), num_classes)

    def commonest(labels):
        # ties go to the smallest class, as torch.argmax does on a CPU
        counts = Counter(labels)
        return max(range(num_classes), key=lambda label: (counts[label], -label))

    everywhere = commonest(train.flatten().tolist())
    by_token = [commonest(train[:, token].tolist()) if token < num_tokens else everywhere for token in range(3)]
    hits = [sum(row[token] == everywhere for row in test.tolist()) for token in range(3)]
    token_hits = [sum(row[token] == by_token[token] for row in test.tolist()) for token in range(3)]
    assert set(got) == {"majority", "position_majority"}
    assert got["majority"] == pytest.approx(sum(hits) / test.numel(), rel=1e-15)  # one division
    assert got["position_majority"] == pytest.approx(sum(token_hits) / test.numel(), rel=1e-15)
