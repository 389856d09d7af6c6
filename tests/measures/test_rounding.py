"""rankbench.measures.rounding: the noise floor against the error that a computation in more digits shows.

Shapes: B batch, N token, D width.
"""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn import generator

from rankbench.commands.compose import compose
from rankbench.measures import rounding
from rankbench.measures.by_layer import metrics_by_layer
from rankbench.measures.norms import composite_norm, own_rounding, residual_matrix
from rankbench.measures.residual_coordinates import log_residual
from rankbench.measures.residual_propagation import propagate
from rankbench.measures.rounding import RandomRounding, run_with_floors, states_with_floors
from rankbench.measures.states import STATE_FLOORS
from rankbench.model import initial_model
from rankbench.model.network import AttentionStep, run, without
from rankbench.seeds import generator_for
from rankbench.tasks import build_task

EPS = 2.0**-52


def noisy(operation, *args, seed=0):
    with RandomRounding(generator(seed)):
        return operation(*args)


def draws(operation, *args):
    return torch.stack([noisy(operation, *args, seed=seed) for seed in range(200)])


# --- one operation ----------------------------------------------------------------------------------------------------

ONE = torch.ones(1, 1, dtype=torch.float64)
CANCELLING = torch.tensor([[3.25, -3.25]]).double(), torch.ones(2, 1).double()  # a product whose two terms cancel


@pytest.mark.parametrize(
    ("operation", "args", "size"),
    [
        (torch.mm, CANCELLING, 6.5),
        (torch.bmm, [x[None] for x in CANCELLING], 6.5),
        (torch.addmm, (-6.25 * ONE[0], 2 * ONE, 3.25 * ONE), 12.75),  # -6.25 + 2 * 3.25
        (F.linear, (2 * ONE, 3.25 * ONE, -6.25 * ONE[0]), 12.75),
        (lambda c, a, b: torch.addmm(c, a, b, alpha=-2.0), (6.25 * ONE, 2 * ONE, 3.25 * ONE), 19.25),
        (lambda c, a, b: c.clone().addmm_(a, b, alpha=-1.0), (6.25 * ONE, 2 * ONE, 3.25 * ONE), 12.75),
        (torch.mul, (2.5 * ONE, 3 * ONE), 7.5),
        (torch.exp, (ONE,), np.e),
        (F.gelu, (-8 * ONE,), 8),  # gelu(-8) is 5e-15: 1 + erf cancels
        (lambda x: x.clone().mul_(2.5), (ONE,), 2.5),  # in place
        (lambda x, y: torch.mm(x, y, out=0 * ONE), CANCELLING, 6.5),
    ],
)
def test_an_operation_is_off_by_eps_times_what_it_adds_up(operation, args, size):
    error = draws(operation, *args) - operation(*args)
    # uniform in [-1, 1] eps size, to the nearest float64: up to 2 eps of a number apart
    assert 0.7 * EPS * size < error.abs().max() <= 1.7 * EPS * size
    assert error.min() < 0 < error.max()


def test_a_sum_that_cancels_is_off_by_eps_of_its_terms():
    x = torch.tensor([3.25, -3.25]).double()
    assert 2 * EPS < draws(torch.sum, x).abs().max() < 8.1 * EPS  # 3.25 eps of each, to the nearest float64: 4


def test_an_operation_of_another_library_is_not_the_one_of_torch_with_its_name():
    library = torch.library.Library("rankbench_tests", "FRAGMENT")
    library.define("mm(Tensor a, Tensor b, bool transposed) -> Tensor")
    library.impl("mm", lambda a, b, transposed: a @ b.T if transposed else a @ b, "CompositeExplicitAutograd")
    x = torch.rand(2, 3, generator=generator(0))
    torch.testing.assert_close(noisy(torch.ops.rankbench_tests.mm, x, x, True), x @ x.T)


