"""Kinds of tokens that are left out of measurements: rankbench.model.kinds, the key uncounted, views without a kind."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from by_hand import relative_residual

import rankbench
from rankbench.analysing.subjects import fresh_subjects
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.model.kinds import Kinds
from rankbench.model.network import run
from rankbench.runs.machine import Machine
from rankbench.tasks import TASKS, Sorting

pytestmark = pytest.mark.usefixtures("unpainted", "rounded_once")
REGRESSION = ["task=linear_regression", "task.dimension=3", "task.points=4", "task.test_size=5", "model.layers=2"]
REGRESSION += ["task.start_dimension=3", "task.start_points=4", "model.width=8", "model.heads=2", "model.mask=causal"]


def mean_relative_residual(states_BND):
    return pytest.approx(np.mean([relative_residual(x_ND) for x_ND in states_BND.numpy()]), rel=1e-10)


@pytest.fixture(scope="module")
def steps():
    """Each sub-layer's step of the untrained network, which sees the xs at even positions and the ys at odd ones."""
    cfg = compose("analyze", *REGRESSION)
    (subject,) = fresh_subjects(cfg, Machine.prepare(cfg))
    with torch.no_grad():
        return list(run(subject.network, subject.test.inputs))


@pytest.mark.further
def test_unscored_tokens_of_our_tasks_are_left_out(steps):
    tables = {
        left_out: rankbench.analyze([*REGRESSION, f"uncounted={left_out}"], "residual", "attention", "spectrum")
        for left_out in ("null", "[unscored]", "[unscored,first]")
    }
    for left_out, kept, label in (
        ("null", slice(None), None),
        ("[unscored]", slice(0, None, 2), "in+unscored"),
        ("[unscored,first]", slice(2, None, 2), "in+unscored+first"),
    ):
        table = tables[left_out]["residual"].query("variant == 'full'")
        assert set(table.get("special_tokens", [])) == ({label} if label else set())
        states = table[table.sublayer != "weights"].relative_residual.tolist()
        wanted = [steps[0].input_BND, *(step.output_BND for step in steps)]
        for value, state_BND in zip(states, wanted, strict=True):
            assert value == mean_relative_residual(state_BND[:, kept])
        of_heads = tables[left_out]["attention"].query("layer == 1").first_weight.tolist()
        rows_BHNM = steps[0].weights_BHNM[:, :, kept]
        assert of_heads == pytest.approx(rows_BHNM[..., 0].mean((0, 2)).tolist(), rel=1e-10)
    assert tables["[unscored]"]["spectrum"].mass.tolist() != tables["null"]["spectrum"].mass.tolist()


def test_views_name_kinds_of_tokens(steps):
    words = [
        *REGRESSION,
        "analysis.residual.views=[all,without_first,without_unscored]",
        "analysis.residual.variants=[full]",
    ]
    table = rankbench.analyze(words, "residual")["residual"]
    last = table[(table.layer == 2) & (table.sublayer == "mlp")].set_index("view").relative_residual
    for view, kept in (
        ("all", slice(None)),
        ("without_first", slice(1, None)),
        ("without_unscored", slice(0, None, 2)),
    ):
        assert last[view] == mean_relative_residual(steps[-1].output_BND[:, kept])


class Registered(Sorting):
    """A task whose sequences begin with a class token and a register."""

    token_kinds: ClassVar[dict] = {"class": (0,), "registers": (1,)}


def test_a_task_can_name_its_class_tokens_and_registers(monkeypatch):
    monkeypatch.setitem(TASKS, "sorting", Registered)
    words = ["task.length=6", "task.test_size=3", "model.layers=1", "analysis.residual.variants=[full]"]
    cfg = compose("analyze", *words, "uncounted=[class,registers]")
    (subject,) = fresh_subjects(cfg, Machine.prepare(cfg))
    with torch.no_grad():
        *_, last = run(subject.network, subject.test.inputs)
    table = rankbench.analyze([*words, "uncounted=[class,registers]"], "residual")["residual"]
    states = table[table.sublayer != "weights"]
    assert states.relative_residual.iloc[-1] == mean_relative_residual(last.output_BND[:, 2:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["uncounted=[unscored]"], "uncounted=unscored: no token of this kind is known here; known are first"),
        (["uncounted=[registers]"], "uncounted=registers: no token of this kind is known here"),
        (["analysis.residual.views=[without_class]"], "analysis.residual.views=class: no token of this kind"),
        (["uncounted=[beginning]"], "uncounted=beginning: unknown.*class, registers, first, separators, unscored"),
    ],
)
def test_a_kind_that_is_not_there_is_refused_before_a_folder_is_made(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        rankbench.analyze(words, "residual", out=str(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_a_sequence_keeps_a_token():
    kinds, ids_BN = (
        Kinds(ids={"separators": [3]}, left_out=("first", "separators")),
        torch.tensor([[1, 2, 3], [3, 3, 4]]),
    )
    assert kinds.counted(None, ids_BN, 3, None).tolist() == [[False, True, False], [False, False, True]]
    present_BN = torch.tensor([[True, True, True], [True, True, False]])
    with pytest.raises(ConfigError, match="first, separators: a sequence has no other tokens"):
        kinds.counted(present_BN, ids_BN, 3, None)
    assert Kinds().counted(present_BN, ids_BN, 3, None) is present_BN
