"""tasks/nearest_neighbor.py against loops over points and the moments of the uniform distribution."""

import functools
import math

import pytest
import scipy.stats
import torch
from drawn import generator
from shipped import task_of

from rankbench.tasks.nearest_neighbor import orthonormal

task = functools.partial(task_of, "nearest_neighbor")


@pytest.mark.parametrize("mode", ["nearest", "farthest"])
def test_every_point_gets_the_one_that_a_loop_finds(mode):
    batch = task(dimension=3, points=5, mode=mode).sample(20, generator())
    assert batch.inputs.shape == batch.targets.shape == (20, 5, 3)
    for points, answers in zip(batch.inputs.tolist(), batch.targets.tolist(), strict=True):
        for point, answer in zip(points, answers, strict=True):
            products = [sum(a * b for a, b in zip(point, other, strict=True)) for other in points]
            best = max(products) if mode == "nearest" else min(products)
            assert answer == points[products.index(best)]
            assert math.hypot(*point) == pytest.approx(1, abs=1e-15)
            if mode == "nearest":
                assert answer == point


def test_the_docstrings_points_get_the_docstrings_answers():
    points = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-0.6, 0.8]]])
    wanted = torch.tensor([[[-0.6, 0.8], [1.0, 0.0], [1.0, 0.0]]])
    assert torch.equal(task(dimension=2, points=3).answers(points, points), wanted)


@pytest.mark.parametrize("mode", ["nearest", "farthest"])
def test_a_separate_query_alone_is_scored(mode):
    batch = task(dimension=6, points=4, mode=mode, queries="separate").sample(30, generator())
    assert batch.inputs.shape == (30, 5, 6) and task(points=4, queries="separate").length == 5
    assert batch.targets[:, :4].isnan().all()
    for points, query, answer in zip(batch.inputs[:, :4], batch.inputs[:, 4], batch.targets[:, 4], strict=True):
        torch.testing.assert_close(points @ points.T, torch.eye(4).double(), rtol=0, atol=1e-14)
        distance = [(point - query).norm().item() for point in points]
        wanted = distance.index(min(distance) if mode == "nearest" else max(distance))
        assert torch.equal(answer, points[wanted])


def test_orthonormal_points_are_uniform():
    """Any entry has the distribution of a coordinate on the sphere: t^2 ~ Beta(1/2, (d-1)/2), either sign alike."""
    points = orthonormal(4000, 3, 5, generator())
    for point, coordinate in ((0, 0), (1, 4), (2, 2)):
        entry = points[:, point, coordinate]
        assert scipy.stats.kstest(entry.square(), scipy.stats.beta(0.5, 2).cdf).pvalue > 1e-3
        assert scipy.stats.binomtest(int((entry > 0).sum()), 4000).pvalue > 1e-3  # plain QR: one sign always


def test_the_zero_predictor_has_the_error_one():
    nearest = task(dimension=7)
    batch = nearest.sample(10, generator())
    assert nearest.error_scale * batch.targets.square().mean().item() == pytest.approx(1, rel=1e-14)
