"""rankbench.analyses.rollout: free running of a layer that can be solved by hand, and of any network step by step.

One head with W_Q = c I, W_K = I and W_V = rotation / g, no norm, bias, MLP or skip: two opposite points of radius r
attend to themselves with weight sigmoid(2 c r^2 / sqrt 2), so they stay opposite, turn, and have the next radius
r tanh(c r^2 / sqrt 2) / g.
"""

import functools
import math

import numpy as np
import pandas as pd
import pytest
import torch
from shipped import options_of

from rankbench.analyses import ANALYSES, Subject, rollout
from rankbench.analysing.runner import measure
from rankbench.model import initial_model
from rankbench.plots.rollout import HIGHEST, LOWEST
from rankbench.seeds import generator_for
from rankbench.tasks import build_task

POINTS = 40


@pytest.fixture(scope="module")
def task():
    return build_task({"name": "circle_arcs", "points": POINTS, "radius": 0.3})


options = functools.partial(options_of, "rollout")


@pytest.fixture(scope="module")
def solvable(model_config, task):
    """solvable(c, g): the layer of this file's docstring."""

    def make(c, g):
        cfg = model_config(
            **{"layers": 1, "heads": 1, "width": 2, "positions": "none", "norm": "none"},
            **{"skip": False, "mlp": False, "mlp_skip": False, "bias": False},
        )
        model = initial_model(cfg, task, 0).double().requires_grad_(False)
        turn = math.pi / POINTS
        eye, (cos, sin) = torch.eye(2, dtype=torch.float64), (math.cos(turn), math.sin(turn))
        rotation = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
        for linear in (model.read_in, model.read_out):
            linear.weight.copy_(eye)
            linear.bias.zero_()
        attention = model.blocks[0].attention
        attention.qkv.weight.copy_(torch.cat([c * eye, eye, rotation / g]))
        attention.out.weight.copy_(eye)
        return model

    return make


def subject_of(task, seed=0, **models):
    batch = task.sample(task.points, generator_for(seed, "train"))
    return Subject("a run", seed, task, batch, batch, models)


def radii(c, g, steps, r=0.3):
    radius_T = [r]
    for _ in range(steps):
        radius_T.append(radius_T[-1] * math.tanh(c * radius_T[-1] ** 2 / math.sqrt(2)) / g)
    return np.array(radius_T)


def balanced(c):
    """The g for which the circle is kept, were it exact."""
    return math.tanh(c * 0.09 / math.sqrt(2))


