"""rankbench.measures.certified_ball and jacobian_changes: against exact Jacobians, ascents and sampled points.

Shapes: B sequence, N token, M key token, D width.
"""

import functools
import math
import re

import pandas as pd
import pytest
import torch
from drawn import generator, normal
from refusals import refusal
from shipped import options_of

from rankbench.analyses import ANALYSES, Subject
from rankbench.analyses.lipschitz import BALLS
from rankbench.measures import certified_ball, jacobian_changes
from rankbench.measures.certified_ball import BallBound, CertifiedBall, check_covered, on_balls, state_of
from rankbench.measures.jacobian_ascent import ascend_on_balls, jacobian_norm
from rankbench.measures.jacobian_changes import Reach
from rankbench.measures.sources import Value, Watched

ROUNDING = 1 + 1e-10  # what a true bound may be missed by, by rounding alone
RADII = [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
NETWORKS = [
    {"norm": "pre", "mask": "causal"},
    {"norm": "post", "activation": "relu", "skip_scale": 0.5, "branch_scale": -2.0},
    {"norm": "none", "attention": "l2", "tied_qk": True},
    {"norm": "pre", "norm_kind": "rmsnorm", "temperature": 0.5, "mix_attention": 0.7, "head_width": 3},
    {"norm": "peri", "norm_kind": "l2norm", "attention": "l2", "mask": "causal"},
    {"norm": "none", "attention": "contractive_l2", "tied_qk": True, "contraction": 0.9, "mlp": False},
]


def lower_bounds(network, x_ND, radii, **options):
    return ascend_on_balls(functools.partial(state_of, network), x_ND, radii, generator(0), **options)


def holds(network, x_ND, **options):
    """The bounds on the RADII, once none is below what an ascent finds and none falls with the radius."""
    bounds = [each.bound for each in CertifiedBall(network, x_ND).bounds(RADII)]
    for bound, lower in zip(bounds, lower_bounds(network, x_ND, RADII, **options), strict=True):
        assert lower <= bound * ROUNDING
    assert bounds == sorted(bounds)
    return bounds


def norm_at(network, x_ND):
    return jacobian_norm(lambda x_ND: state_of(network, x_ND[None])[0], x_ND, "2")


NO_SKIP = {"norm": "none", "skip": False, "mlp": False}


@pytest.mark.parametrize(
    ("changes", "size"), [*((changes, 1.0) for changes in NETWORKS), (NO_SKIP, 1e-200), (NO_SKIP, 1e200)], ids=str
)
def test_without_a_radius_it_is_the_norm_of_the_jacobian(random_network, changes, size):
    """Also where squares vanish or overflow."""
    network, batch = random_network(1, seed=1, **changes)
    network.attentions[1].out.weight *= size
    x_ND = network.embed(batch.inputs)[0]
    exact = norm_at(network, x_ND)
    (small,) = CertifiedBall(network, x_ND).bounds([1e-13])
    assert small.bound == pytest.approx(exact, rel=1e-9, abs=0) and abs(math.log10(exact / size)) < 4


def test_derivatives_that_overflow_have_no_norm():
    x_ND = torch.ones(2, 3, dtype=torch.float64)
    overflown = Value(x_ND, {0: torch.full((2, 3, 6), math.inf, dtype=torch.float64)})
    assert Watched.of(overflown, 0).norms.tolist() == [math.inf]


@pytest.mark.parametrize("changes", NETWORKS[:3], ids=str)
def test_no_ascent_in_the_ball_ends_above_it(random_network, changes):
    network, batch = random_network(1, seed=2, layers=1, **changes)
    bounds = holds(network, network.embed(batch.inputs)[0], starts=2, steps=2)
    assert bounds[1] < 2 * bounds[0] < math.inf  # it says something: on the small balls it is no large number


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", NETWORKS, ids=str)
def test_no_long_ascent_in_the_ball_ends_above_it(random_network, changes, seed):
    network, batch = random_network(1, seed=10 + seed, **changes)
    holds(network, network.embed(batch.inputs)[0])


def test_an_ascent_ends_above_the_centre_and_a_wider_ball_above_a_smaller_one(random_network):
    network, batch = random_network(1, seed=3, layers=1, norm="post")
    x_ND = network.embed(batch.inputs)[0]
    centre = norm_at(network, x_ND)
    small, large = lower_bounds(network, x_ND, [0.01, 0.3], starts=2, steps=10)
    assert centre < small < 1.2 * centre < large


# --- Every operation counts -------------------------------------------------------------------------------------------


def one_layer(random_network, **changes):
    plain = {"layers": 1, "heads": 1, "norm": "none", "mlp": False, "skip": False}
    return random_network(1, seed=5, **plain | changes)[0]


def set_maps(attention, q_DK, k_DK, v_DK):
    """Weights of one head of width 4, without biases; W_O = 1."""
    attention.qkv.weight.copy_(torch.cat([q_DK.T, k_DK.T, v_DK.T]))
    attention.out.weight.copy_(torch.eye(4))
    for linear in (attention.qkv, attention.out):
        if linear.bias is not None:
            linear.bias.zero_()


FAR = torch.tensor([[1e4, 0, 0, 0]], dtype=torch.float64)  # on this axis tokens are so long that no ball moves them
OF_FAR = torch.tensor([[1e-4], [0], [0], [0]], dtype=torch.float64) * normal(6, 1, 4)  # reads this axis alone
OF_REST = torch.tensor([[0.0], [1], [1], [1]], dtype=torch.float64) * normal(7, 4, 4)  # reads the other three
SIZES = torch.tensor([[-2.0], [0.5], [1.0], [3.0]], dtype=torch.float64)  # of the four tokens


def only_scores(random_network):
    """Tokens are zero: no score has a slope there, and P moves no value."""
    network = one_layer(random_network)
    set_maps(network.attentions[0], 3 * normal(8, 4, 4), 3 * normal(9, 4, 4), normal(10, 4, 4))
    return network, torch.zeros(4, 4, dtype=torch.float64)


def only_softmax(random_network):
    """Keys and values are far, so that scores are linear in the queries. Where all weights are equal, softmax is
    steepest; so the queries are not zero."""
    network = one_layer(random_network)
    set_maps(network.attentions[0], OF_REST, OF_FAR, OF_FAR)
    return network, SIZES * FAR + torch.tensor([0, 1.0, -1.0, 1.0], dtype=torch.float64)


def only_mixing(random_network):
    """Values are zero at the centre, so that no change of P is seen, and P has a slope."""
    network = one_layer(random_network)
    set_maps(network.attentions[0], OF_REST, OF_FAR, OF_REST)
    return network, SIZES * FAR


def only_squared_keys(random_network):
    """Queries are next to zero; keys are zero at the centre; values are far, read through the queries' map."""
    network = one_layer(random_network, attention="l2")
    tiny = torch.zeros(4, 4, dtype=torch.float64)
    tiny[0, 0] = 1e-8
    set_maps(network.attentions[0], tiny, OF_REST, 1e12 * torch.eye(4, dtype=torch.float64))
    return network, SIZES * FAR


def only_activation(random_network):
    network = one_layer(random_network, mlp=True, skip=True)
    network.attentions[0].out.weight.zero_()
    return network, normal(11, 4, 4)


def only_norm(random_network):
    network = one_layer(random_network, norm="post", skip=True)
    network.attentions[0].out.weight.zero_()
    return network, normal(12, 4, 4)


ONLY = [only_scores, only_softmax, only_mixing, only_squared_keys, only_activation, only_norm]


@pytest.mark.parametrize("only", ONLY, ids=lambda only: only.__name__)
def test_without_one_operation_it_is_no_bound(random_network, only):
    network, x_ND = only(random_network)
    ball, radius, name = CertifiedBall(network, x_ND), 0.5, only.__name__.removeprefix("only_")
    (lower,) = lower_bounds(network, x_ND, [radius], starts=2, steps=15)
    (whole,) = ball.bounds([radius])
    assert lower <= whole.bound * ROUNDING
    for number, operation in enumerate(ball.operations):
        if operation.name.endswith(name):
            ball.operations[number] = operation._replace(change=lambda *_: torch.tensor(0.0))
    assert ball.bounds([radius])[0].bound < lower


# --- Each operation's bound -------------------------------------------------------------------------------------------


def largest(value, starts_BD, radius, steps=25):
    """The largest value over moves of at most this length, by ascent; value: (B, D) -> (B,)."""
    best = 0.0
    move_BD = radius * starts_BD / starts_BD.norm(dim=1, keepdim=True)
    for _ in range(steps):
        move_BD = move_BD.detach().requires_grad_()
        value_B = value(move_BD)
        best = max(best, value_B.max().item())
        (gradient_BD,) = torch.autograd.grad(value_B.sum(), move_BD)
        gradient_BD = gradient_BD / gradient_BD.norm(dim=1, keepdim=True).clamp(min=1e-300)
        move_BD = move_BD + 0.5 * radius * gradient_BD
        move_BD = move_BD * (radius / move_BD.norm(dim=1, keepdim=True)).clamp(max=1)
    return best


@pytest.mark.parametrize("radius", [0.001, 0.1, 0.5, 0.9, 3.0])
def test_a_norms_jacobian_changes_by_no_more(radius):
    c_D, floor, gain = normal(1, 5), 0.01, 5**0.5
    c_D = c_D / c_D.norm()

    def slope(c_BD):
        length_B11 = (c_BD.square().sum(1) + floor**2).sqrt()[:, None, None]
        unit_BD = c_BD / length_B11[:, 0]
        return gain * (torch.eye(5, dtype=torch.float64) - unit_BD[:, :, None] * unit_BD[:, None]) / length_B11

    found = largest(
        lambda move_BD: torch.linalg.matrix_norm(slope(c_D + move_BD) - slope(c_D[None]), 2), normal(2, 8, 5), radius
    )
    move = torch.tensor(radius, dtype=torch.float64)
    ratio = found / jacobian_changes.norm_change(c_D.norm(), floor, gain, move, move).item()
    assert ratio <= ROUNDING and (ratio > 0.95 or radius != 0.001)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_activations_slope_changes_by_no_more_and_by_as_much(activation):
    z = 2 * normal(3, 200)
    move = 2 * torch.rand(200, generator=generator(4), dtype=torch.float64)
    points = z + move * torch.linspace(-1, 1, 4001, dtype=torch.float64)[:, None]
    slope = jacobian_changes.SLOPES[activation]
    numeric = torch.func.vmap(torch.func.grad({"relu": torch.relu, "gelu": torch.nn.functional.gelu}[activation]))(z)
    torch.testing.assert_close(slope(z), numeric, rtol=1e-12, atol=1e-12)
    found = (slope(points) - slope(z)).abs().amax(0)
    bound = jacobian_changes.activation_change(activation, z, move)
    assert (found <= bound * ROUNDING).all()
    torch.testing.assert_close(found, bound, rtol=0, atol=1e-6)  # of the grid, near an extremum


@pytest.mark.parametrize("radius", [1e-4, 0.1, 0.5])
@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
def test_a_softmaxs_jacobian_changes_by_no_more(radius, size):
    """One row of six scores, linear in four inputs."""
    s_M, map_MD = size * normal(5, 6), normal(6, 6, 4)
    p_M = s_M.softmax(0)
    centred_MD = map_MD - p_M @ map_MD
    root_M1 = p_M.sqrt()[:, None]
    slopes = centred_MD.norm(dim=1)[None, None], torch.linalg.matrix_norm(root_M1 * centred_MD, 2)[None, None]
    entries, rows = (Reach(slope, radius * slope) for slope in slopes)
    factor, change = (bound.item() for bound in jacobian_changes.softmax_change(p_M[None, None], entries, rows))

    def jacobian(s_BM):
        p_BM = s_BM.softmax(-1)
        return torch.diag_embed(p_BM) - p_BM[:, :, None] * p_BM[:, None]

    def changed(move_BD):
        difference_BMM = jacobian(s_M + move_BD @ map_MD.T) - jacobian(s_M[None])
        return torch.linalg.matrix_norm(difference_BMM @ map_MD / root_M1, 2)

    ratio = largest(changed, normal(7, 8, 4), radius) / change
    assert ratio <= ROUNDING and change <= factor * rows.slope.item() * ROUNDING
    assert ratio > 0.4 or radius != 1e-4


def test_a_products_jacobian_changes_by_no_more_and_by_as_much():
    """a b^T with a = A x and b = B x: equal to the bound where both grow along the same direction."""
    a_K, b_K = normal(8, 3), normal(9, 3)
    move = 0.7
    bound = jacobian_changes.product_change(*(Reach(w.norm(), move * w.norm()) for w in (a_K, b_K)))
    change = torch.func.jacrev(lambda t: torch.outer(t * a_K, t * b_K))(torch.tensor(move, dtype=torch.float64))
    assert change.norm().item() == pytest.approx(bound.item(), rel=1e-12)


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        ({"attention": "cosine"}, 4, "layer 1 has attention cosine"),
        ({"mix_identity": 0.5}, 4, "layer 1 has attention dot with its mixes"),
        ({"exclusive": True}, 4, "layer 1 has attention dot with its mixes"),
        ({"activation": "silu"}, 4, "layer 1 has MLP with silu"),
        ({"value_residual": 0.5}, 4, "several streams"),
        ({"heads": 1, "width": 64}, 17, r"17 tokens of width 64 would take about [0-9.]+ GiB; .* at most 16 tokens"),
        ({}, 128, r"128 tokens of width 4 would take about [0-9.]+ GiB; allowed are 16 GiB"),  # its tables N x N
    ],
    ids=str,
)
def test_what_it_refuses(random_network, changes, tokens, message):
    network, _ = random_network(1, seed=1, **changes)
    assert re.search(message, refusal(check_covered, network, tokens))


