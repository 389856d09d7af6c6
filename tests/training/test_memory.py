"""rankbench.training.memory: sizes beyond the machine are one line before anything is allocated, and where the
allocation itself fails."""

import dataclasses

import pytest
import torch

from rankbench.commands.checks import check_everything
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.runs.machine import Machine
from rankbench.runs.run import Run
from rankbench.tasks import build_task
from rankbench.training.forward import STATES_AT_A_TIME
from rankbench.training.loop import train
from rankbench.training.memory import estimate
from rankbench.training.seeds_side_by_side import Training

TINY = ["model.layers=2", "model.width=8", "replicas=3", "task.train_size=20", "task.test_size=30", "trainer.steps=2"]


@pytest.mark.parametrize(
    "words",
    [
        ["task.length=4"],
        ["task.length=4", "precision=fp64", "optimizer=sgd", "optimizer.momentum=0.9"],
        ["task=convex_hull", "task.points=5"],
        ["task=nearest_neighbor", "task.points=4"],
    ],
    ids=lambda words: words[0],
)
def test_the_estimate_is_what_a_training_holds(words):
    cfg = compose("train", *words[:1], *TINY, *words[1:])
    machine, task = Machine.prepare(cfg), build_task(cfg.task)
    training = Training(cfg, task, machine, [0, 1, 2])
    training.update()
    parts = estimate(cfg, task, machine)
    tensors = [parameter for parameter in training.parameters.values()]
    tensors += [parameter.grad for parameter in tensors]
    moments = [value for state in training.optimizer.state.values() for value in state.values() if value is not None]
    tensors += [value for value in moments if value.ndim]
    held = sum(tensor.nbytes for tensor in tensors)
    # at least: the momentum of SGD does not count
    assert held / 2 < parts["weights"] <= held
    data = [training.data.train, training.data.test]
    assert parts["data"] == sum(x.nbytes for batch in data for x in (batch.inputs, batch.targets))


def test_states_are_those_of_the_seeds_that_one_pass_takes(monkeypatch):
    cfg = compose("train", *TINY, "task.length=4", "trainer.batch_size=6", "trainer.accumulate=2")
    machine, task = Machine.prepare(cfg), build_task(cfg.task)
    of_a_seed = 3 * 4 * cfg.model.width * cfg.model.layers
    for at_a_time, taken in ((1, 1), (2, 2), (9, cfg.replicas)):
        monkeypatch.setitem(STATES_AT_A_TIME, "cpu", at_a_time * of_a_seed)
        assert estimate(cfg, task, machine)["states"] == taken * of_a_seed * machine.dtype.itemsize


def test_only_the_seeds_of_one_pass_keep_their_graph(monkeypatch):
    """Bytes that autograd keeps for the gradient, at their most within one step; weights belong to no graph."""
    words = [*TINY, "task.length=4", "trainer.batch_size=6", "trainer.compile=false"]

    def most(seeds: int, at_a_time: int) -> int:
        cfg = compose("train", *words, f"replicas={seeds}")
        of_a_seed = 6 * 4 * cfg.model.width * cfg.model.layers
        monkeypatch.setitem(STATES_AT_A_TIME, "cpu", at_a_time * of_a_seed)
        training = Training(cfg, build_task(cfg.task), Machine.prepare(cfg), list(range(seeds)))
        weights = {parameter.untyped_storage().data_ptr() for parameter in training.parameters.values()}
        kept = [0, 0]  # now, and at most

        class Saved:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.tensor = tensor
                self.bytes = 0 if tensor.untyped_storage().data_ptr() in weights else tensor.nbytes
                kept[0] += self.bytes
                kept[1] = max(kept)

            def __del__(self) -> None:
                kept[0] -= self.bytes

        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            training.update()
        return kept[1]

    alone = most(1, at_a_time=1)
    assert most(3, at_a_time=1) == pytest.approx(alone, rel=0.1)
    assert most(3, at_a_time=3) > 2.5 * alone


@pytest.mark.parametrize("command", ["train", "analyze"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["task=convex_hull", "task.points=2147483648"], "data"),
        (["task.test_size=100000000000"], "data"),
        (["task=char_lm", "model.mask=causal", "task.train_size=1000000000"], "data"),
        (["model.width=65536", "model.heads=1", "model.layers=64"], "weights"),
        (["task.alphabet=10000000000"], "weights"),
    ],
)
def test_sizes_beyond_the_memory_are_one_line(command, words, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = compose(command, *words)
    with pytest.raises(ConfigError, match=f"^beyond_memory=false: needs at least .* GiB, most of it for {what}, and "):
        check_everything(cfg)
    check_everything(dataclasses.replace(cfg, beyond_memory=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("points", [1 << 62, (1 << 63) - 1], ids=["bytes overflow", "the largest integer"])
def test_sizes_beyond_what_is_counted_are_one_line(points, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^task=nearest_neighbor: {points} tokens .* give smaller sizes$"):
        check_everything(compose("analyze", "task=nearest_neighbor", f"task.points={points}", "analysis=[residual]"))


def refused_by_torch():
    torch.empty(1 << 60)


def refused_by_python():
    raise MemoryError


@pytest.mark.parametrize("method", ["__init__", "update"])
@pytest.mark.parametrize("allocate", [refused_by_torch, refused_by_python])
def test_a_failed_allocation_is_one_line_and_the_run_has_failed(method, allocate, tmp_path, monkeypatch):
    monkeypatch.setattr(Training, method, lambda *_: allocate())
    run = Run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^out of memory: cpu has .* GiB \(.*\); give smaller sizes") as error:
        train(compose("train", *TINY), run)
    assert "\n" not in str(error.value) and run.status == "failed"


def test_another_error_of_torch_stays_what_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(Training, "update", lambda _: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        train(compose("train", *TINY), Run(tmp_path / "run"))
