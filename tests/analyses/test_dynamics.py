"""Rank, entropy and constants over training steps: what training writes, resumed or not, and its analysis."""

import dataclasses
import functools
import math
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import scipy.special
import torch
from by_hand import CONTRACTIVE, TIED, bound_by_hand, maps_by_hand
from interrupted import during_step
from refusals import refusal

from rankbench.analyses import ANALYSES
from rankbench.analysing.runner import options_of
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.compose import compose
from rankbench.measures.attention_matrices import ATTENTION_FLOORS, ATTENTION_METRICS, attention_metrics
from rankbench.measures.by_layer import metrics_by_layer
from rankbench.measures.lipschitz_of_networks import HEAD_METRICS, LIPSCHITZ_METRICS, constants_by_layer
from rankbench.measures.states import STATE_FLOORS, STATE_METRICS
from rankbench.model import initial_model
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.runs.tables import read_table
from rankbench.seeds import generator_for
from rankbench.tasks import build_task
from rankbench.training.loop import train

TINY = ["model.layers=2", "model.width=8", "task.length=4", "task.train_size=20", "task.test_size=6", "replicas=2"]
TINY += ["precision=fp64", "trainer.steps=7", "trainer.eval_every=7", "trainer.dynamics_every=3"]
TINY += ["trainer.dynamics_sequences=4", "trainer.checkpoint_every=2", "analysis=[dynamics]"]
TINY += ["model.attention=l2", "model.tied_qk=true"]  # whose constants are finite


def config(*words):
    return compose("train", *TINY, *words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("dynamics") / "run")
    train(config(), run)
    return run


def test_layers_are_looked_at_in_the_beginning_now_and_then_and_at_the_end(trained):
    table = pd.read_csv(trained.folder / "layers.csv")
    assert sorted(table.step.unique()) == [0, 3, 6, 7]
    assert list(table.columns[:5]) == ["step", "seed", "layer", "sublayer", "head"]
    wanted = {*STATE_METRICS, *ATTENTION_METRICS, *HEAD_METRICS, *LIPSCHITZ_METRICS, *STATE_FLOORS, *ATTENTION_FLOORS}
    assert {*wanted, "num_undefined"} == set(table.columns[5:])
    is_state = table.sublayer != "weights"
    assert table.noise_floor.notna().equals(is_state) and table.attention_noise_floor.notna().equals(~is_state)
    num_rows = 1 + 2 * (2 + 2)  # the embedding; of each layer two heads, attention and MLP
    assert (table.groupby(["step", "seed"]).size() == num_rows).all()


@pytest.mark.parametrize("step", [0, 7])
def test_its_numbers_are_those_of_the_network_at_that_step(trained, step):
    cfg, table = config(), pd.read_csv(trained.folder / "layers.csv")
    task = build_task(cfg.task)
    for index, subject in enumerate(subjects_of_run(trained, Machine.prepare(cfg))):
        model = initial_model(cfg.model, task, index).double() if step == 0 else subject.network
        written = table[(table.step == step) & (table.seed == index)].reset_index(drop=True)
        generator = generator_for(index, "rounding", step)
        constants = constants_by_layer(model, 4)
        for row, (where, values) in enumerate(metrics_by_layer(model, subject.test.inputs[:4], generator)):
            assert written.layer[row] == where["layer"] and written.sublayer[row] == where["sublayer"]
            for name, value in constants.get(tuple(where.values()), {}).items():
                assert written[name][row] == pytest.approx(value, rel=1e-12) and np.isfinite(value)
            for name, value_B in values.items():
                if name in written:  # the same operations on the same float64 numbers
                    wanted = value_B.double().mean().item()
                    assert written[name][row] == pytest.approx(wanted, rel=1e-12, abs=1e-15, nan_ok=True)


@pytest.mark.parametrize("changes", [{}, {"attention": "l2"}, TIED, {**CONTRACTIVE, "contraction": 0.8}], ids=str)
def test_the_constants_are_those_of_the_weights(random_network, changes):
    """Against whole matrices by numpy and the formula of Theorem 3.2 with loops over heads; float64, some tens of
    operations."""
    network, _ = random_network(1, 0, **changes)
    constants, norm = constants_by_layer(network, 4), functools.partial(np.linalg.norm, ord=2)
    for layer, attention in enumerate(network.attentions, 1):
        root, maps = math.sqrt(attention.head_width), (x.numpy() for x in attention.maps_as_applied()[:4])
        for head, (w_q, w_k, w_v, w_o) in enumerate(zip(*maps, strict=True), 1):
            of_scores = (2 if attention.is_l2 else 1) / root  # -||q - k||^2 has the product of q and k twice
            wanted = {"qk_norm": of_scores * norm(w_q @ w_k.T), "vo_norm": norm(w_v @ w_o)}
            assert constants[layer, "weights", head] == pytest.approx(wanted, rel=1e-12)
        bounds = constants[layer, "attention", None]
        if changes.get("attention") == "contractive_l2":
            assert bounds["lipschitz_inf"] == pytest.approx(0.8, rel=1e-12)
        elif not attention.tied_qk:
            assert bounds == {"lipschitz_inf": math.inf, "lipschitz_2": math.inf}
        else:
            by_head = [maps_by_hand(attention, head) for head in range(attention.heads)]
            of_values = math.hypot(*(norm(w_q) ** 2 * norm(w_v) for w_q, _, w_v, *_ in by_head))
            phi = scipy.special.lambertw(3 / np.e).real
            two = math.sqrt(4) * (4 * phi + 1) / root * norm(attention.out.weight.numpy()) * of_values
            wanted = {"lipschitz_inf": bound_by_hand(attention, network.cfg, 4), "lipschitz_2": two}
            assert bounds == pytest.approx(wanted, rel=1e-12)


