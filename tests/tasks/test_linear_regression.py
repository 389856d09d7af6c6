"""tasks/linear_regression.py against numpy, example by example."""

import functools

import numpy as np
import pytest
import torch
from drawn import generator
from shipped import task_of

from rankbench.commands.compose import compose
from rankbench.runs.run import Run
from rankbench.tasks.linear_regression import BASELINES, examples_of
from rankbench.tasks.task import score
from rankbench.training.loop import train

task = functools.partial(task_of, "linear_regression")


def test_tokens_are_xs_and_ys_in_turn_and_one_w_explains_them():
    regression = task(dimension=3, points=6, start_dimension=1, start_points=1)
    batch = regression.sample(8, generator())
    assert batch.inputs.shape == (8, 11, 3) and batch.targets.shape == (8, 11, 1) and regression.length == 11
    x, y = examples_of(batch)
    for xs, ys, inputs, targets in zip(x.numpy(), y.numpy(), batch.inputs, batch.targets, strict=True):
        _, rest, rank, _ = np.linalg.lstsq(xs, ys, rcond=None)
        assert rank == 3 and rest.max() < 1e-25
        assert inputs[1::2, 0].tolist() == ys[:5].tolist() and (inputs[1::2, 1:] == 0).all()
        assert targets[1::2].isnan().all() and not targets[0::2].isnan().any()


def test_noise_has_its_standard_deviation():
    x, y = examples_of(task(dimension=2, points=200, noise=0.3, start_dimension=1).sample(50, generator()))
    rests = [np.linalg.lstsq(a, b, rcond=None)[1][0] for a, b in zip(x.numpy(), y.numpy(), strict=True)]
    # chi-squared with 50 * 198 degrees of freedom: five standard deviations are 7 %
    assert sum(rests) / (50 * 198) == pytest.approx(0.09, rel=0.07)


def test_the_zero_predictor_has_about_the_error_one():
    regression = task()
    _, y = examples_of(regression.sample(500, generator()))
    assert regression.error_scale * y.square().mean().item() == pytest.approx(
        1, abs=0.1
    )  # sd of |w|^2/20 over 500: .014


def test_baselines_are_those_of_a_loop():
    batch = task(dimension=3, points=7, noise=0.2, start_dimension=1, start_points=1).sample(4, generator())
    x, y = examples_of(batch)
    got = {name: predict(x, y) for name, predict in BASELINES.items()}
    for b in range(4):
        for e in range(7):
            xs, ys, new = x[b, :e].numpy(), y[b, :e].numpy(), x[b, e].numpy()
            wanted = dict.fromkeys(BASELINES, 0.0)
            if e:
                wanted["least squares"] = new @ np.linalg.lstsq(xs, ys, rcond=None)[0]
                order = np.argsort(((xs - new) ** 2).sum(1))[:3]
                wanted["3 nearest neighbours"] = ys[order].mean()
                wanted["averaging"] = new @ (xs * ys[:, None]).mean(0)
            for name, value in wanted.items():  # float64, well conditioned but for squares of a few numbers
                assert got[name][b, e].item() == pytest.approx(value, rel=1e-9, abs=1e-12), name


def test_the_curriculum_grows_to_the_whole():
    regression = task(dimension=4, points=9, start_dimension=2, start_points=3, curriculum_every=10)
    for step, points, dimension in ((0, 3, 2), (9, 3, 2), (10, 5, 3), (25, 7, 4), (1000, 9, 4)):
        x, y = examples_of(regression.sample_at(step, 5, generator()))
        assert y.shape == (5, points)
        assert (x[..., :dimension] != 0).all() and (x[..., dimension:] == 0).all()
    assert examples_of(regression.sample(5, generator()))[1].shape == (5, 9)
    always = task(curriculum_every=None)
    assert torch.equal(always.sample_at(0, 2, generator()).inputs, always.sample(2, generator()).inputs)


def test_places_without_a_target_leave_the_gradient_alone():
    batch = task(dimension=2, points=3, start_dimension=1, start_points=1).sample(2, generator())
    outputs = torch.ones_like(batch.targets, requires_grad=True)
    score(outputs, batch.targets).loss.backward()
    wanted = torch.where(batch.targets.isnan(), 0.0, 2 * (1 - batch.targets))
    torch.testing.assert_close(outputs.grad, wanted, rtol=1e-14, atol=0)


def test_a_network_trains_through_the_curriculum(tmp_path):
    small = ["task.dimension=2", "task.points=4", "task.start_dimension=1", "task.start_points=2", "task.test_size=9"]
    words = ["task=linear_regression", *small, "task.curriculum_every=2", "model.layers=1", "model.width=8"]
    cfg = compose("train", *words, "model.mask=causal", "trainer.steps=6", "trainer.batch_size=4", "replicas=2")
    summary = train(cfg, Run(tmp_path / "run"))
    assert summary["status"] == "finished" and all(np.isfinite(row["test_loss"]) for row in summary["seeds"])
