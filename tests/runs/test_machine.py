"""rankbench.runs.machine: device, number type, and a record that names what made a run."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
import torch

import rankbench.runs.machine
from rankbench.commands.compose import compose, resolve
from rankbench.commands.composition import composed
from rankbench.config.compatibility import check
from rankbench.config.keys import ConfigError
from rankbench.runs.machine import PACKAGES, Machine, git_state, physical_memory, processors
from rankbench.runs.run import Run
from rankbench.training.loop import train

TINY = ["model.layers=1", "model.width=8", "task.length=4", "task.alphabet=5", "task.train_size=40"]
TINY += ["task.test_size=50"]


def config(*overrides):
    return resolve(composed("train", *TINY, "device=cpu", *overrides))


@pytest.fixture(autouse=True)
def same_threads():
    """prepare() sets torch's threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "wanted, available, expected", [("auto", False, "cpu"), ("auto", True, "cuda"), ("cpu", True, "cpu")]
)
def test_auto_takes_cuda_where_there_is_some(monkeypatch, wanted, available, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert Machine.prepare(config(f"device={wanted}")).device.type == expected


def test_threads_are_torchs(monkeypatch):
    monkeypatch.setattr("rankbench.runs.machine.processors", lambda: 4)
    Machine.prepare(config("threads=3"))
    assert torch.get_num_threads() == 3


def test_no_more_threads_compute_than_there_are_processors(monkeypatch, tmp_path, caplog):
    """A config from a larger machine runs here, and 1,024 threads on two processors do not stall it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("rankbench.runs.machine.processors", lambda: 2)
    train(config("threads=1024", "trainer.steps=1"), run := Run(tmp_path / "run"))
    assert torch.get_num_threads() == 2
    assert json.loads((run.folder / "environment.json").read_text())["threads"] == 2
    assert "threads=1024: one for each processor computes, 2" in caplog.text


def test_the_processors_are_those_that_the_process_may_use():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no process to processors")
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert processors() == len(allowed)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="this system says it elsewhere")
def test_the_memory_is_what_the_system_says():
    total, unit = Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[:2]
    assert (physical_memory(), unit) == (int(total) * 1024, "kB")


def test_a_run_continued_with_other_threads_records_them(monkeypatch, tmp_path):
    for number in (1, 2):
        monkeypatch.setattr("rankbench.runs.machine.processors", lambda number=number: number)
        train(config("threads=2", f"trainer.steps={number}"), run := Run(tmp_path / "run"))
    [part] = json.loads((run.folder / "continued.json").read_text())
    assert (part["step"], part["threads"]) == (1, 2)


@pytest.mark.parametrize(
    "precision, stored, computed",
    [("fp32", torch.float32, torch.float32), ("bf16", torch.float32, torch.bfloat16), ("fp64",) + (torch.float64,) * 2],
)
def test_precision_is_what_is_stored_and_what_is_computed_in(precision, stored, computed):
    machine = Machine.prepare(config(f"precision={precision}"))
    assert machine.dtype == stored
    weight = torch.ones(2, 2, dtype=machine.dtype)
    with machine.autocast():
        assert (weight @ weight).dtype == computed
    assert (weight @ weight).dtype == stored


def test_analyses_have_no_bf16():
    with pytest.raises(ConfigError, match=r"^precision=bf16: .*fp32, fp64$"):
        check(compose("analyze", "precision=bf16"))


# --- trained in each precision ---------------------------------------------------------------------------------------


def losses(run):
    """Test loss at the first and at the last evaluation, mean of the seeds."""
    means = pd.read_csv(run.folder / "metrics.csv").query("split == 'test'").groupby("step").loss.mean()
    return [means.iloc[0], means.iloc[-1]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run in every precision."""
    run_of = {}
    for precision in ("fp32", "bf16", "fp64"):
        run_of[precision] = Run(tmp_path_factory.mktemp(precision))
        options = ["trainer.steps=40", "trainer.batch_size=20", "optimizer.lr=0.01", "model.dropout=0.05", "replicas=2"]
        train(config(f"precision={precision}", *options), run_of[precision])
    return run_of


@pytest.mark.further
def test_precisions_agree_as_far_as_their_digits_go(runs):
    exact = losses(runs["fp64"])
    assert exact[1] < 0.9 * exact[0]  # 40 steps take the loss from 1.48 to 0.91 nats
    assert losses(runs["fp32"]) == pytest.approx(exact, rel=1e-4)  # 6e-8 a sum, enlarged by 40 steps of Adam
    assert losses(runs["bf16"]) == pytest.approx(exact, rel=0.05)  # 4e-3 a product
    assert losses(runs["bf16"]) != pytest.approx(exact, rel=1e-5)  # or it was no bfloat16


@pytest.mark.parametrize(
    "precision, dtype", [("fp32", torch.float32), ("bf16", torch.float32), ("fp64", torch.float64)]
)
def test_weights_are_saved_in_their_own_type(runs, precision, dtype):
    weights = runs[precision].weights()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    if dtype == torch.float64:
        # digits that float32 does not have
        assert any(not torch.equal(weight, weight.float().double()) for weight in weights.values())


# --- record ----------------------------------------------------------------------------------------------------------


def test_a_run_keeps_the_record(runs):
    record = json.loads((runs["bf16"].folder / "environment.json").read_text())
    assert record["precision"] == "bf16"
    assert (record["device"], record["gpu"], record["threads"]) == ("cpu", None, 1)
    assert record["command"] == sys.argv
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert tuple(record["packages"]) == PACKAGES
    assert record["packages"]["torch"] in (torch.__version__, torch.__version__.partition("+")[0])
    for package in set(PACKAGES) - {"rankbench", "torch"}:
        assert record["packages"][package] == version(package)


def commit_of(checkout):
    """The checked-out commit, read from .git by hand."""
    head = (checkout / ".git/HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head
    loose = checkout / ".git" / head.removeprefix("ref: ")
    if loose.exists():
        return loose.read_text().strip()
    packed = (checkout / ".git/packed-refs").read_text().splitlines()
    return next(line.split()[0] for line in packed if line.endswith(head.removeprefix("ref: ")))


CHECKOUT = Path(rankbench.runs.machine.__file__).resolve().parents[2]


def is_tracked():
    index = CHECKOUT / ".git/index"
    return index.is_file() and b"rankbench/runs/machine.py" in index.read_bytes()


@pytest.mark.skipif(not is_tracked(), reason="rankbench does not run from a checkout that tracks it")
def test_the_record_names_the_commit():
    git = Machine.prepare(config()).record()["git"]
    assert git["commit"] == commit_of(CHECKOUT)
    assert isinstance(git["dirty"], bool)


@pytest.fixture
def asked_anew() -> Iterator[None]:
    """Git is asked once a process; here it is asked again, and by the tests that follow, too."""
    git_state.cache_clear()
    yield
    git_state.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize(
    "changed, dirty",
    [(None, False), ("rankbench/runs/machine.py", True), ("conf/model/new.yaml", True), ("README.md", False)],
)
def test_the_record_tells_changes_of_code_and_configs_from_others(monkeypatch, tmp_path, changed, dirty):
    def write(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    for name in ("rankbench/runs/machine.py", "conf/train.yaml", "README.md"):
        write(name, "as committed\n")
    git("init")
    git("add", ".")
    git("-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "-m", "first")
    if changed is not None:
        write(changed, "changed\n")
    monkeypatch.setattr("rankbench.runs.machine.__file__", str(tmp_path / "rankbench/runs/machine.py"))
    git_state.cache_clear()
    assert git_state() == {"commit": commit_of(tmp_path), "dirty": dirty}


@pytest.mark.usefixtures("asked_anew")
def test_outside_a_checkout_no_commit_is_claimed(monkeypatch, tmp_path):
    machine = Machine.prepare(config())

    def of_somebody_else(command, **_):
        """As in a virtual environment inside another repository, which git knows, but not our file in it."""
        return subprocess.CompletedProcess(command, int(command[3] == "ls-files"), "abc123\n", "")

    for git in (of_somebody_else, Mock(side_effect=FileNotFoundError("git"))):
        monkeypatch.setattr(subprocess, "run", git)
        git_state.cache_clear()
        assert machine.record()["git"] is None