def test_a_stopped_run_writes_what_an_unstopped_one_writes(trained, tmp_path, monkeypatch):
    run = Run(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        during_step(patch, 5, Mock(side_effect=KeyboardInterrupt))
        train(config(), run)
    train(config(), run)
    tables = [pd.read_csv(each.folder / "layers.csv") for each in (run, trained)]
    pd.testing.assert_frame_equal(*tables, rtol=1e-9)


def test_without_it_nothing_is_written(tmp_path):
    train(config("trainer.dynamics_every=null", "analysis=[]"), Run(tmp_path / "run"))
    assert not (tmp_path / "run" / "layers.csv").exists()


def test_the_table_holds_the_metrics_that_were_asked_for(trained):
    cfg = config("analysis.dynamics.metrics=[stable_rank,attention_entropy]")
    options = options_of(cfg)["dynamics"]
    (first, second) = subjects_of_run(trained, Machine.prepare(cfg))
    table = ANALYSES["dynamics"].table(second, options)
    chosen = ["step", "layer", "sublayer", "head", "stable_rank", "attention_entropy"]
    assert list(table) == [*chosen, *STATE_FLOORS, *ATTENTION_FLOORS]
    written = read_table(trained.folder / "layers.csv")
    assert list(table.stable_rank.dropna()) == list(written[written.seed == 1].stable_rank.dropna())
    both = pd.concat(ANALYSES["dynamics"].table(each, options).assign(**each.who) for each in (first, second))
    digest = ANALYSES["dynamics"].digest(both)
    assert "from step 0 to 7 (mean of 2 seeds)" in digest and "stable_rank" in digest
    figure = ANALYSES["dynamics"].figure(both, None, None)
    panels = [axes for axes in figure.axes if axes.get_xlabel()]
    assert [axes.get_ylabel() for axes in panels] == ["stable rank", "attention entropy"]
    assert [len(axes.get_lines()) for axes in panels] == [3, 2]  # the embedding has no P
    (embedding, *_) = panels[0].get_lines()
    means = written[written.layer == 0].groupby("step").stable_rank.mean()
    assert list(embedding.get_xdata()) == [0, 3, 6, 7] and embedding.get_ydata() == pytest.approx(means.to_numpy())


@pytest.mark.parametrize("facet", [None, "model.heads"])
def test_of_many_layers_some_are_drawn(facet):
    rows = [
        {"seed": seed, "step": step, "layer": layer, "sublayer": "mlp", "head": None, "stable_rank": 1.0 + layer}
        for seed in (0, 1)
        for step in (0, 5)
        for layer in range(1, 25)
    ]
    table = pd.DataFrame(rows)
    if facet:
        table = pd.concat([table.assign(**{facet: heads}) for heads in (1, 2)])
    figure = ANALYSES["dynamics"].figure(table, None, facet)
    for axes in figure.axes:
        names = [line.get_label() for line in axes.get_lines()]
        assert len(names) == 6 and names[0] == "layer 1" and names[-1] == "layer 24"
    if facet:  # rows have one scale, and numbers where the label of x is
        assert figure.axes[0].get_shared_y_axes().joined(*figure.axes)
        assert [axes.get_xlabel() for axes in figure.axes] == ["", "training step"]
    weights = table.assign(sublayer="weights", stable_rank=np.nan, qk_norm=10.0 ** table["layer"])
    states = pd.concat([table, table.assign(layer=0, sublayer="input"), weights])
    layers = ["embedding", *(f"layer {layer}" for layer in (1, 6, 10, 15, 19, 24))]
    for number, axes in enumerate(ANALYSES["dynamics"].figure(states, None, facet).axes):  # the same ones in each panel
        assert axes.get_legend_handles_labels()[1] == layers[number % 2 :]


@pytest.mark.parametrize(
    ("bounds", "text", "limits"),
    [([np.inf, np.inf], ["none"], None), ([1.0, 1.0 + 1e-15], [], (0.5, 2.0)), ([1.0, 30.0], [], None)],
)
def test_a_bound_that_is_none_or_stays_is_drawn_so(bounds, text, limits):
    rows = [
        {"seed": seed, "step": step, "layer": 1, "sublayer": "attention", "head": None, "lipschitz_inf": value}
        for seed in (0, 1)
        for step, value in enumerate(bounds)
    ]
    (axes,) = ANALYSES["dynamics"].figure(pd.DataFrame(rows), None, None).axes
    assert [label.get_text() for label in axes.texts] == text
    assert axes.get_yscale() == ("linear" if text else "log")
    if limits:
        assert axes.get_ylim() == pytest.approx(limits)


def test_networks_of_one_layer_are_lines_of_one_row():
    """No panel is empty where one of them has no bound, and norms that grow a hundredfold have a logarithmic axis."""
    place = {"layer": 1, "sublayer": "attention", "head": None}
    rows = [
        {"seed": 0, "step": step, **place, "model": model, "vo_norm": 200.0**step, "lipschitz_inf": bound}
        for step in (0, 1)
        for model, bound in (("causal", np.inf), ("causal_l2", 3.0))
    ]
    norm, bound = ANALYSES["dynamics"].figure(pd.DataFrame(rows), None, "model").axes
    assert norm.get_legend_handles_labels()[1] == ["model=causal", "model=causal_l2"]
    assert bound.get_legend_handles_labels()[1] == ["model=causal_l2"] and not bound.texts
    assert norm.get_yscale() == "log"


def test_metrics_of_a_residual_that_rounding_explains_are_marked():
    """Layer 2 is below its floor from step 5 on: its residual is drawn at the floor, its rank where it is."""
    rows = [
        {"seed": seed, "step": step, "layer": layer, "sublayer": "mlp", "head": None}
        | {"relative_residual": 1e-3 if clear else 1e-12, "relative_noise_floor": 1e-9, "below_floor": float(not clear)}
        | {"effective_rank_centred": 3.0 + step, "stable_rank": 1.5}
        for seed in (0, 1)
        for step in (0, 5, 10)
        for layer in (1, 2)
        for clear in [layer == 1 or step == 0]
    ]
    panels = ANALYSES["dynamics"].figure(pd.DataFrame(rows), None, None).axes
    assert [axes.get_ylabel() for axes in panels] == ["relative residual", "effective rank centred", "stable rank"]
    lines_of_panel = [{line.get_label(): line for line in axes.get_lines()} for axes in panels]
    marks = [[x for x in axes.get_lines() if x.get_marker() == "v" and len(x.get_xdata())] for axes in panels]
    assert [len(triangles) for triangles in marks] == [1, 1, 0]
    assert list(marks[0][0].get_xdata()) == [5, 10] and list(marks[0][0].get_ydata()) == pytest.approx([1e-9, 1e-9])
    assert [axes.get_yscale() for axes in panels] == ["log", "linear", "linear"]
    assert list(marks[1][0].get_ydata()) == [8, 13]
    for lines in lines_of_panel[:2]:  # no line goes on through what is not measured
        assert np.isnan(lines["layer 2"].get_ydata()).tolist() == [False, True, True]
        assert np.isfinite(lines["layer 1"].get_ydata()).all()
    assert np.isfinite(lines_of_panel[2]["layer 2"].get_ydata()).all()


def test_what_the_run_has_not_recorded_is_refused(trained):
    (subject, _) = subjects_of_run(trained, Machine.prepare(config()))
    options = options_of(config("analysis.dynamics.metrics=[qk_norm]"))["dynamics"]
    for history, message in (
        (subject.history.drop(columns="qk_norm"), "layers.csv has no qk_norm; train it again, or name others"),
        (None, "has no layers.csv; train it with trainer.dynamics_every=<steps>"),
    ):
        assert message in refusal(ANALYSES["dynamics"].table, dataclasses.replace(subject, history=history), options)


def test_an_eigenvalue_solver_that_gives_up_leaves_nan_for_that_matrix_alone(monkeypatch):
    p_BHNM = torch.rand(2, 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    wanted, solve = attention_metrics(p_BHNM)["attention_gap_eigenvalue"], torch.linalg.eigvals

    def gives_up(x):
        if any(torch.equal(matrix, p_BHNM[1, 0]) for matrix in x.flatten(0, -3)):
            raise torch.linalg.LinAlgError("no convergence")
        return solve(x)

    monkeypatch.setattr(torch.linalg, "eigvals", gives_up)
    gap_BH = attention_metrics(p_BHNM)["attention_gap_eigenvalue"]
    assert gap_BH[1, 0].isnan() and gap_BH.isnan().sum() == 1
    rest = ~gap_BH.isnan()
    torch.testing.assert_close(gap_BH[rest], wanted[rest])
