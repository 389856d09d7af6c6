"""rankbench.model.short_rows: the layer with its derivative by hand is the layer of tables."""

import pytest
import torch
from torch.func import functional_call, vmap

from rankbench.commands.compose import compose
from rankbench.model import short_rows
from rankbench.model.attention import Attention

SAME = {"rtol": 1e-11, "atol": 1e-12}  # float64, sums in another order
WORDS = {
    "plain": [],
    "no biases": ["model.bias=false"],
    "causal": ["model.mask=causal"],
    "others": ["model.mask=others", "model.temperature=0.5"],
    "wide heads": ["model.head_width=7"],
    "sigma": ["model.weight_norm=sigma"],
}


def layers_of(words, number=1):
    cfg = compose("train", "model.width=6", "model.heads=2", *words)
    layers = []
    for seed in range(number):
        torch.manual_seed(seed)
        layers.append(Attention(cfg.model).double())
    return layers


def inputs_of(*lead, generator):
    """Tokens, slopes of the output, and dropout masks with weights that are zero."""
    x, slope = (torch.randn(*lead, 3, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    masks = (torch.rand(*lead, 3, 2, 5, 5, generator=generator) < 0.7).double() / 0.7
    return x.requires_grad_(), slope, masks


@pytest.fixture
def calls(monkeypatch):
    """How often the hand-written layer ran."""
    counted = []
    forward = short_rows._ShortRows.forward
    monkeypatch.setattr(
        short_rows._ShortRows, "forward", staticmethod(lambda ctx, *words: (counted.append(1), forward(ctx, *words))[1])
    )
    return counted


@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropout"])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_one_layer_is_that_of_the_tables(words, dropped, calls):
    (layer,) = layers_of(words)
    x, slope, masks = inputs_of(generator=torch.Generator().manual_seed(3))
    results = []
    for kernel in ("table", "step"):
        y = layer(x, None, masks if dropped else None, kernel)
        results.append([y, *torch.autograd.grad(y, [x, *layer.parameters()], slope)])
    assert len(calls) == 1
    for ours, tables in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, tables, **SAME)


@pytest.mark.parametrize("dropped", [False, True], ids=["whole", "dropout"])
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_layers_side_by_side_are_each_that_of_the_tables(words, dropped, calls):
    layers = layers_of(words, 3)
    x, slope, masks = inputs_of(3, generator=torch.Generator().manual_seed(3))
    weights = {
        name: torch.stack([dict(layer.named_parameters())[name].detach() for layer in layers]).requires_grad_()
        for name, _ in layers[0].named_parameters()
    }

    def one(weights, x, masks):
        return functional_call(layers[0], weights, (x, None, masks, "side_by_side"))

    y = vmap(one, in_dims=(0, 0, 0 if dropped else None))(weights, x, masks if dropped else None)
    gradients = torch.autograd.grad(y, [x, *weights.values()], slope)
    assert len(calls) == 1
    for seed, layer in enumerate(layers):
        x_seed = x[seed].detach().requires_grad_()
        wanted = layer(x_seed, None, masks[seed] if dropped else None)
        torch.testing.assert_close(y[seed], wanted, **SAME)
        for ours, tables in zip(
            gradients, torch.autograd.grad(wanted, [x_seed, *layer.parameters()], slope[seed]), strict=True
        ):
            torch.testing.assert_close(ours[seed], tables, **SAME)


def test_the_derivative_is_that_of_finite_differences_and_has_none_of_its_own():
    (layer,) = layers_of(["model.mask=causal"])
    x, _, masks = inputs_of(generator=torch.Generator().manual_seed(3))
    assert torch.autograd.gradcheck(lambda x: layer(x, None, masks, "step"), x)
    y = layer(x, None, None, "step")
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    "words",
    [
        ["model.attention=cosine"],
        ["model=contractive_l2"],
        ["model.tied_qk=true"],
        ["model.kv_groups=1"],
        ["model.value_width=2"],
        ["model.latent_width=2"],
        ["model.mix_identity=0.5"],
        ["model.exclusive=true"],
        ["model.attention=sigmoid"],
        ["model.heads=6"],
    ],
    ids=" ".join,
)
def test_other_attentions_and_long_rows_are_left_to_the_tables(words, calls):
    (layer,) = layers_of(words)
    x, *_ = inputs_of(generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(layer(x, kernel="step"), layer(x), **SAME)
    layers_of([])[0](torch.zeros(1, 33, 6, dtype=torch.float64), kernel="step")
    assert not calls