@pytest.mark.parametrize("share", [1.05, 1.0, 0.97])
def test_positions_are_those_of_the_solved_layer(task, solvable, share):
    c, g = 10.0, share * balanced(10.0)
    table = rollout.table(subject_of(task, trained=solvable(c, g)), options(steps=20, every=7))
    assert table.step.tolist() == [0, 0, 7, 7, 14, 14, 20, 20]
    assert table.token.tolist() == [1, 2] * 4
    r = radii(c, g, 20)[table.step]
    angle = math.pi * table.step / POINTS + np.where(table.token == 1, math.pi, 0)
    # the circle repels: beside it an error grows by 2.55 at each step, so rounding of 1e-16 to 1e-8 in 20 steps
    for column, wanted in (("x", r * np.cos(angle)), ("y", r * np.sin(angle)), ("distance", 2 * r)):
        np.testing.assert_allclose(table[column], wanted, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(table.error, np.abs(r - 0.3), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("share", "collapsed", "escaped"), [(1.02, 1, 0), (0.98, 0, 1)])
def test_the_circle_repels_so_runs_collapse_or_escape(task, solvable, share, collapsed, escaped):
    c = 10.0
    model = solvable(c, share * balanced(c))
    row = rollout.table(subject_of(task, trained=model), options(steps=2000)).iloc[-1]
    assert (row.collapsed, row.escaped) == (collapsed, escaped)
    if escaped:  # stopped before the numbers are infinite
        assert row.step < 2000 and 30 < row.distance < rollout.OVERFLOW and math.isnan(row.half_step)
    else:
        assert row.step == 2000 and row.distance == 0.0
        assert row.half_step == np.flatnonzero(radii(c, share * balanced(c), 200) <= 0.15)[0]
    # all radii of the training set are .3: the error is the radius that is missed, over the chord of a step
    chord = 2 * 0.3 * math.sin(math.pi / POINTS / 2)
    assert row.one_step_error == pytest.approx(abs(0.3 / share - 0.3) / chord, rel=1e-9)


def test_a_geometric_decay_is_followed(task, solvable):
    # with c so large that every point attends to itself alone, r shrinks by g at each step while it is not tiny
    row = rollout.table(subject_of(task, trained=solvable(1e30, 1.25)), options(steps=100)).iloc[-1]
    assert row.half_step == math.ceil(math.log(2) / math.log(1.25))
    assert row.collapsed == 1 and row.distance == pytest.approx(0.6 * 1.25**-100, rel=1e-9)


def test_what_is_rounding_is_marked(task, solvable):
    table = rollout.table(subject_of(task, trained=solvable(1e60, 10.0)), options(steps=30))
    assert (table.below_floor == (table.distance <= 0.6 * rollout.SMALLEST_DISTANCE)).all()
    assert set(table.below_floor) == {0, 1}


@pytest.mark.parametrize("changes", [{}, {"mlp": True, "mlp_skip": True}, {"skip": True, "norm": "post"}])
def test_any_network_is_run_step_by_step_in_float64(model_config, task, changes):
    plain = {"layers": 1, "heads": 1, "width": 8, "positions": "none", "norm": "none", "skip": False, "mlp": False}
    cfg = model_config(**{**plain, "mlp_skip": False, **changes})
    model = initial_model(cfg, task, 1).requires_grad_(False)
    table = rollout.table(subject_of(task, initialised=model), options(steps=5, every=1))
    assert next(model.parameters()).dtype == torch.float32  # the subject's own is left as it is
    assert (table["skip"] == cfg.skip).all() and (table["mlp"] == cfg.mlp).all()
    exact = initial_model(cfg, task, 1).double().requires_grad_(False)
    now = torch.tensor([[[-0.3, 0.0], [0.3, 0.0]]], dtype=torch.float64)
    for step in range(6):
        rows = table[table.step == step]
        assert rows[["x", "y"]].to_numpy() == pytest.approx(now[0].numpy(), abs=1e-14)
        assert rows.distance.iloc[0] == pytest.approx(math.dist(*now[0].tolist()), abs=1e-14)
        now = exact(now)


# --- figure, digest, claim --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(task, solvable):
    """Four seeds: three collapse, one escapes."""
    subjects, c = [], 10.0
    for seed, share in enumerate((1.01, 1.02, 1.05, 0.9)):
        models = {"trained": solvable(c, share * balanced(c)), "initialised": solvable(c, 1.0)}
        subjects.append(subject_of(task, seed, **models))
    return measure("rollout", options(steps=60, every=5), subjects)


@pytest.mark.further
def test_the_figure_shows_means_of_logarithms_and_every_facet(whole):
    both = pd.concat([whole.assign(**{"model.width": width}) for width in (32, 64)], ignore_index=True)
    figure = ANALYSES["rollout"].figure(both, None, "model.width")
    assert len(figure.axes) == 4
    assert figure.axes[2].get_title() == "trained weights · width 64"
    assert figure.axes[1].get_title().startswith("3 of 4 collapse, 1 escape")
    assert figure.axes[0].get_ylabel() == "y" and figure.axes[2].get_xlabel() == "x"
    many = pd.concat([whole.assign(net=net) for net in range(12)], ignore_index=True)
    panels = ANALYSES["rollout"].figure(many, None, "net").axes
    drawn = [{line.get_label() for line in axes.get_lines()} for axes in panels]
    assert len(panels) == 24 and all({"token 1", "token 2", "true arcs"} <= labels for labels in drawn[::2])
    (line,) = [line for line in figure.axes[1].get_lines() if line.get_label() == "trained weights"]
    at = whole[(whole.weights == "trained") & (whole.token == 1)].pivot(index="step", columns="seed", values="distance")
    wanted = np.exp(np.log((at.ffill() / 0.6).clip(LOWEST, HIGHEST)).mean(axis=1))
    np.testing.assert_allclose(line.get_ydata(), wanted, rtol=1e-9)


def test_the_digest_counts_seeds(whole):
    (words,) = [line.split() for line in rollout.digest(whole).splitlines() if " trained" in line]
    assert words[-4:-2] == ["0.75", "0.25"] and "4 seeds" in rollout.digest(whole)
