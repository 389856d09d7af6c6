"""rankbench.commands.checks and start: a wrong config is refused before its folder is made."""

import dataclasses
import io
import os
import sys

import pytest
import yaml
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf
from refusals import refusal

from rankbench.commands.checks import check_everything, check_job, check_kind, check_single
from rankbench.commands.compose import resolve
from rankbench.commands.composition import composed
from rankbench.commands.failures import refusing
from rankbench.commands.start import JobCallbacks
from rankbench.config.keys import ConfigError
from rankbench.config.schema import SCHEMAS
from rankbench.runs.run import Run


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == []  # nothing here writes


@pytest.fixture
def run(tmp_path):
    begun = Run(tmp_path / "run")
    begun.begin(resolve(composed("train", "model.layers=2")), {})
    return begun


def test_a_run_with_a_broken_config_is_refused(run):
    cfg = resolve(composed("analyze", "run=run"))
    (run.folder / "config.yaml").write_text("model: {layers: many}\n")
    assert "run/config.yaml: not a run's config" in refusal(check_everything, cfg)


def test_an_analysis_is_checked_with_the_task_of_the_run(tmp_path):
    circle = Run(tmp_path / "run")
    circle.begin(resolve(composed("train", "task=circle_arcs", "trainer.dynamics_every=5")), {})
    (circle.folder / "checkpoint.safetensors").write_bytes(b"")
    check_everything(resolve(composed("analyze", "run=run", "analysis=[rollout,dynamics,curves]")))
    line = refusal(check_everything, resolve(composed("analyze", "run=run", "analysis=[samples]")))
    assert line.startswith("analysis=samples: needs a task with text; task.name=circle_arcs has none")


def test_a_pipe_in_the_place_of_hydras_record_is_refused(run):
    """Hydra would open it for writing, and wait for a reader."""
    (run.folder / ".hydra").mkdir()
    os.mkfifo(run.folder / ".hydra" / "overrides.yaml")
    with pytest.raises(ConfigError, match=r"^run/\.hydra/overrides\.yaml: not a regular file; "):
        check_everything(resolve(composed("train", "model.layers=2", "out=run")))


def test_a_run_without_weights_is_refused(run):
    assert "run/checkpoint.safetensors: missing" in refusal(check_everything, resolve(composed("analyze", "run=run")))


def test_a_file_is_no_run(run):
    with pytest.raises(ConfigError, match=r"^run=run/config\.yaml: a file; "):
        check_everything(resolve(composed("analyze", "run=run/config.yaml")))


@pytest.mark.parametrize(
    ("there", "command", "kind"),
    [
        ("train", "analyze", "a training run"),
        ("analyze", "train", "an analysis"),
        ("observe", "train", "a watched training"),
        ("observe", "analyze", "a watched training"),
    ],
)
def test_no_run_writes_over_one_of_another_kind(tmp_path, there, command, kind):
    (tmp_path / "run").mkdir()
    plain = {"observe": {"every": 1}} if there == "observe" else dataclasses.asdict(resolve(composed(there)))
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(plain))
    cfg = resolve(composed(command, "out=run"))
    assert refusal(check_single, cfg) == f"out=run: the folder of {kind}; give another folder"
    assert refusal(check_kind, cfg, tmp_path / "run").endswith(f"run: the folder of {kind}; give another folder")
    if there in SCHEMAS:
        check_single(resolve(composed(there, "out=run")))


@pytest.mark.parametrize("command", ["train", "analyze"])
def test_no_single_run_goes_into_the_folder_of_a_sweep(tmp_path, command):
    cfg = resolve(composed(command, "out=run"))
    check_single(cfg)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "jobs.json").write_text("[]")
    assert refusal(check_single, cfg).startswith("out=run: the folder of a sweep; ")


@pytest.mark.parametrize("command", ["train", "analyze"])
def test_the_defaults_pass(command, capsys):
    check_everything(resolve(composed(command)))
    check_job(resolve(composed(command)))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("word", ["model.layers=3", "++model.layers=3", "task=sorting", "seed=1", "replicas=2"])
def test_what_a_run_brings_cannot_be_changed(run, word):
    (run.folder / "checkpoint.safetensors").write_bytes(b"")
    words = ["run=run", word]
    line = refusal(check_job, resolve(composed("analyze", *words), words), words)
    assert line.startswith(f"{word}: the run in run=run has its own ")


NOT_OF_THE_RUN = ("precision=fp32", "threads=2", "analysis=[paths]", "analysis.paths.repeats=2")


@pytest.mark.parametrize("words", [*(["run=run", word] for word in NOT_OF_THE_RUN), ["model.layers=3", "seed=1"]])
def test_the_rest_can_be_changed_and_without_a_run_everything(run, words):
    (run.folder / "checkpoint.safetensors").write_bytes(b"")
    check_job(resolve(composed("analyze", *words), words), words)


def test_what_hydra_holds_of_a_sweeps_jobs_has_no_configs():
    returned = JobReturn(cfg=OmegaConf.create({"a": 1}), hydra_cfg=OmegaConf.create({"b": 1}))
    JobCallbacks().on_job_end(job_return=returned, config=returned.cfg)
    assert returned.cfg is None and returned.hydra_cfg is None


def test_a_reader_of_our_output_that_has_exited_is_no_refusal(monkeypatch):
    """As in `rankbench explain model.norm | head -1`, which ends without a line."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", errors)
    with pytest.raises(SystemExit) as stop, refusing(""):
        raise BrokenPipeError(32, "Broken pipe")
    assert (stop.value.code, errors.getvalue()) == (141, "")
