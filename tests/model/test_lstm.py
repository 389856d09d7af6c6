"""rankbench.model.lstm: against the cell's equations written out, and what it refuses."""

import math

import pytest
import torch

from rankbench.commands.compose import compose
from rankbench.model import initial_model
from rankbench.model.dropout import dropout_masks
from rankbench.seeds import streams_of
from rankbench.tasks import build_task
from rankbench.tasks.task import ABSENT


def network(*words, seed=0):
    cfg = compose("train", "task=char_lm", "model=lstm", "model.width=6", *words)
    return initial_model(cfg.model, build_task(cfg.task), seed).double()


def by_hand(model, tokens, masks=None):
    """Hochreiter & Schmidhuber's cell with forget gates, token by token; gates in torch's order: i, f, g, o."""
    states = [model.read_in.weight[token] for token in tokens]
    if masks is not None:
        states = [x * mask for x, mask in zip(states, masks["embedding"], strict=True)]
    for index, layer in enumerate(model.layers):
        h = c = torch.zeros(6, dtype=torch.float64)
        outputs = []
        for x in states:
            gates = layer.weight_ih_l0 @ x + layer.bias_ih_l0 + layer.weight_hh_l0 @ h + layer.bias_hh_l0
            i, f, g, o = gates.chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        states = outputs
        if masks is not None:
            states = [x * mask for x, mask in zip(states, masks[f"layers.{index}.output"], strict=True)]
    return torch.stack([model.read_out.weight @ x + model.read_out.bias for x in states])


@pytest.mark.parametrize("words", [["model.layers=1"], ["model.layers=3", "model.init=pytorch"]])
def test_outputs_are_those_of_the_equations(words):
    model = network(*words)
    inputs = torch.tensor([[3, 1, 4, 1, 5], [2, 7, 1, ABSENT, ABSENT]])
    outputs = model(inputs)
    assert model.lengths(inputs).tolist() == [5, 3]
    # float64, a handful of roundings in numbers of order one
    torch.testing.assert_close(outputs[0], by_hand(model, [3, 1, 4, 1, 5]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(outputs[1, :3], by_hand(model, [2, 7, 1]), rtol=1e-12, atol=1e-12)
    assert outputs.isfinite().all()


def test_dropout_multiplies_by_its_masks():
    model = network("model.layers=2", "model.dropout=0.5")
    masks = {name: mask[0] for name, mask in dropout_masks(model, 1, 4, streams_of([0])).items()}
    assert set(masks) == {"embedding", "layers.0.output", "layers.1.output"}
    assert set(torch.cat([mask.flatten() for mask in masks.values()]).tolist()) == {0.0, 2.0}
    masks = {name: mask.double() for name, mask in masks.items()}
    expected = by_hand(model, [1, 2, 3, 4], {name: mask[0] for name, mask in masks.items()})
    torch.testing.assert_close(model(torch.tensor([[1, 2, 3, 4]]), masks)[0], expected, rtol=1e-12, atol=1e-12)
    assert dropout_masks(network(), 1, 4, streams_of([0])) is None


def test_initialisation_is_as_documented():
    model = network("model.width=400", "model.layers=2")
    limit = math.sqrt(6 / 800)
    for layer in model.layers:
        for weight in (layer.weight_ih_l0, layer.weight_hh_l0):
            assert 0.99 * limit < weight.abs().max() <= limit
            # of a uniform law; 160,000 draws and more: a standard error of half a per cent at most
            assert weight.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.02)
        bias = layer.bias_ih_l0 + layer.bias_hh_l0
        assert torch.equal(bias, torch.cat([torch.zeros(400), torch.ones(400), torch.zeros(800)]).double())
    assert model.read_in.weight.std().item() == pytest.approx(400**-0.5, rel=0.05)
    plain = network("model.width=400", "model.init=pytorch")
    for name, weight in plain.named_parameters():
        if name != "read_in.weight":
            assert weight.abs().max() <= 400**-0.5 and weight.abs().max() > 0.95 * 400**-0.5
    torch.testing.assert_close(network().state_dict(), network().state_dict(), rtol=0, atol=0)
    assert not torch.equal(network().read_in.weight, network(seed=1).read_in.weight)
