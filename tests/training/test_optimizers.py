"""rankbench.training.optimizers: schedules against numbers worked out by hand, steps against torch's."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from drawn import normal
from refusals import refusal

from rankbench.config.schema import KEYS, OptimizerConfig
from rankbench.training.optimizers import (
    OPTIMIZERS,
    QUINTIC,
    build_optimizer,
    cap_singular_values,
    check_optimizer,
    learning_rate,
    orthogonalised,
)

# a handful of roundings in float64, each at most eps = 2.2e-16 of its value
ROUNDING = 1e-14


# --- schedules -------------------------------------------------------------------------------------------------------

HAND_COMPUTED = [
    # lr 8, 10 steps; {step: rate}
    ({"schedule": "constant"}, {0: 8, 5: 8, 9: 8}),
    ({"schedule": "constant", "warmup": 4}, {0: 2, 1: 4, 2: 6, 3: 8, 4: 8, 9: 8}),
    ({"schedule": "constant", "warmup": 1}, {0: 8, 1: 8}),
    ({"schedule": "linear"}, {0: 8, 1: 7.2, 5: 4, 9: 0.8, 10: 0}),
    ({"schedule": "linear", "warmup": 2}, {0: 4, 1: 8, 2: 8, 4: 6, 6: 4, 9: 1, 10: 0}),
    ({"schedule": "cosine"}, {0: 8, 5: 4, 10: 0}),
    # cos(pi/4) = cos(2/8 pi) and cos(pi/3) of the way
    ({"schedule": "cosine", "warmup": 2}, {0: 4, 1: 8, 2: 8, 4: 4 + 2 * math.sqrt(2), 6: 4, 8: 4 - 2 * math.sqrt(2)}),
    ({"schedule": "cosine", "warmup": 4}, {4: 8, 6: 6, 7: 4, 8: 2, 10: 0}),
    ({"schedule": "multistep", "milestones": [3, 6], "decay": 0.5}, {0: 8, 2: 8, 3: 4, 5: 4, 6: 2, 9: 2}),
    ({"schedule": "multistep", "milestones": [6, 3], "decay": 0.25}, {2: 8, 3: 2, 6: 0.5}),
    ({"schedule": "multistep", "milestones": [3], "decay": 0.5, "warmup": 2}, {0: 4, 1: 8, 2: 8, 3: 4}),
    ({"schedule": "inverse_sqrt"}, {0: 8, 3: 4, 15: 2, 63: 1}),
    ({"schedule": "inverse_sqrt", "warmup": 4}, {0: 2, 3: 8, 15: 4, 63: 2}),
]


@pytest.mark.parametrize(("changes", "rates"), HAND_COMPUTED)
def test_schedules_are_those_worked_out_by_hand(changes, rates):
    cfg = OptimizerConfig(lr=8.0, **changes)
    for step, rate in rates.items():
        # sums near 8 that cancel to 0 at the end leave 8 eps: absolute, not relative
        assert learning_rate(cfg, step, num_steps=10) == pytest.approx(rate, abs=8 * ROUNDING)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "multistep", "inverse_sqrt"])
def test_a_warm_up_as_long_as_training_is_all_there_is(schedule):
    cfg = OptimizerConfig(lr=3.0, schedule=schedule, warmup=3, milestones=[100])
    assert [learning_rate(cfg, step, num_steps=3) for step in range(3)] == pytest.approx([1, 2, 3], rel=ROUNDING)
    assert math.isfinite(learning_rate(cfg, 3, num_steps=3))


# --- seeds side by side ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({"name": "adam", "beta1": 0.8, "beta2": 0.95}, partial(torch.optim.Adam, betas=(0.8, 0.95))),
        ({"name": "adamw", "beta1": 0.8, "beta2": 0.95}, partial(torch.optim.AdamW, betas=(0.8, 0.95))),
        ({"name": "sgd", "momentum": 0.7}, partial(torch.optim.SGD, momentum=0.7)),
        ({"name": "sgd", "momentum": 0.0}, torch.optim.SGD),
    ],
    ids=["adam", "adamw", "sgd", "sgd without momentum"],
)
def test_steps_are_those_of_torch_also_after_a_restore(changes, alone):
    """Of torch's own rules, every one of which moves each number by its own gradients alone: seeds do not mix."""
    shapes = [(5, 7), (11,), (3, 1, 2)]
    ours, theirs = ([normal(0, *shape).requires_grad_() for shape in shapes] for _ in range(2))
    cfg = OptimizerConfig(weight_decay=0.1, **changes)
    optimizer = build_optimizer(cfg, ours, [None] * len(ours))
    reference = alone(theirs, lr=cfg.lr, weight_decay=0.1, fused=True)
    for step in range(9):
        for mine, other, shape in zip(ours, theirs, shapes, strict=True):
            mine.grad = normal(1 + step, *shape)
            other.grad = mine.grad.clone()
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] = 0.1 / (1 + step)
            each.step()
        if step in (3, 4, 6):  # after a step in one call, after torch's own first one, and in place
            state = optimizer.state_dict()
            optimizer = optimizer if step == 6 else build_optimizer(cfg, ours, [None] * len(ours))
            optimizer.load_state_dict(state)
    assert all(map(torch.equal, ours, theirs))
    states = [each.state_dict()["state"] for each in (optimizer, reference)]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    # a file cannot hold one tensor under several names
    counts = [state["step"].data_ptr() for state in states[0].values() if "step" in state]
    assert len(set(counts)) == len(counts)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "muon"])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum", "beta1", "beta2"])