def test_a_networks_shapes_are_enough_to_ask(random_network):
    network, _ = random_network(1, seed=1, weight_norm="sigma")
    check_covered(network.to("meta"), 4)


# --- The table --------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_ascents(monkeypatch):
    monkeypatch.setattr(certified_ball, "ascend_on_balls", functools.partial(ascend_on_balls, starts=2, steps=2))


@pytest.mark.further
@pytest.mark.usefixtures("short_ascents")
@pytest.mark.parametrize("padded", [False, True])
def test_the_table_has_bound_and_ascent_of_each_radius(random_network, sorting_task, padded):
    model, batch = random_network(2, seed=5, layers=1, norm="post", padded=padded)
    subject, analysis = Subject("a run", 0, sorting_task(), batch, batch, {"trained": model}), ANALYSES["lipschitz"]
    table, without = (
        analysis.table(subject, options_of("lipschitz", norms=["2"], radii=radii)) for radii in ([0.3, 0.01], [])
    )
    assert list(table.columns) == [*without.columns, *BALLS]
    pd.testing.assert_frame_equal(table[table.quantity != "certified_ball"][without.columns], without)
    rows = table[table.quantity == "certified_ball"]
    values = rows.pivot_table("value", "radius", "kind")
    assert list(values.index) == [0.01, 0.3] and (values.lower_bound <= values.bound).all()
    jacobian = table[(table.part == "network") & (table.quantity == "jacobian")].value.item()
    assert jacobian <= values.lower_bound[0.01] * ROUNDING and values.bound[0.01] < 2 * jacobian
    states = [model.embed(x[x >= 0][None])[0] for x in batch.inputs]
    wanted = max(CertifiedBall(model, x_ND).bounds([0.01])[0] for x_ND in states)
    largest = rows[(rows.radius == 0.01) & (rows.kind == "bound")].iloc[0]
    assert largest.value == pytest.approx(wanted.bound, rel=1e-3)  # the grid of radii depends on the smallest
    assert largest.operation == wanted.operation and 0 < largest.share < 1
    assert "on balls around the data" in analysis.digest(table.assign(seed=0))


@pytest.mark.usefixtures("short_ascents")
def test_the_theorem_takes_over_where_it_is_smaller(random_network):
    network, batch = random_network(1, seed=4, layers=1, norm="none", attention="l2", tied_qk=True, mlp=False)
    x_ND = network.embed(batch.inputs)[0]
    (small, _), (large, _) = on_balls(network, [x_ND], [10.0, 1e-3], 123.0, generator(0))
    assert small.bound < 123 and small.operation != "theorem"
    assert large == BallBound(10.0, 123.0, "theorem", 1.0)
