"""Signs of a lost rank during a watched training, and stopping at them."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rankbench as rb
from rankbench.observing.triage import LOOKS, Triage

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
INPUTS = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(0))


def rows(rank: float, below: float = 0.0) -> list[dict]:
    """Rows of the states of two layers in two views; only the last layer, with all tokens as they are, counts."""
    table = [
        {"view": view, "layer": layer, "effective_rank": 9.0, "below_floor": 0.0}
        for view in ("unit_length", "all")
        for layer in (0, 1, 2)
    ]
    table[-1] |= {"effective_rank": rank, "below_floor": below}
    return table


def seen(*looks: list[dict]) -> tuple[dict[str, int], list[str]]:
    triage = Triage()
    return triage.since, [said for number, look in enumerate(looks) for said in triage.look(10 * number, look)]


def test_a_sign_counts_when_it_was_seen_at_some_looks_in_a_row_and_is_said_once():
    since, said = seen(rows(8.0), rows(3.9), rows(3.9), rows(3.9), rows(3.8))
    assert since == {"half": 10}
    assert said == ["the effective rank of layer 2 is below half of its first, 3.9 of 8, since step 10"]
    assert seen(rows(8.0), rows(3.9), rows(3.9), rows(4.1), rows(3.9), rows(3.9)) == ({}, [])
    assert seen(*[rows(8.0, below=1.0)] * LOOKS)[0] == {"floor": 0}
    assert seen(*[rows(8.0, below=0.9)] * LOOKS)[0] == {}  # a tenth of the sequences has its residual
    assert seen(*[rows(float("nan"))] * LOOKS)[0] == {} and seen([], [], [])[0] == {}


class Halving(nn.Module):
    """Its layers multiply all but the first direction of their states by a weight, which the training makes small."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([Shrinking(), Shrinking()])

    def forward(self, inputs_BN):
        x_BND = self.embedding(inputs_BN)
        for layer in self.layers:
            x_BND = layer(x_BND)
        return x_BND


class Shrinking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x_BND):
        mixed_BND = F.scaled_dot_product_attention(x_BND, x_BND, x_BND)  # which the observer looks for
        return torch.cat([x_BND[..., :1], self.weight * x_BND[..., 1:]], -1) + 0.0 * mixed_BND


def watched(folder, stop=()):
    """The number of steps of a training that halves the weight at each; and its watch."""
    torch.manual_seed(0)
    model, steps = Halving(), 0
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.5)
    with rb.observe(model, INPUTS, optimizer=optimizer, every=1, out=folder, measures=["states"], stop=stop) as watch:
        for _ in range(12):
            steps += 1
            optimizer.zero_grad()
            sum(0.5 * layer.weight.square() for layer in model.layers).backward()
            optimizer.step()
    return steps, watch


@pytest.mark.further
def test_a_training_ends_at_a_sign_if_it_is_asked_to(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        steps, watch = watched(tmp_path / "watched")
    assert steps == 12 and list(watch.signs) == ["half"]
    assert "below half of its first" in caplog.text
    since = watch.signs["half"]
    stopped, other = watched(tmp_path / "stopped", stop=["half"])
    assert stopped == since + LOOKS - 1 < 12 and other.signs == watch.signs
    assert other.table("states").step.max() == stopped and (tmp_path / "stopped" / "observed_states.png").exists()
    assert watched(tmp_path / "other", stop=["floor"])[0] == 12


@pytest.mark.further
def test_a_continued_watch_remembers_its_looks(tmp_path):
    watched(tmp_path / "watched")
    model = Halving()
    with torch.no_grad():
        for layer in model.layers:
            layer.weight.fill_(1e-3)
    with rb.observe(model, INPUTS, every=1, out=tmp_path / "watched", measures=["states"]) as watch:
        assert list(watch.signs) == ["half"] and watch.num_steps == 12


def test_a_model_without_states_cannot_be_stopped_at_their_signs(tmp_path):
    with pytest.raises(rb.ConfigError, match="states are not measured"):
        rb.observe(nn.Linear(3, 3), torch.randn(2, 4, 3), out=tmp_path / "watched", stop=["floor"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"stop": ["never"]}, "stop=never: unknown"),
        ({"stop": "floor"}, "give a list of texts"),
        ({"stop": ["floor"], "measures": ["weights"]}, "add states to measures"),
    ],
)
def test_what_cannot_stop_a_training_is_refused(words, message, tmp_path):
    with pytest.raises(rb.ConfigError, match=message):
        rb.observe(Halving(), INPUTS, out=tmp_path / "watched", **words)
    assert not (tmp_path / "watched").exists()
