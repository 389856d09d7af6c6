"""Weights with their spectral norm as a parameter: values, gradients, and the model around them."""

import pytest
import torch
from drawn import initialised, normal
from torch import nn

from rankbench.model.linear import free_weight, linear


def build(**changes):
    return initialised(3, **{"width": 8, "num_outputs": 3, **changes})


def largest_singular_values(weight, num_maps):
    return [torch.linalg.svdvals(part)[0].item() for part in weight.chunk(num_maps)]


@pytest.mark.parametrize("num_maps", [1, 3])
def test_the_spectral_norm_of_each_map_is_its_gamma(model_config, num_maps):
    module = linear(model_config(weight_norm="sigma"), 5, 4 * num_maps, num_maps).double()
    gamma = module.parametrizations.weight[0].gamma
    with torch.no_grad():
        gamma.copy_(torch.arange(1.0, num_maps + 1))
    # a singular value of order 1 by two decompositions: some tens of roundings
    assert largest_singular_values(module.weight, num_maps) == pytest.approx(gamma.tolist(), rel=1e-13)


def test_its_gradient_is_that_of_finite_differences(model_config):
    module = linear(model_config(weight_norm="sigma", bias=False), 4, 6, 2).double()
    x = normal(0, 3, 4)
    parameters = dict(module.named_parameters())

    def run(*values):
        return torch.func.functional_call(module, dict(zip(parameters, values, strict=True)), (x,)).sin()

    assert torch.autograd.gradcheck(run, tuple(parameters.values()))  # its own tolerances: 1e-6 steps


def test_a_model_draws_the_same_weights_and_begins_with_every_norm_at_the_gain():
    plain, model = build(), build(weight_norm="sigma", init_gain=1.5)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            num_maps = 3 if name.endswith("qkv") else 1
            assert largest_singular_values(module.weight, num_maps) == pytest.approx([1.5] * num_maps, rel=1e-13)
    plain_weights = [free_weight(module) for module in plain.modules() if isinstance(module, nn.Linear)]
    drawn = [free_weight(module) for module in model.modules() if isinstance(module, nn.Linear)]
    for weight, plain_weight in zip(drawn[:-1], plain_weights[:-1], strict=True):
        torch.testing.assert_close(weight, 1.5 * plain_weight)


@pytest.mark.parametrize("heads", [1, 2])
def test_orthogonal_values(heads):
    model = build(values="orthogonal", bias=False, heads=heads)
    for block in model.blocks:
        w = block.attention.maps_as_applied()
        whole = torch.cat(list(w.w_v_HDK), dim=1), torch.cat(list(w.w_o_HKD), dim=0)
        for matrix in whole:
            torch.testing.assert_close(matrix @ matrix.T, torch.eye(8, dtype=matrix.dtype), rtol=0, atol=1e-13)


@pytest.mark.parametrize("init", ["pytorch", "bert"])
def test_uniform_values_are_drawn_as_torch_draws_them_whatever_the_rest(init):
    attention = build(values="uniform", init=init, width=64).requires_grad_(False).blocks[0].attention
    w, limit = attention.maps_as_applied(), 64**-0.5
    for matrix in (w.w_v_HDK, w.w_o_HKD):
        # the largest of 4,096 draws is within 1 % of the limit in all but e^-40 of cases
        assert 0.99 * limit < matrix.abs().max() <= limit
    # within five standard errors of the deviation of 4,096 draws
    wanted = 0.02 if init == "bert" else limit / 3**0.5
    for matrix in (w.w_q_HDK, w.w_k_HDK):
        assert matrix.std() == pytest.approx(wanted, rel=5 / (2 * 4096) ** 0.5)


def test_zero_values_make_an_attention_that_adds_nothing_but_its_output_bias():
    model = build(values="zero", init="bert")  # biases begin at 0
    x = normal(0, 2, 5, 8)
    assert (model.blocks[0].attention(x) == 0).all()
    drawn = build(values="zero").blocks[0].attention
    torch.testing.assert_close(drawn(x), drawn.out.bias.expand_as(x), rtol=0, atol=0)
