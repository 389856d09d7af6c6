"""tasks/retrieval.py against loops over points and the known moments of a maximum."""

import functools
import math

import pytest
import torch
from shipped import task_of

from rankbench.config.keys import ConfigError
from rankbench.tasks.retrieval import moments_of_maximum

task = functools.partial(task_of, "retrieval")


def test_the_class_token_alone_is_scored_by_what_a_loop_finds():
    of = task(dimension=3, directions=2, points=4)
    batch = of.sample(20, torch.Generator().manual_seed(0))
    assert batch.inputs.shape == (20, 5, 3) and batch.targets.shape == (20, 5, 2) and of.length == 5
    assert of.token_kinds == {"class": (4,)}
    assert (batch.inputs[:, 4] == 0).all() and batch.targets[:, :4].isnan().all()
    mean, deviation = moments_of_maximum(4)
    for points, wanted in zip(batch.inputs[:, :4].tolist(), batch.targets[:, 4].tolist(), strict=True):
        largest = [max(point[direction] for point in points) for direction in range(2)]
        assert wanted == pytest.approx([(value - mean) / deviation for value in largest], abs=1e-12)


@pytest.mark.parametrize(
    ("numbers", "mean", "variance"),
    [
        (1, 0, 1),
        (2, 1 / math.sqrt(math.pi), 1 - 1 / math.pi),
        (3, 1.5 / math.sqrt(math.pi), 1 - (9 - 2 * math.sqrt(3)) / (4 * math.pi)),  # known in closed form
    ],
)
def test_moments_of_a_maximum(numbers, mean, variance):
    got = moments_of_maximum(numbers)
    assert got == pytest.approx((mean, math.sqrt(variance)), abs=1e-9)


def test_predicting_zero_has_the_error_one():
    targets = task(directions=8, points=16).sample(20_000, torch.Generator().manual_seed(0)).targets[:, -1]
    standard_error = 1 / math.sqrt(targets.numel())  # of the mean; twice that of the square, and a maximum has a tail
    assert targets.mean().item() == pytest.approx(0, abs=4 * standard_error)
    assert targets.square().mean().item() == pytest.approx(1, abs=8 * standard_error)


def test_more_directions_than_coordinates_are_refused():
    with pytest.raises(ConfigError, match=r"task\.directions=9: only task\.dimension=8 coordinates"):
        task(directions=9)
