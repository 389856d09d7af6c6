"""Whole-network certificates on a ball, and at a cap of the singular values: against Jacobians and closed forms.

Shapes: B sequence, N token, D width.
"""

import functools
import math

import mpmath
import numpy as np
import pytest
import torch
from drawn import normal
from shipped import options_of

from rankbench.analyses import ANALYSES, Subject
from rankbench.measures import attention_layer, lipschitz_bounds
from rankbench.measures import lipschitz_of_networks as of_networks
from rankbench.measures.attention_layer import AttentionLayer
from rankbench.measures.dong_theory import ACTIVATION_LIPSCHITZ
from rankbench.measures.jacobian_ascent import jacobian_norm
from rankbench.model.initialise import maps_of_layers
from rankbench.model.linear import HeadMaps
from rankbench.training.optimizers import cap_singular_values

ROUNDING = 1 + 1e-10  # what a true bound may be missed by, by rounding alone
ON_BALL = [
    {"norm": "none"},
    {"norm": "none", "mask": "causal", "activation": "relu", "skip_scale": 0.5, "branch_scale": -2.0},
    {"norm": "pre", "norm_kind": "rmsnorm", "temperature": 0.5, "mix_attention": 0.7},
    {"norm": "post", "norm_kind": "l2norm", "mask": "others"},
    {"norm": "pre", "attention": "l2", "norm_scale": "depth"},
    {"norm": "post", "norm_scale": "depth"},
    {"norm": "peri"},
    {"norm": "ngpt"},
    {"norm": "none", "attention": "contractive_l2", "tied_qk": True, "contraction": 0.9},
]


def through(parts):
    return lambda x_ND: functools.reduce(lambda x_BND, part: part(x_BND), parts, x_ND[None])[0]


@pytest.mark.parametrize("changes", ON_BALL, ids=str)
def test_a_certificate_holds_on_its_ball(random_network, changes):
    """Tokens on the sphere and inside of it, alike and apart, where Jacobians are largest and smallest."""
    network, _ = random_network(1, seed=1, **changes)
    for radius in (0.01, 1.0, 4.0):
        bounds = of_networks.certificate(network, 4, radius)
        assert math.isfinite(bounds.network) and len(bounds.layers) == len(bounds.attentions) == 2
        for number, apart in enumerate((1.0, 1.0, 0.1)):
            x_ND = normal(number, 1, 4) + apart * normal(9 + number, 4, 4)
            x_ND = radius * x_ND / x_ND.norm(dim=-1, keepdim=True) * torch.tensor([[1.0], [1.0], [0.5], [1.0]])
            whole = through([*network.sublayers, network.finish])
            assert jacobian_norm(whole, x_ND, "2") <= bounds.network * ROUNDING
            assert jacobian_norm(through(network.layers[0]), x_ND, "2") <= bounds.layers[0] * ROUNDING
            first = network.sublayers[0]
            if first.place not in ("pre", "peri"):
                assert jacobian_norm(through([first.f]), x_ND, "2") <= bounds.attentions[0] * ROUNDING


def test_the_bound_of_a_smaller_ball_does_not_hold():
    """One head of width 1 with weights 1, a token between two far ones: attention moves by far more than sqrt N."""
    one, zero = torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    layer = AttentionLayer("dot", HeadMaps(one, one, one, one, zero, zero, zero, zero[0]))
    x_ND = torch.tensor([[3.0], [-3.0], [0.0]], dtype=torch.float64)
    measured = jacobian_norm(lambda x_ND: attention_layer.attend(layer, x_ND[None])[0], x_ND, "2")
    assert measured <= lipschitz_bounds.softmax_ball_2(layer, 3, 3.0)
    assert measured > lipschitz_bounds.softmax_ball_2(layer, 3, 0.1)


def test_lengths_are_bounded_from_part_to_part(random_network):
    for changes in ON_BALL:
        network, _ = random_network(1, seed=3, **changes)
        for sublayer in network.sublayers:
            x_BND = normal(4, 50, 4, 4)
            radius = x_BND.norm(dim=-1).max().item()
            if sublayer.norm is not None:
                longest = sublayer.norm(x_BND).norm(dim=-1).max().item()
                assert longest <= of_networks._longest_normed(sublayer.norm, radius) * ROUNDING
            _, longest = of_networks._part_on_ball(sublayer, 4, radius)
            assert sublayer.f(x_BND).norm(dim=-1).max() <= longest * ROUNDING


