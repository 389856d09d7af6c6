"""Sweeps with the launchers and the sweeper that are extras: the same numbers as one job after the other."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from campaigns.processes import differences, results
from command_line import ROOT, succeeds
from forked import until
from hydra.errors import MissingConfigException

from rankbench.commands.compose import compose
from rankbench.commands.messages import explain
from rankbench.commands.resolvers import direction_of, jobs_at_once
from rankbench.config.keys import ConfigError
from rankbench.runs import machine
from rankbench.runs.summary import objective_value

TINY = [
    *("model.layers=1", "model.width=8", "task.length=4", "task.train_size=10", "task.test_size=10"),
    "trainer.eval_every=5",
]
SHORT = [*TINY, "trainer.steps=5"]
PLUGINS = {"joblib": "joblib", "submitit_local": "submitit", "ray": "ray"}


def start(*words, at):
    # the extras may lie in a folder of their own, which PYTHONPATH names
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rankbench", "train", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        command, cwd=at, env=environment, text=True, start_new_session=True, preexec_fn=_heeds_interrupts, **pipes
    )


def _heeds_interrupts():
    """A command that a shell runs in the background ignores SIGINT, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def train(*words, at):
    process = start(*words, at=at)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def needs(extra):
    try:
        plugin = find_spec(f"hydra_plugins.hydra_{extra}_{'sweeper' if extra == 'optuna' else 'launcher'}")
    except ModuleNotFoundError:  # no plugin at all
        plugin = None
    if plugin is None:
        pytest.skip(f"needs the extra: pip install 'rankbench[{extra}]'")


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one_by_one")
    succeeds("train", "-m", *SHORT, "seed=0,1", "out=sweep", at=folder)
    return results(folder / "sweep")


@pytest.mark.parametrize("cluster", ["joblib", "submitit_local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_launcher_gives_the_same_numbers_and_continues(cluster, tmp_path, request):
    needs(PLUGINS[cluster])
    one_by_one = request.getfixturevalue("one_by_one")  # only where it is compared with
    words = ["-m", *SHORT, "seed=0,1", f"cluster={cluster}", "out=sweep"]
    code, out, err = train(*words, at=tmp_path)
    assert code == 0, err
    sweep = tmp_path / "sweep"
    assert differences(results(sweep), one_by_one) is None and "2 jobs, 2 finished" in out
    # given again with one job half done: the other is skipped, and what cannot be trained fails alone
    (sweep / "0_seed=0" / "summary.json").unlink()
    (sweep / "0_seed=0" / "metrics.csv").unlink()
    (sweep / "0_seed=0" / "training_state.safetensors").write_bytes(b"no tensors")
    before = (sweep / "1_seed=1" / "checkpoint.safetensors").stat().st_mtime_ns
    code, out, err = train(*words, at=tmp_path)
    assert (sweep / "1_seed=1" / "checkpoint.safetensors").stat().st_mtime_ns == before
    messages = [line for line in err.splitlines() if line.startswith("rankbench train: ")]
    assert code == 1 and len(messages) == 1 and "training_state.safetensors" in messages[0], err
    assert "2 jobs, 1 finished, 1 absent" in out or "2 jobs, 1 absent, 1 finished" in out  # gathered all the same


def test_a_launcher_has_nothing_to_do_for_a_single_run(tmp_path):
    needs("joblib")
    succeeds("train", *SHORT, "cluster=joblib", "figures=[]", "out=run", at=tmp_path)
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_a_search_finds_the_smallest_loss_of_its_trials(tmp_path):
    needs("optuna")
    words = ["-m", *SHORT, "search=optuna", "hydra.sweeper.n_trials=4", "optimizer.lr=tag(log,interval(1e-4,1e-1))"]
    code, out, err = train(*words, "out=sweep", at=tmp_path)
    assert code == 0, err
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/summary.json")]
    losses = [summary["seeds"][0]["test_loss"] for summary in summaries]
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert len(losses) == 4 and best["best_value"] == min(losses) and "optimizer.lr" in best["best_params"]
    rate = best["best_params"]["optimizer.lr"]
    assert f"best trial: optimizer.lr={rate:.4g}, test_loss {min(losses):.4g}\n" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["objective=null", "seed=1,2"], "objective=null: a search needs one; allowed are "),
        (["objective=loss", "seed=1,2"], "objective=loss: unknown"),
        (["seed=1"], "search=optuna: nothing to vary; "),
    ],
)
def test_a_search_that_cannot_be_writes_nothing(words, said, tmp_path):
    needs("optuna")
    code, out, err = train("-m", *SHORT, "search=optuna", *words, at=tmp_path)
    assert (code, out) == (1, "") and err.startswith(f"rankbench train: {said}") and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=lambda kind: kind.name)
def test_a_stopped_sweep_leaves_no_process_behind(kind, tmp_path):
    needs("joblib")
    words = ["-m", *TINY, "trainer.steps=10000000", "trainer.checkpoint_every=10000000", "seed=0,1", "cluster=joblib"]
    process = start(*words, "out=sweep", at=tmp_path)
    try:
        until(lambda: len(list(tmp_path.glob("sweep/*/metrics.csv"))) == 2, process)
        process.send_signal(kind)
        _, err = process.communicate(timeout=60)  # ends when nobody holds the pipe any more
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if kind == signal.SIGINT:
        assert process.returncode == 130
        # joblib's own processes have a word of their own to say
        assert "rankbench train: interrupted; the same command with out=sweep continues" in err.splitlines()
    else:
        assert process.returncode == -kind
        assert len(list(tmp_path.glob("sweep/*/training_state.safetensors"))) == 2  # the workers had time to save