@pytest.mark.parametrize("end", [0, 1])
def test_whatever_the_config_allows_can_be_built(name, key, end):
    limits = KEYS[f"optimizer.{key}"]
    cfg = OptimizerConfig(name=name, **{key: (limits.at_least, limits.at_most)[end]})
    assert build_optimizer(cfg, [torch.ones(2, requires_grad=True)], [None]).param_groups


# --- Muon, and the cap -----------------------------------------------------------------------------------------------


def after_five_rounds(s):
    for _ in range(5):
        s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
    return s


def orthogonal_by_hand(matrix):
    """The matrix of Frobenius norm 1 with each singular value mapped by the quintic."""
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return u * after_five_rounds(s / np.linalg.norm(s)) @ v


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5), (1, 6)])
def test_orthogonalised_is_the_polynomial_of_the_singular_values(shape):
    x_SOI = normal(1, 3, *shape) * torch.tensor([1e-8, 1.0, 1e8]).view(3, 1, 1)
    for got, x_OI in zip(orthogonalised(x_SOI).numpy(), x_SOI.numpy(), strict=True):
        # each round can multiply an error by up to its slope, 3.4445: 5e2 roundings after five
        np.testing.assert_allclose(got, orthogonal_by_hand(x_OI), rtol=0, atol=1e-12)
    assert (orthogonalised(torch.zeros(2, 3, 4)) == 0).all()


def test_singular_values_come_near_one():
    s = after_five_rounds(before := np.geomspace(0.01, 1, 10_000))
    assert s[before > 0.02].min() > 0.67 and s.max() < 1.14