def test_lengths_and_bounds_with_weights_of_1_by_hand(random_network):
    network, _ = random_network(1, seed=0, norm="pre", width=1, heads=1, mlp_ratio=1, bias=False)
    for parameter in network.parameters():
        parameter.fill_(1)
    (attention, mlp), slope = network.layers[0], ACTIVATION_LIPSCHITZ[network.cfg.activation]
    assert of_networks._longest_normed(attention.norm, 3.0) == pytest.approx(1 + 1)  # the root of the width, the shift
    assert of_networks._part_on_ball(attention, 4, 3.0)[1] == pytest.approx(3)
    assert of_networks._part_on_ball(mlp, 4, 3.0)[1] == pytest.approx(3 * slope)
    assert of_networks.mlp_bound(mlp.part, "inf") == pytest.approx(slope)
    whole = of_networks.certificate(network, 4, 3.0)
    assert whole.network == pytest.approx(math.prod(whole.layers) / math.sqrt(1e-5))  # and the last norm


def test_what_has_no_bound_has_no_certificate(random_network):
    for changes in ({"attention": "sigmoid"}, {"exclusive": True}, {"mix_uniform": 0.3}, {"attention": "cosine"}):
        assert of_networks.certificate(random_network(1, seed=0, **changes)[0], 4, 1.0) is None


def test_the_table_has_the_certificate_beside_what_is_measured(random_network, sorting_task):
    model, batch = random_network(3, seed=5, norm="pre")
    subject = Subject("a run", 0, sorting_task(), batch, batch, {"trained": model})
    table = ANALYSES["lipschitz"].table(subject, options_of("lipschitz"))
    rows = table[(table.p == 2) & table.quantity.isin(["certificate", "jacobian"])]
    values = rows.pivot_table("value", ["part", "layer"], "quantity")
    assert len(values) == 5 and (values.jacobian <= values.certificate).all()
    radius = model.embed(batch.inputs).norm(dim=-1).max().item()
    wanted = of_networks.certificate(model, 4, radius).network
    assert values.loc[("network", 0)].certificate == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("changes", [{}, {"heads": 3, "head_width": 4, "value_width": 2}, {"mask": "causal"}], ids=str)
def test_the_bound_at_the_cap_is_the_largest_of_capped_networks(random_network, changes):
    keys = {"norm": "none", "attention": "l2", "tied_qk": True, "mix_attention": 0.5, "width": 6, **changes}
    network, _ = random_network(1, seed=6, **keys)
    at_cap = of_networks.capped_bound(network, 4, 0.8)

    def theorem():
        product = 1.0
        for sublayer in network.sublayers:
            attends, part = sublayer.kind == "attention", sublayer.part
            of_part = of_networks.attention_bound(part, 4, "2") if attends else of_networks.mlp_bound(part, "2")
            product *= of_networks.sublayer_bound(sublayer, "2", of_part)
        return product

    assert theorem() > at_cap  # these weights are above the cap
    parameters = dict(network.named_parameters())
    for name, rows in maps_of_layers(network).items():
        cap_singular_values(parameters[name][None], rows, 0.8)
    assert theorem() <= at_cap * ROUNDING
    # by hand: sqrt(sum (4 phi^-1(n - 1) + 1)^2) / sqrt(K) sqrt(H) c^4 of attention
    numbers = range(1, 5) if "mask" in changes else [4] * 4
    inverse = np.array([float(mpmath.lambertw((number - 1) / mpmath.e).real) for number in numbers])
    heads, width = keys.get("heads", 2), keys.get("head_width", 3)
    of_attention = np.linalg.norm(4 * inverse + 1) / math.sqrt(width) * math.sqrt(heads) * 0.8**4 * 0.5
    of_mlp = 0.8**2 * ACTIVATION_LIPSCHITZ[network.cfg.activation]
    assert at_cap == pytest.approx(((1 + of_attention) * (1 + of_mlp)) ** 2, rel=1e-12)


def test_only_a_network_below_the_cap_has_its_bound(random_network, sorting_task):
    model, batch = random_network(2, seed=6, norm="none", attention="l2", tied_qk=True)
    subject = Subject("a run", 0, sorting_task(), batch, batch, {"trained": model})

    def at_cap(cap):
        table = ANALYSES["lipschitz"].table(subject, options_of("lipschitz", cap=cap))
        largest = float(table[table.quantity == "spectral_norm"].value.max())
        return table[table.quantity == "capped"].value.tolist(), largest

    _, largest = at_cap(1.0)
    assert at_cap(0.99 * largest)[0] == []
    assert at_cap(largest)[0] == [of_networks.capped_bound(model, 4, largest)]