@pytest.mark.parametrize(
    "operation",
    [
        *(torch.neg, torch.abs, F.relu, torch.clone, lambda x: x.T, lambda x: x[:, 1:], lambda x: x.amax(0)),
        *(lambda x: torch.cat([x, x]), lambda x: F.pad(x, (0, 1)), lambda x: x.contiguous().view(-1)),
        *(lambda x: x.masked_fill(x > 0, 1.0), lambda x: torch.where(x > 0, x, 0), lambda x: x.argmax(0)),
        lambda x: F.embedding(torch.tensor([1, 0]), x),
        *(lambda x: x // 1, lambda x: x % 1, torch.floor, torch.round, torch.sign, lambda x: x.topk(1, 0).values),
        *(lambda x: torch.div(x, 1, rounding_mode="floor"), lambda x: x.long()),
        *(lambda x: F.relu(x.clone(), inplace=True), lambda x: x.clone().masked_fill_(x > 0, 0.3)),
        *(lambda x: x.clone().clamp_(-0.3, 0.3), lambda x: x.clamp(max=0.3), F.relu6, lambda x: x[x > 0]),
    ],
)
def test_what_involves_no_rounding_stays(operation):
    x = torch.randn(3, 4, generator=generator(0), dtype=torch.float64)
    assert torch.equal(noisy(operation, x), operation(x))


@pytest.mark.parametrize(
    "count",
    [
        *(lambda x: x // 2, lambda x: x.div(2, rounding_mode="trunc"), lambda x: x % 2, lambda x: x.long()),
        lambda x: torch.histc(x, 4, 0, 3),
        lambda x: F.one_hot(x.long(), 4).double().sum(0),
        lambda x: x.new_ones(1, len(x)) @ F.one_hot(x.long(), 4).double(),
        lambda x: x.new_zeros(1, 4).addmm_(x.new_ones(1, len(x)), F.one_hot(x.long(), 4).double()),
        lambda x: torch.zeros_like(x[:4]).index_add_(0, x.long(), torch.ones_like(x)).cumsum(0),
    ],
)
def test_whole_numbers_and_counts_of_tokens_stay_whole(count):
    chosen = torch.tensor([0.0, 3, 1, 3, 3, 2, 0], dtype=torch.float64)  # the expert of each token
    assert (draws(count, chosen) == count(chosen)).all()


def test_a_conversion_rounds_to_coarser_numbers_alone():
    x = torch.randn(100, generator=generator(0))
    assert torch.equal(noisy(lambda x: x.double(), x), x.double())
    error = noisy(lambda x: x.bfloat16(), x).double() - x.bfloat16().double()
    assert 0.25 < (error.abs() / x.abs()).max() / torch.finfo(torch.bfloat16).eps < 1.7


def test_hidden_keys_stay_hidden():
    scores = torch.tensor([[1.0, -torch.inf], [2.0, 3.0]]).double()
    p = noisy(lambda x: x.softmax(-1), scores)
    assert p[0, 1] == 0 and p.isfinite().all() and not torch.equal(p, scores.softmax(-1))
    assert noisy(lambda x: x - 1, scores)[0, 1] == -torch.inf


def test_noise_is_a_function_of_its_generator_and_of_nothing_else():
    x, before = torch.randn(5, 5, generator=generator(0)), torch.get_rng_state()
    assert torch.equal(noisy(torch.exp, x, seed=1), noisy(torch.exp, x, seed=1))
    assert not torch.equal(noisy(torch.exp, x, seed=1), noisy(torch.exp, x, seed=2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("shape", [(6, 40), (1, 6, 40)])
def test_the_noise_of_large_results_is_drawn_a_part_at_a_time(shape, monkeypatch):
    """From a pool of a few numbers, and every number gets some; up to half of the draws round to the number itself."""
    x = torch.rand(shape, generator=generator(0)).double() + 1
    b = torch.ones(40, 40).double()
    monkeypatch.setattr(rounding, "LARGE", 50)
    monkeypatch.setattr(rounding, "POOL", 1)
    operations = [(lambda x: x @ b, x @ b), (torch.exp, x.exp()), (F.gelu, x), (lambda x: x.sum(0), x.sum(0))]
    for operation, size in operations:
        with RandomRounding(generator(0)) as mode:
            error = (operation(x) - operation(x.clone())).abs() / size  # two draws
        assert 0.9 * EPS < error.max() <= 5 * EPS and (error > 0).double().mean() > 0.5
        assert all(pool.numel() <= 400 for pool in mode.pools.values())


# --- whole networks: the margin ---------------------------------------------------------------------------------------

WIDTHS, LAYERS, LENGTHS = (4, 8, 32, 96), (1, 2, 4, 8), (2, 4, 10, 16)
KINDS = {
    "heads": (1, 2, 4),
    "mlp_ratio": (1, 4),
    "norm": ("none", "pre", "post"),
    "norm_kind": ("layernorm", "rmsnorm"),
    "init": ("pytorch", "glorot", "bert"),
    "mask": ("none", "causal"),
    "activation": ("relu", "gelu"),
    "attention": ("dot", "l2", "cosine"),
    "bias": (True, False),
    "init_gain": (1.0, 2.0),
}


def networks(number, model_config, sorting_task):
    """Networks of random kinds, in float32, with and without skips and MLPs, each with eight sequences."""
    draw = np.random.default_rng(0)
    for seed in range(number):
        kind = {key: values[draw.integers(len(values))] for key, values in KINDS.items()}
        task = sorting_task(length=int(draw.choice(LENGTHS)), alphabet=10)
        cfg = model_config(layers=int(draw.choice(LAYERS)), width=int(draw.choice(WIDTHS)), **kind)
        model = initial_model(cfg, task, seed).requires_grad_(False)
        inputs = task.sample(8, generator(seed)).inputs
        yield without(model, skip=bool(draw.integers(2)), mlp=bool(draw.integers(2))), inputs


@pytest.mark.further
def test_no_error_of_single_precision_reaches_its_floor_and_floors_are_not_much_larger(model_config, sorting_task):
    """float64, nine digits more, is the truth. Worst of 400 networks when MARGIN was chosen: 0.56 floors."""
    ratios = {"output": [], "weights": []}
    for seed, (model, inputs) in enumerate(networks(60, model_config, sorting_task)):
        exact = copy.deepcopy(model)
        exact.whole.double()
        single, double = run_with_floors(model, inputs, generator_for(seed, "rounding")), run(exact, inputs)
        for (step, floors), true in zip(single, double, strict=True):
            pairs = {"input": (step.input_BND, true.input_BND, floors.input_B)}
            pairs |= {"output": (step.output_BND, true.output_BND, floors.output_B)}
            if isinstance(step, AttentionStep):
                pairs["weights"] = step.weights_BHNM, true.weights_BHNM, floors.weights_BH
            for kind, (x, true_x, floor) in pairs.items():
                error = composite_norm(residual_matrix(x.double() - true_x))
                assert (error <= floor).all(), (seed, step.sublayer.name, kind, error / floor)
                if kind in ratios:
                    ratios[kind] += (floor / error)[error > 0].flatten().tolist()
    for kind, values in ratios.items():
        assert 5 < np.median(values) < 50, kind  # 14 of states, 22 of P
    assert len(ratios["output"]) > 2000


def test_the_rounding_of_the_tokens_alone_is_less_than_the_error(fresh_subject):
    """What the floor was once taken to be: an MLP of ratio 4 without skips exceeds it."""
    subject = fresh_subject(0, 8, 16, layers=4, width=96, mlp_ratio=4)
    network = without(subject.network, skip=True)
    *_, (x_BND, floor_B) = states_with_floors(network, subject.test.inputs, generator(0))
    measured_B = composite_norm(residual_matrix(x_BND))  # of a residual below 1e-50
    assert (own_rounding(x_BND) < measured_B).any() and (measured_B < floor_B).all()
    assert (floor_B < 100 * own_rounding(x_BND)).all()


def test_tokens_that_cancel_keep_the_error_of_what_they_were():
    """Two opposite tokens: each layer averages them to nearly nothing, and their rounding stays where they were."""
    words = "model=san task=circle_arcs model.init=glorot model.bias=false model.positions=none model.layers=4"
    cfg = compose("analyze", *words.split())
    task = build_task(cfg.task)
    model = initial_model(cfg.model, task, 0).requires_grad_(False).double()
    inputs = task.sample(32, generator(0)).inputs
    _, *floored_states = states_with_floors(model, inputs, generator(0))
    _, *true_states = propagate(model, inputs)
    for layer, (state, (x_BND, floor_B)) in enumerate(zip(true_states, floored_states, strict=True)):
        true_B = log_residual(state).exp()  # 1e-3, 1e-10, 1e-34, 1e-103
        assert ((composite_norm(residual_matrix(x_BND)) - true_B).abs() <= floor_B).all()
        if layer > 1:
            assert (true_B < 1e-6 * floor_B).all()
    x_BND, floor_B = floored_states[1]
    assert (own_rounding(x_BND) < 1e-4 * floor_B).all()


def test_absent_tokens_are_no_part_of_a_floor(fresh_subject):
    subject = fresh_subject(0, 4, 6, layers=3, width=8, positions="none")
    model, inputs = subject.network.float(), subject.test.inputs
    padded = copy.deepcopy(model)
    padded.padded = True
    filled = inputs.clone()
    filled[:, 4:] = -1
    both = ((padded, filled), (model, inputs[:, :4]))
    steps = [list(run_with_floors(network, tokens, generator(0))) for network, tokens in both]
    for (step, floors), (_, alone) in zip(*steps, strict=True):
        for floor, wanted in zip(floors, alone, strict=True):
            # other noise, drawn for 4 sequences
            assert floor is None or ((floor / wanted).log2().abs() < 1.5).all(), step.sublayer.name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_of_zero_have_the_smallest_floor(fresh_subject, dtype):
    nothing = {"norm": "none", "skip": False, "mlp": False, "mlp_skip": False, "bias": False, "values": "zero"}
    subject = fresh_subject(0, 3, 4, layers=2, width=8, **nothing)
    by_layer = metrics_by_layer(subject.network.to(dtype), subject.test.inputs, torch.Generator())
    rows = [values for where, values in by_layer if where["layer"] == 2]
    assert rows[-1]["noise_floor"].tolist() == [torch.finfo(dtype).tiny] * 3
    assert rows[-1]["below_floor"].all() and rows[-1]["relative_noise_floor"].isnan().all()


def test_the_columns_of_the_floor_are_consistent(fresh_subject):
    subject = fresh_subject(0, 6, 5, layers=2, width=8)
    given = subject.network.float(), subject.test.inputs
    once, again = (list(metrics_by_layer(*given, generator_for(0, "rounding"))) for _ in range(2))
    for (where, values), (_, same) in zip(once, again, strict=True):
        assert all(torch.equal(values[name], same[name]) for name in values if not values[name].isnan().any())
        prefix = "attention_" if where["sublayer"] == "weights" else ""
        floor, relative, below = (values[prefix + name] for name in STATE_FLOORS)
        assert torch.equal(below, values[f"{prefix}relative_residual"] <= relative)
        if not prefix:
            size = values["residual"] / values["relative_residual"]
            torch.testing.assert_close(floor / size, relative, rtol=1e-5, atol=0)
        assert not {name for name in values if name.endswith("own_rounding")}


@pytest.mark.parametrize("attention", ["contractive_l2", "cosine"])
def test_every_part_of_a_network_can_be_perturbed(fresh_subject, attention):
    more = {"contraction": 1.0, "tied_qk": True} if attention == "contractive_l2" else {"latent_width": 3}
    subject = fresh_subject(0, 3, 4, layers=2, width=8, attention=attention, norm_kind="l2norm", **more)
    for _, floors in run_with_floors(subject.network.float(), subject.test.inputs, generator(0)):
        assert all(floor.isfinite().all() and (floor > 0).all() for floor in floors if floor is not None)