def workers_of(process):
    """The processes that joblib runs the jobs of a sweep in."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children if "LokyProcess" in Path(f"/proc/{pid}/cmdline").read_text()]


@pytest.mark.parametrize("killed", ["worker", "parent"])
def test_a_killed_joblib_sweep_continues_to_the_same_numbers(killed, tmp_path):
    needs("joblib")
    words = ["-m", *TINY, "trainer.steps=400", "trainer.checkpoint_every=50", "trainer.compile=false", "seed=0,1,2"]
    succeeds("train", *words, "out=sweep", at=tmp_path)
    wanted, sweep = results(tmp_path / "sweep"), tmp_path / "parallel" / "sweep"
    words += ["cluster=joblib", "hydra.launcher.n_jobs=2", "out=sweep"]
    sweep.parent.mkdir()
    process = start(*words, at=sweep.parent)
    until(lambda: list(sweep.glob("*/training_state.safetensors")), process)
    os.kill(workers_of(process)[0] if killed == "worker" else process.pid, signal.SIGKILL)
    _, err = process.communicate(timeout=240)
    if killed == "worker":
        assert process.returncode == 1 and "Traceback" not in err
        lines = [line for line in err.splitlines() if line.startswith("rankbench ")]  # joblib has its own to say
        assert len(lines) == 1 and lines[0].startswith("rankbench train: cluster=joblib: a worker was killed, "), err
    assert len(list(sweep.glob("*/summary.json"))) >= 1 and differences(results(sweep), wanted) is not None
    code, out, err = train(*words, at=sweep.parent)
    assert code == 0 and "3 jobs, 3 finished" in out, err
    assert differences(results(sweep), wanted) is None


@pytest.mark.parametrize(
    ("kind", "extra", "words", "line"),
    [
        ("launcher/ray", "ray", ["cluster=ray"], "cluster=ray"),
        ("launcher/submitit_slurm", "submitit", ["cluster=slurm"], "cluster=slurm"),
        ("launcher/joblib", "joblib", ["hydra/launcher=joblib"], "hydra/launcher=joblib"),
        ("sweeper/optuna", "optuna", ["search=optuna"], "search=optuna"),
    ],
)
def test_what_is_not_installed_names_its_extra(kind, extra, words, line):
    error = MissingConfigException(f"In 'hydra/config': Could not find 'hydra/{kind}'", f"hydra/{kind}")
    assert explain(error, "train", words) == f"{line}: needs the extra: pip install 'rankbench[{extra}]'"
    assert explain(MissingConfigException("", "model/ray"), "train", words).startswith("model=ray: unknown")


def test_jobs_share_the_gpus_out(monkeypatch):
    chosen = []
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    for job in range(5):
        machine.share_gpus(job)
    assert chosen == [0, 1, 2, 0, 1]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    machine.share_gpus(7)
    assert len(chosen) == 5


@pytest.mark.parametrize(
    ("device", "gpus", "visible", "jobs"),
    [("auto", 3, None, 3), ("cuda", 3, "0,2", 2), ("auto", 3, "", -1), ("cpu", 3, None, -1), ("auto", 0, "0", -1)],
)
def test_joblib_runs_a_job_for_each_gpu_or_core(device, gpus, visible, jobs, monkeypatch):
    monkeypatch.setattr("rankbench.commands.resolvers.glob", lambda _: [f"/dev/nvidia{n}" for n in range(gpus)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert jobs_at_once(device) == jobs


def test_a_diverged_seed_counts_as_the_worst():
    good = {"status": "finished", "test_accuracy": 0.5, "test_loss": 1.0}
    summary = {"seconds": 3.0, "seeds": [good, {"status": "diverged"}]}
    assert objective_value(summary, "test_accuracy") == 0.25
    assert objective_value(summary, "test_loss") == objective_value(summary, "train_seconds") == math.inf
    assert objective_value({"seconds": 3.0, "seeds": [good]}, "train_seconds") == 3.0
    with pytest.raises(ConfigError, match=r"objective=test_accuracy: this task has none"):
        objective_value({"seconds": 3.0, "seeds": [{**good, "test_accuracy": None}]}, "test_accuracy")


def test_objectives():
    assert compose("train").objective is None
    assert direction_of("test_accuracy") == "maximize" and direction_of("train_seconds") == "minimize"
    with pytest.raises(ConfigError, match=re.escape("objective=loss: unknown")):
        compose("train", "objective=loss")


def test_slurm_is_composed_and_refused_where_it_is_not_installed(tmp_path, monkeypatch):
    needs("submitit")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    code, out, err = train("-m", *SHORT, "seed=0,1", "cluster=slurm", "out=sweep", at=tmp_path)
    assert (code, out) == (1, "") and err.startswith("rankbench train: cluster=slurm: no srun here; ")
    assert list(tmp_path.iterdir()) == []


def test_a_search_runs_side_by_side_too(tmp_path):
    needs("optuna")
    needs("submitit")
    words = ["-m", *SHORT, "search=optuna", "cluster=submitit_local", "hydra.sweeper.n_trials=2"]
    code, out, err = train(*words, "objective=test_accuracy", "model.heads=choice(1,2,4)", "out=sweep", at=tmp_path)
    assert code == 0, err
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "sweep").glob("*/summary.json")]
    assert len(summaries) == 2 and "2 jobs, 2 finished" in out
    assert best["best_value"] == max(summary["seeds"][0]["test_accuracy"] for summary in summaries)
