"""rankbench.measures.token_views: metrics without sink tokens, and of tokens of length 1."""

import pytest
import torch

import rankbench
from rankbench.analyses.residual import digest
from rankbench.measures.by_layer import metrics_in_view
from rankbench.measures.states import state_metrics
from rankbench.measures.token_views import View


@pytest.fixture
def states():
    """Three sequences; the second has a sink at token 2, the third at tokens 0 and 4."""
    x_BND = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x_BND[1, 2] *= 200
    x_BND[2, [0, 4]] *= 200
    return x_BND


def without(x_ND, tokens):
    kept = [index for index in range(len(x_ND)) if index not in tokens]
    return x_ND[kept][None]


def test_without_sinks_is_the_sequence_without_these_tokens(states):
    floor_B = torch.full((3,), 1e-12, dtype=torch.float64)
    values = metrics_in_view(states, None, floor_B, View("without_sinks", 10.0))
    assert values["num_sinks"].tolist() == [0, 1, 2]
    for row, tokens in enumerate([(), (2,), (0, 4)]):
        expected = state_metrics(without(states[row], tokens), floor_B=floor_B[:1])
        for name, value_B in expected.items():
            assert values[name][row].item() == pytest.approx(value_B.item(), rel=1e-12), name


@pytest.mark.parametrize("name", ["all", "without_sinks", "unit_length"])
def test_tokens_that_do_not_count_are_as_if_they_were_not_there(states, name):
    """Absent ones, at the end of a sequence, among them: they are no sinks, and do not move the median."""
    counted_BN = torch.ones(3, 6, dtype=torch.bool)
    counted_BN[0, [0, 5]] = counted_BN[1, 3] = counted_BN[2, 4:] = False
    states[~counted_BN] = 1e6
    view, floor_B = View(name, 10.0), torch.zeros(3, dtype=torch.float64)
    values = metrics_in_view(states, counted_BN, floor_B, view)
    for row in range(3):
        alone = metrics_in_view(states[row, counted_BN[row]][None], None, floor_B[:1], view)
        for metric, value_B in alone.items():
            assert values[metric][row].item() == pytest.approx(value_B.item(), rel=1e-12, nan_ok=True), metric


def test_unit_length_does_not_see_the_tokens_lengths(states):
    floor_B = torch.zeros(3, dtype=torch.float64)
    scaled = states * torch.rand(3, 6, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).add(0.1)
    once, again = (metrics_in_view(x, None, floor_B, View("unit_length")) for x in (states, scaled))
    for name in ("relative_residual", "stable_rank", "effective_rank", "mean_cosine"):
        assert once[name].numpy() == pytest.approx(again[name].numpy(), rel=1e-10)


class Layer(torch.nn.TransformerEncoderLayer):
    """A layer of torch's own that makes the first token longer."""

    def __init__(self, factor=1.0):
        super().__init__(8, 2, 16, batch_first=True)
        self.factor = factor

    def forward(self, x):
        x = super().forward(x)
        return torch.cat([self.factor * x[:, :1], x[:, 1:]], 1)


@pytest.mark.further
def test_what_a_sink_decides_is_said():
    torch.manual_seed(0)
    x = torch.randn(4, 9, 8, dtype=torch.float64)
    table = rankbench.analyze(torch.nn.Sequential(Layer(), Layer(300)).double().eval(), x, "residual")["residual"]
    assert table.view.unique().tolist() == ["all", "without_sinks", "unit_length"]
    last = table[table.layer == 2].set_index("view")
    assert last.num_sinks["without_sinks"] == 1
    assert last.stable_rank["all"] < 1.01 and last.stable_rank["without_sinks"] > 2
    said = "given, full: stable_rank of all tokens and without sinks differ by more than a factor of 2 in layers 2"
    assert said in digest(table)
    assert (table.noise_floor > 0).all() and (table.below_floor == 0).all()
    rankbench.plot(table)
    quiet = rankbench.analyze(torch.nn.Sequential(Layer(), Layer()).double().eval(), x, "residual")["residual"]
    assert "differ" not in digest(quiet)


def test_networks_of_ours_are_measured_whole_unless_asked():
    words = ["model.layers=2", "model.width=8", "task.length=5", "task.test_size=6", "task.train_size=6"]
    plain = rankbench.analyze(words, "residual", sequences=6)["residual"]
    assert set(plain.view) == {"all"}
    views = rankbench.analyze(words, "residual", sequences=6, views=["all", "unit_length"])["residual"]
    same = views[views.view == "all"].reset_index(drop=True)
    assert same[plain.columns].equals(plain)
    assert set(views[views.view == "unit_length"].sublayer) == {"input", "attention", "mlp"}
