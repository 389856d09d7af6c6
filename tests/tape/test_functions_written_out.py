"""Which factor of a product is frozen does not depend on the writing: not on the order of the factors, nor on whether
activation functions and norms are torch's own or written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rankbench import analyze

D = 8
GELU = math.sqrt(2 / math.pi)
FUNCTIONS = {
    "silu": (F.silu, lambda x: x * torch.sigmoid(x)),
    "silu by a quotient": (F.silu, lambda x: x / (1 + torch.exp(-x))),
    "relu": (F.relu, lambda x: x * (x > 0)),
    "relu by where": (F.relu, lambda x: torch.where(x > 0, x, 0.0 * x)),
    "relu by a mask": (F.relu, lambda x: x.masked_fill(x < 0, 0)),
    "relu in place": (F.relu, lambda x: x.clone().mul_(x > 0)),
    "relu by its absolute value": (F.relu, lambda x: (x + x.abs()) / 2),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.1), lambda x: torch.maximum(x, 0.1 * x)),
    "gelu": (F.gelu, lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))),
    "gelu by tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + torch.tanh(GELU * (x + 0.044715 * x * x * x))),
    ),
    "square": (torch.square, lambda x: x * x),
    "mish": (F.mish, lambda x: x * torch.tanh(F.softplus(x))),
    "RMSNorm": (
        lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-6),
        lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    ),
    "LayerNorm": (
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + 1e-5),
    ),
    "unit length": (lambda x: F.normalize(x, dim=-1), lambda x: x / x.norm(dim=-1, keepdim=True)),
}
# x: what an attention call reads; y: what it makes; f: the function; g, u: linear maps
PRODUCTS = {
    "of a gate behind heads and a state": lambda x, y, f, g, u: f(g(y)) * u(x),
    "of a state behind heads and a gate": lambda x, y, f, g, u: f(g(x)) * u(y),
    "of what heads make and a state": lambda x, y, f, g, u: f(y) * x,
    "of two activations": lambda x, y, f, g, u: f(g(x)) * F.silu(u(y)),
    "of two of the kind": lambda x, y, f, g, u: f(u(y)) * f(g(x)),
}


class Products(nn.Module):
    """Two layers of attention with one head, whose branch is a product."""

    def __init__(self, product, function):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(D, D) for _ in range(8))
        self.product, self.function = product, function

    def forward(self, x):
        for q, k, g, u in (self.maps[:4], self.maps[4:]):
            y = F.scaled_dot_product_attention(q(x), k(x), x)
            x = x + self.product(x, y, self.function, g, u)
        return x


# of a gate and what it gates, each in several ways
ORDERS = {
    "two linear maps": [
        lambda x, y, f, g, u: g(y) * u(y),
        lambda x, y, f, g, u: u(y) * g(y),
        lambda x, y, f, g, u: torch.einsum("bnd,bnd->bnd", g(y), u(y)),
        lambda x, y, f, g, u: torch.addcmul(0 * y, u(y), g(y)),
        lambda x, y, f, g, u: (u(y)[..., None] * g(y)[..., None]).sum(-1),
    ],
    "a gate and what is limited": [
        lambda x, y, f, g, u: F.silu(g(y)) * u(y).clamp(-3, 3),
        lambda x, y, f, g, u: u(y).clamp(-3, 3) * F.silu(g(y)),
        lambda x, y, f, g, u: F.hardtanh(u(y), -3, 3) * (torch.sigmoid(g(y)) * g(y)),
        lambda x, y, f, g, u: F.silu(g(y)) * u(y).clamp_max(3).clamp_min(-3),
        lambda x, y, f, g, u: F.silu(g(y)) * u(y),  # no number is beyond
    ],
    "one number a token": [
        lambda x, y, f, g, u: y * g(x)[..., :1],
        lambda x, y, f, g, u: g(x)[..., :1] * y,
        lambda x, y, f, g, u: y * g(x)[..., :1].expand_as(y),
        lambda x, y, f, g, u: torch.einsum("bnd,bn->bnd", y, g(x)[..., 0]),
    ],
}
PAIRS = {f"{name}, {number}": (ways[0], way) for name, ways in ORDERS.items() for number, way in enumerate(ways[1:], 2)}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_a_product_has_the_same_sums_in_any_order(one, other):
    assert_same_sums(Products(one, None), Products(other, None))


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize(("own", "written"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_that_is_written_out_has_the_same_sums(own, written, product):
    assert_same_sums(Products(product, own), Products(product, written))


def assert_same_sums(one, other):
    modules = [one.double(), other.double()]
    modules[1].load_state_dict(modules[0].state_dict())
    x = torch.randn(3, 6, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(modules[1](x), modules[0](x))
    wanted, got = (analyze(module, x, "spectrum")["spectrum"] for module in modules)
    assert list(got.path_length.dropna()) == list(wanted.path_length.dropna())
    assert list(got["mass"]) == pytest.approx(list(wanted["mass"]), abs=1e-12)  # rounding of sums of norm about 1
