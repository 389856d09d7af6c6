"""rankbench.analyses.signal_map: a cell of the map against the network's own states and the theory's own curve."""

import math
from itertools import islice

import numpy as np
import pytest

from rankbench.analyses import ANALYSES, signal_map
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.compose import compose
from rankbench.commands.resolvers import geometric
from rankbench.config.keys import typed
from rankbench.measures.signal_propagation import cosines
from rankbench.model import initial_model
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.training.loop import train

OPTIONS = typed(signal_map.Options, {"first_cosine": 0.0, "sequences": 3}, "analysis.signal_map")
WORDS = ["experiment=depth_temperature_map", "budget=smoke", "model.layers=2"]


def subjects(folder, *words):
    cfg = compose("train", *WORDS, *words)
    train(cfg, run := Run(folder / "run"))
    return subjects_of_run(run, Machine.prepare(compose("analyze")))


@pytest.mark.further
def test_a_cell_is_that_of_its_network(tmp_path, states_by_layer):
    measured = subjects(tmp_path)
    for subject in measured[1:3]:
        (row,) = signal_map.table(subject, OPTIONS).itertuples()
        beta = (0.1, 10.0)[subject.seed % 2] / (0.693 * math.sqrt(math.log(8)))
        assert (row.layers, row.draw) == (2, subject.seed // 2) and row.beta == pytest.approx(beta)
        assert row.critical_beta == pytest.approx(math.sqrt(2))
        assert row.theory_cosine == next(islice(cosines("post", False, beta, 8, 0.0), 2, None))
        fresh = initial_model(subject.network.cfg, subject.task, subject.seed)
        x_BND = states_by_layer(fresh, subject.test.inputs[:3])[-1].detach().double()
        unit_BND = x_BND / x_BND.norm(dim=-1, keepdim=True)
        between = (unit_BND @ unit_BND.mT)[:, *np.triu_indices(8, 1)]
        assert row.initial_cosine == pytest.approx(between.mean().item(), abs=1e-5)  # float32
        right = subject.network(subject.test.inputs).argmax(-1) == subject.test.targets
        assert row.test_accuracy == pytest.approx(right.double().mean().item())


@pytest.mark.parametrize("word", ["model.attention=cosine", "model.mlp_gain=1", "model.norm=none", "model.heads=2"])
def test_other_networks_are_measured_without_theory(tmp_path, word):
    subject = subjects(tmp_path, word, "replicas=1")[0]
    row = signal_map.table(subject, OPTIONS).iloc[0]
    assert math.isnan(row.theory_cosine) and math.isnan(row.critical_beta) and -1 <= row.initial_cosine <= 1


def test_the_figure_has_a_cell_for_each_depth_and_temperature(tmp_path):
    rows = signal_map.table(subjects(tmp_path, "replicas=1")[0], OPTIONS)
    maps = [axes.collections[0].get_array() for axes in ANALYSES["signal_map"].figure(rows, None, None).axes[:3]]
    expected = [rows.theory_cosine[0], rows.initial_cosine[0], rows.test_accuracy[0]]
    assert [values.shape for values in maps] == [(1, 1)] * 3 and [values.item() for values in maps] == expected


def test_numbers_in_a_geometric_row():
    assert geometric(0.1, 10, 3) == [0.1, 1.0, 10.0] and geometric(2, 5, 1) == [2.0]
    assert np.allclose(np.diff(np.log(geometric(0.1, 10, 20))), math.log(100) / 19, rtol=1e-4)  # six digits
