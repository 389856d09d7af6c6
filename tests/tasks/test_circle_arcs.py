"""rankbench.tasks.circle_arcs: positions against complex powers, the training set against the arcs it is made of."""

import cmath
import functools
import math

import pytest
import torch
from shipped import task_of

from rankbench.seeds import generator_for

circle_task = functools.partial(task_of, "circle_arcs")


@pytest.mark.parametrize(
    ("changes", "points", "radius"),
    [({}, 1000, 0.3), ({"points": 7, "radius": 1.0}, 7, 1.0), ({"points": 2}, 2, 0.3)],  # the first one is the paper's
)
def test_positions_are_powers_of_one_turn(changes, points, radius):
    task = circle_task(**changes)
    steps = torch.arange(3 * points)  # past the end of the arcs they go round
    turn = cmath.exp(1j * math.pi / points)
    for step, (lower, upper) in zip(steps.tolist(), task.positions(steps).tolist(), strict=True):
        wanted = radius * turn**step
        # 3000 multiplications of numbers of size 1 lose at most that many roundings
        assert complex(*upper) == pytest.approx(wanted, abs=1e-12)
        assert complex(*lower) == pytest.approx(-wanted, abs=1e-12)


def test_the_example_of_the_docstring():
    batch = circle_task(points=2).sample(2, generator_for(0, "train"))
    order = batch.inputs[:, 0, 0].argsort()
    wanted_inputs = torch.tensor([[[-0.3, 0], [0.3, 0]], [[0, -0.3], [0, 0.3]]], dtype=torch.float64)
    wanted_targets = torch.tensor([[[0, -0.3], [0, 0.3]], [[0.3, 0], [-0.3, 0]]], dtype=torch.float64)
    torch.testing.assert_close(batch.inputs[order], wanted_inputs, rtol=0, atol=1e-15)
    torch.testing.assert_close(batch.targets[order], wanted_targets, rtol=0, atol=1e-15)


def angles(inputs):
    return torch.atan2(inputs[:, 1, 1], inputs[:, 1, 0])


def test_the_training_set_is_every_step_once():
    task = circle_task(points=50)
    assert task.train_size == 50 and task.test_size is None
    batch = task.sample(task.train_size, generator_for(0, "train"))
    angle_T = angles(batch.inputs)
    wanted = torch.arange(50, dtype=torch.float64) * math.pi / 50
    torch.testing.assert_close(angle_T.sort().values, wanted, rtol=0, atol=1e-12)
    assert not torch.equal(angle_T, angle_T.sort().values)
    turn = math.pi / 50
    rotation = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    torch.testing.assert_close(batch.inputs @ rotation.T, batch.targets, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("wanted", "counts"), [(3, {1}), (10, {1}), (25, {2, 3})])
def test_no_step_comes_again_before_all_were_there(wanted, counts):
    batch = circle_task(points=10).sample(wanted, generator_for(1, "train"))
    steps = (angles(batch.inputs) * 10 / math.pi).round().long()
    assert len(batch.inputs) == wanted
    assert set(torch.bincount(steps)[steps].tolist()) == counts
