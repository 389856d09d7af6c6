"""rankbench.tasks.convex_hull: labels against all segments and triangles, in exact arithmetic."""

import functools
import itertools
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shipped import task_of

from rankbench.seeds import generator_for
from rankbench.tasks import convex_hull
from rankbench.tasks.convex_hull import hull_labels, labels_of_sets

every = settings(max_examples=50, deadline=None)


hull_task = functools.partial(task_of, "convex_hull")


def labels_by_definition(points):
    """A place is extreme unless it lies on a segment between two others or in a triangle of three (Caratheodory)."""
    exact = [(Fraction(x), Fraction(y)) for x, y in points]

    def side(a, b, c):
        area = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
        return (area > 0) - (area < 0)

    def between(p, a, b):
        return side(a, b, p) == 0 and all(min(a[i], b[i]) <= p[i] <= max(a[i], b[i]) for i in (0, 1))

    def within(p, a, b, c):
        sides = {side(a, b, p), side(b, c, p), side(c, a, p)}
        return side(a, b, c) != 0 and not {1, -1} <= sides

    labels = []
    for p in exact:
        others = set(exact) - {p}
        spanned = any(between(p, *pair) for pair in itertools.combinations(others, 2))
        spanned = spanned or any(within(p, *three) for three in itertools.combinations(others, 3))
        labels.append(int(not spanned))
    return labels


small = st.integers(0, 3).map(float)  # on a small grid most sets have repeated points and points in line
# in general position up to far more than rounding, in sets of any size and place
general = st.integers(0, 2**32 - 1).map(
    lambda seed: np.random.default_rng(seed).normal(size=(7, 2)) * 10.0 ** (seed % 9)
)


@every
@given(st.one_of(st.lists(st.tuples(small, small), min_size=1, max_size=8), general))
def test_labels_are_those_of_the_definition(points):
    assert hull_labels(np.array(points)) == labels_by_definition(points)


def sets_of(kind, num_points):
    rng = np.random.default_rng(num_points)
    if kind == "grid":  # most sets have repeated points and points in line
        return rng.integers(0, 4, size=(300, num_points, 2)).astype(float)
    sets = 10 * rng.random((300, num_points, 2)) + 3.3 * rng.normal(size=(300, 1, 2))
    if kind == "ties":  # the last point beside an edge, or beside a vertex, by far less or far more than rounding
        far = 10.0 ** rng.uniform(-18, -2, size=(300, 1)) * rng.choice([-1, 1], size=(300, 1))
        share = rng.choice([0.0, 0.3], size=(300, 1))
        sets[:, -1] = (1 - share) * sets[:, 0] + share * sets[:, 1] + far * rng.normal(size=(300, 2))
    return sets


@pytest.mark.parametrize("num_points", [4, 5, 10, 39, 41])
@pytest.mark.parametrize("kind", ["general", "grid", "ties"])
def test_many_sets_have_the_labels_of_each(kind, num_points):
    sets = sets_of(kind, num_points)
    assert labels_of_sets(torch.from_numpy(sets)).tolist() == [hull_labels(points) for points in sets]


def test_qhull_is_asked_only_where_angles_do_not_decide(monkeypatch):
    asked = []
    monkeypatch.setattr(convex_hull, "hull_labels", lambda points: asked.append(points) or [9] * len(points))
    sets = sets_of("general", 10)
    assert labels_of_sets(torch.from_numpy(sets)).max() == 1 and not asked
    sets[7, 3] = (sets[7, 1] + sets[7, 2]) / 2
    assert (labels_of_sets(torch.from_numpy(sets)) == 9).any(1).nonzero().tolist() == [[7]]
    assert [points.tolist() for points in asked] == [sets[7].tolist()]


@pytest.mark.parametrize(
    ("points", "labels"),
    [
        ([(0, 0), (1, 0), (1, 1), (0, 1), (0.5, 0.5)], [1, 1, 1, 1, 0]),  # the docstring's
        ([(0, 0), (0.5, 0), (1, 0), (1, 1)], [1, 0, 1, 1]),  # on an edge
        ([(1, 1), (2, 2), (0, 0), (3, 3)], [0, 0, 1, 1]),  # in line
        ([(2, 2), (2, 2), (2, 2)], [1, 1, 1]),  # one place
        ([(0, 0), (1, 0), (0, 0), (0, 1), (0.25, 0.25), (0.25, 0.25)], [1, 1, 1, 1, 0, 0]),  # repeated
        ([(0.0, 0), (-0.0, 0), (1, 0), (0, 1)], [1, 1, 1, 1]),  # the two zeros are one place
    ],
)
def test_degenerate_sets(points, labels):
    assert hull_labels(np.array(points, dtype=float)) == labels


def test_the_number_of_vertices_is_that_of_the_closed_form():
    """In a square, three of four random points, and the fourth inside with probability 11/36 (Sylvester's problem)."""
    batch = hull_task(points=4).sample(20_000, generator_for(1, "train"))
    inside = (batch.targets.sum(1) == 3).double().mean().item()
    assert inside == pytest.approx(11 / 36, abs=4 * (11 / 36 * 25 / 36 / 20_000) ** 0.5)  # four standard errors


@pytest.mark.parametrize(("scale", "shift_sd"), [(1.0, 1.0), (10.0, 3.3), (2.0, 0.0)])
def test_points_are_uniform_in_a_shifted_square(scale, shift_sd):
    task = hull_task(points=4, scale=scale, shift_sd=shift_sd)
    inputs = task.sample(4000, generator_for(0, "train")).inputs
    assert inputs.shape == (4000, 4, 2) and inputs.dtype == torch.float64
    # a difference of two uniform numbers is triangular, whatever the shift; fixed seed, so p-values cannot flicker
    for axis in (0, 1):
        difference = (inputs[:, 0, axis] - inputs[:, 1, axis]).numpy() / scale
        assert scipy.stats.kstest(difference, scipy.stats.triang(0.5, -1, 2).cdf).pvalue > 1e-3
    # the variance of a coordinate is scale^2/12 + sd^2; of two points of a set, sd^2 in common
    common = torch.cov(inputs[:, :2, 0].T)[0, 1].item()
    assert common == pytest.approx(shift_sd**2, abs=6 * (scale**2 / 12 + shift_sd**2) / 4000**0.5)