def test_muon_steps_are_those_of_a_plain_loop_and_the_rest_is_adamw():
    """Maps of 7 rows and of 2 in one matrix, three seeds on different scales, and a vector."""
    cfg = OptimizerConfig(name="muon", lr=0.05, weight_decay=0.1, momentum=0.9)
    stacked = [normal(1, 3, 9, 5).requires_grad_(), normal(2, 3, 6).requires_grad_()]
    wanted, buffer = stacked[0].detach().numpy().copy(), np.zeros((3, 9, 5))
    vector = stacked[1].detach().clone().requires_grad_()
    adamw = torch.optim.AdamW([vector], lr=0.05, weight_decay=0.1, foreach=False, fused=False)
    optimizer = build_optimizer(cfg, stacked, [[7, 2], None])
    for step in range(4):
        scales = 10.0 ** torch.arange(3)
        gradients = [normal(10 + step, 3, 9, 5) * scales.view(3, 1, 1), normal(20 + step, 3, 6)]
        for parameter, gradient in zip((*stacked, vector), (*gradients, gradients[1]), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
        adamw.step()
        buffer = 0.9 * buffer + gradients[0].numpy()
        ahead = gradients[0].numpy() + 0.9 * buffer
        wanted *= 1 - 0.05 * 0.1
        for seed in range(3):
            for begin, end in ((0, 7), (7, 9)):
                step_OI = orthogonal_by_hand(ahead[seed, begin:end])
                wanted[seed, begin:end] -= 0.05 * 0.2 * math.sqrt(max(step_OI.shape)) * step_OI
    np.testing.assert_allclose(stacked[0].detach().numpy(), wanted, rtol=0, atol=1e-11)
    torch.testing.assert_close(stacked[1], vector, rtol=1e-12, atol=1e-12)


def test_a_seed_alone_moves_bit_for_bit_as_beside_others():
    def moved(seeds):
        weights = [normal(3, 4, 6, 5)[seeds].clone().requires_grad_()]
        optimizer = build_optimizer(OptimizerConfig(name="muon", momentum=0.9), weights, [[6]])
        for step in range(3):
            weights[0].grad = normal(step, 4, 6, 5)[seeds]
            optimizer.step()
            cap_singular_values(weights[0], [6], 1.0)
        return weights[0].detach()

    together = moved(slice(None))
    assert all(torch.equal(moved(slice(seed, seed + 1))[0], together[seed]) for seed in range(4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_cap_clips_the_singular_values_of_each_map_and_nothing_else(dtype):
    weight_SOI = normal(4, 3, 7, 4).to(dtype)
    weight_SOI[0] *= 0.1  # below the cap as it is
    weight_SOI[2, 0, 0] = math.nan
    capped_SOI = weight_SOI.clone()
    cap_singular_values(capped_SOI, [4, 3], 1.5)
    assert torch.equal(capped_SOI[0], weight_SOI[0])
    torch.testing.assert_close(capped_SOI[2, :4], weight_SOI[2, :4], rtol=0, atol=0, equal_nan=True)
    assert capped_SOI[2, 4:].isfinite().all()
    for rows in (slice(4), slice(4, 7)):
        u, s, v = np.linalg.svd(weight_SOI[1, rows].numpy(), full_matrices=False)
        assert s.max() > 1.5
        rounding = 50 * torch.finfo(dtype).eps  # of matrices of norm 4 through one SVD
        np.testing.assert_allclose(capped_SOI[1, rows].numpy(), u * s.clip(max=1.5) @ v, rtol=0, atol=rounding)


# --- rules of others -------------------------------------------------------------------------------------------------


class OwnRule(torch.optim.Optimizer):
    """A plain step; `change` says by what the gradient of each parameter is replaced."""

    def __init__(self, cfg, parameters, change):
        super().__init__(parameters, {"lr": cfg.lr})
        self.change, self.count = change, 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.param_groups[0]["lr"] * self.change(self, parameter.grad, self.state[parameter]))


def _momentum(rule, gradient, state):
    state["sum"] = 0.9 * state.get("sum", 0) + gradient
    return state["sum"]


def _counted(rule, gradient, state):
    state["count"] = state.get("count", 0) + 1
    return gradient / state["count"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_momentum, ""),
        (_counted, "keeps count, int, for a parameter of shape (2, 4, 3); allowed are tensors of its shape, or of one"),
        (lambda rule, gradient, state: gradient / rule.count, "a training that is continued takes other steps; keep"),
        (lambda rule, gradient, state: torch.randn_like(gradient), "a training that is continued takes other steps"),
        (lambda rule, gradient, state: gradient / gradient.norm(), "a seed takes other steps beside another seed than"),
    ],
)
def test_a_rule_of_others_can_be_continued_and_keeps_seeds_apart(change, said, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "own", lambda cfg, parameters, rows: OwnRule(cfg, parameters, change))
    if said:
        assert refusal(check_optimizer, OptimizerConfig(name="own")).startswith(f"optimizer.name=own: {said}")
    else:
        for name in OPTIMIZERS:
            check_optimizer(OptimizerConfig(name=name))
