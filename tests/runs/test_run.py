"""rankbench.runs.run: what is stored comes back, what is broken is named in one line, nothing stored is executed."""

import contextlib
import dataclasses
import json
import math
import os
import pickle
import re
import shutil
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import Bomb, refusal
from safetensors.torch import save_file

from rankbench.commands.compose import compose, resolve
from rankbench.commands.composition import composed
from rankbench.config.keys import ConfigError
from rankbench.runs.run import Run, config_text, find_run
from rankbench.runs.tables import write_table


def config(*overrides):
    return resolve(composed("train", *overrides))


@pytest.fixture(scope="module")
def cfg():
    return config()


@pytest.fixture
def run(tmp_path, cfg):
    """A run that has begun and has weights."""
    begun = Run(tmp_path / "run")
    begun.begin(cfg, {"python": "3"})
    begun.save_weights({"read_out.bias": torch.arange(6.0).view(2, 3)})
    return begun


@contextlib.contextmanager
def stored_config(run):
    """The plain data of a run's config.yaml, which are written back with what is changed in them."""
    path = run.folder / "config.yaml"
    plain = yaml.safe_load(path.read_text())
    yield plain
    path.write_text(yaml.safe_dump(plain))


# --- config ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model=san_mlp", "optimizer=sgd", "optimizer.milestones=[3,7]", "trainer.clip=0.5", "task.train_size=null"],
        ["analysis=[]", "+analysis.residual.chunk=3", "claims=[one,two]", "published='figure 2 a'", "budget=smoke"],
    ],
)
def test_a_config_comes_back_as_it_was(tmp_path, overrides):
    cfg = config(*overrides)
    run = Run(tmp_path)
    run.begin(cfg, {})
    assert run.config == cfg
    assert (tmp_path / "config.yaml").read_text() == config_text(cfg)


# every way of writing what OmegaConf would resolve, behind any number of backslashes; a null byte is refused
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8) | st.lists(
    st.sampled_from(["\\", "$", "{", "}", "${", "${oc.env:HOME}", "${seed}", "'", '"', " ", ":", "a", "???"]),
    max_size=6,
).map("".join)


@settings(max_examples=20, deadline=None)
@given(out=texts, value=texts, key=texts)
def test_any_text_in_a_stored_config_comes_back_as_it_was(tmp_path_factory, cfg, out, value, key):
    cfg = dataclasses.replace(cfg, out=out, claims=[value], task={**cfg.task, "note": {key: [value]}})
    run = Run(tmp_path_factory.getbasetemp() / "any text")
    run.folder.mkdir(exist_ok=True)
    (run.folder / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(cfg)), encoding="utf-8")
    assert run.config == cfg


@pytest.mark.parametrize("backslashes", range(4))
def test_a_stored_config_is_never_resolved(run, monkeypatch, backslashes):
    monkeypatch.setenv("HOME", "what nobody may read")
    secret = "\\" * backslashes + "${oc.env:HOME}"
    with stored_config(run) as plain:
        plain["out"] = plain["task"]["note"] = plain["model"]["name"] = secret
    cfg = run.config
    assert (cfg.out, cfg.task["note"], cfg.model.name) == (secret, secret, secret)


def test_a_stored_target_is_never_called(run, tmp_path):
    call = {"_target_": "pathlib.Path.touch", "_args_": [str(tmp_path / "called")]}
    with stored_config(run) as plain:
        plain["task"]["sneaky"] = call
    assert run.config.task["sneaky"] == call
    assert not (tmp_path / "called").exists()


def test_a_python_object_in_yaml_is_refused(run, tmp_path):
    target = tmp_path / "called"
    (run.folder / "config.yaml").write_text(f"!!python/object/apply:pathlib.Path.touch [!!python/name:Path '{target}']")
    assert f"{run.folder / 'config.yaml'}: not readable as YAML" in refusal(lambda: run.config)
    assert not target.exists()


@pytest.mark.parametrize(
    "content", [b"model: [1, 2", b"just a text", b"- a\n- list\n", b"", b"null", b"\xff\xfe\x00", b"seed: \x00"]
)
def test_a_broken_config_is_named(run, cfg, content):
    path = run.folder / "config.yaml"
    path.write_bytes(content)
    for read in (lambda: run.config, lambda: run.begin(cfg, {})):
        assert str(path) in refusal(read)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "keys, value, message",
    [
        (["seed"], "many", "many"),
        (["seed"], "${oc.env:HOME}", "oc.env:HOME"),
        (["model"], 5, "5"),
        (["model", "layers"], [1], "ListConfig|list|layers"),
        (["model", "heads"], 7, "model.width=48: not divisible by model.heads=7"),
        (["model", "colour"], "red", "colour"),
        (["optimizer", "lr"], float("nan"), "optimizer.lr=nan: out of range"),
        (["trainer", "epochs"], 3, "give exactly one of the two"),
    ],
)
def test_a_wrong_value_in_a_stored_config_is_named(run, keys, value, message):
    with stored_config(run) as inner:
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
    assert re.search(f"{run.folder / 'config.yaml'}.*{message}", refusal(lambda: run.config))


def test_a_run_without_its_config_takes_no_other(run, cfg):
    run.check_same(cfg)
    (run.folder / "config.yaml").unlink()
    assert refusal(run.check_same, cfg).endswith(
        "config.yaml: missing, though the run has begun; put it back, or give another folder"
    )


def test_the_folder_of_an_analysis_is_no_run(run):
    (run.folder / "config.yaml").write_text(config_text(resolve(composed("analyze", "run=there"))))
    assert refusal(lambda: run.config) == f"run={run.folder}: an analysis, of run=there; give the folder of a training"


def test_a_missing_key_in_a_stored_config_is_named(run):
    with stored_config(run) as plain:
        del plain["optimizer"]
    line = refusal(lambda: run.config)
    assert str(run.folder / "config.yaml") in line and "it has no optimizer" in line


# --- weights and state -----------------------------------------------------------------------------------------------


def test_weights_and_state_come_back_bit_for_bit(run):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(2, 3, generator=generator).T,  # not contiguous
        "b": torch.randn(2, generator=generator, dtype=torch.float64),
        "c": torch.tensor([float("nan"), float("inf")]),
        "d": torch.tensor(3.0),
    }
    facts = {"step": 3, "seconds": 0.1 + 0.2, "final": {0: {"test_loss": float("inf")}}}
    assert run.state() is None
    run.save_weights(tensors)
    run.save_state(tensors, facts)
    for back in (run.weights(), run.state()[0]):
        assert back.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(back[name], tensor, rtol=0, atol=0, equal_nan=True)
    assert run.state()[1] == json.loads(json.dumps(facts))
    run.drop_state()
    run.drop_state()  # twice does no harm
    assert run.state() is None


@pytest.mark.parametrize("name, read", [("checkpoint", Run.weights), ("training_state", Run.state)])
@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "one byte short"])
def test_broken_tensors_are_named(run, name, read, damage):
    run.save_state({"a": torch.zeros(100)}, {"step": 1})
    path = run.folder / f"{name}.safetensors"
    whole = path.read_bytes()
    broken = {"empty": b"", "half": whole[: len(whole) // 2], "garbage": os.urandom(200), "one byte short": whole[:-1]}
    path.write_bytes(broken[damage])
    assert str(path) in refusal(read, run)


@pytest.mark.parametrize("name, read", [("checkpoint", Run.weights), ("training_state", Run.state)])
@pytest.mark.parametrize("write", [lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), torch.save])
def test_a_pickle_is_refused_and_not_executed(run, tmp_path, name, read, write):
    path, target = run.folder / f"{name}.safetensors", tmp_path / "exploded"
    write(Bomb(target), path)
    assert str(path) in refusal(read, run)
    assert not target.exists()


def test_missing_weights_are_named(tmp_path):
    line = refusal(Run(tmp_path).weights)
    assert str(tmp_path / "checkpoint.safetensors") in line and "has not reached its first checkpoint" in line


# --- summary and folder ----------------------------------------------------------------------------------------------


def test_status_of_a_folder_without_a_run_is_absent(tmp_path):
    assert Run(tmp_path / "nowhere").status == "absent"
    assert Run(tmp_path / "nowhere").summary() == {}


def test_the_environment_is_that_of_the_beginning(run, cfg):
    run.begin(cfg, {"python": "4"})
    assert json.loads((run.folder / "environment.json").read_text()) == {"python": "3"}


def continuations(run):
    path = run.folder / "continued.json"
    return [(part["step"], part["python"]) for part in json.loads(path.read_text())] if path.exists() else []


def test_what_continues_a_run_is_recorded_where_it_differs(run):
    for python, step, changed, recorded in (
        ("3", 5, [], []),
        ("4", 5, ["python"], [(5, "4")]),
        ("4", 9, [], [(5, "4")]),
        ("3", 9, ["python"], [(5, "4"), (9, "3")]),
        ("4", 7, [], [(5, "4")]),  # what went on behind step 9 has left nothing
        ("3", 5, [], []),
    ):
        assert run.record_continuation({"python": python, "started": "now", "command": [str(step)]}, step) == changed
        assert continuations(run) == recorded


def test_two_uncommitted_changes_of_one_commit_are_told_apart(run):
    git = {"commit": "abc", "dirty": True}
    (run.folder / "environment.json").write_text(json.dumps({"git": git}))  # as older versions wrote it
    assert run.record_continuation({"git": git, "source": "one"}, 5) == []
    (run.folder / "environment.json").write_text(json.dumps({"git": git, "source": "one"}))
    assert run.record_continuation({"git": git, "source": "one"}, 5) == []
    assert run.record_continuation({"git": git, "source": "other"}, 5) == ["source"]


@pytest.mark.parametrize("name", ["metrics", "layers"])
@pytest.mark.parametrize("header, lost", [("step,split,loss", "seed"), ("seed,split,loss", "step"), ("0,0,1", "seed")])
def test_a_table_of_training_without_its_steps_or_seeds_is_refused(run, name, header, lost):
    path = run.folder / f"{name}.csv"
    path.write_text(f"{header}\n1,2,3\n")
    assert f"{path}: has no column {lost}; put back the file" in refusal(run.table, name)


@pytest.mark.parametrize("entry", ["=1+cmd()", "{}", "true", "'"])
def test_a_word_among_the_numbers_of_a_training_is_refused(run, entry):
    path = run.folder / "metrics.csv"
    path.write_text(f"step,seed,split,loss\n0,3,train,1.5\n0,3,test,{entry}\n")
    assert f"{path}: loss has an entry that is no number; put back the file" in refusal(run.table, "metrics")
    path.write_text("step,seed,split,loss\n0,3,train,1.5\n0,3,test,\n")
    assert run.table("metrics").loss.isna().tolist() == [False, True]


@pytest.mark.parametrize("content", ["{", "{}", "[1]", '[{"git": {}}]', '[{"step": "5"}]'])
def test_a_broken_record_of_continuations_is_named(run, content):
    path = run.folder / "continued.json"
    path.write_text(content)
    line = refusal(run.record_continuation, {"python": "4"}, 5)
    assert str(path) in line and "put back the file" in line
    assert path.read_text() == content


def test_what_a_kill_left_half_written_is_swept_up(run, cfg):
    left = [run.folder / name for name in (".checkpoint.safetensors.x7.part", ".tmpAb12Cd")]
    for path in left:
        path.write_bytes(b"half")
    (run.folder / "notes.part").write_text("somebody's own")
    run.begin(cfg, {})
    assert not any(path.exists() for path in left)
    assert (run.folder / "notes.part").exists()


def test_the_name_of_a_run_is_its_folders(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert Run(Path(".")).name == "mine"


# --- find_run --------------------------------------------------------------------------------------------------------


def make_run(folder, seconds, weights=True):
    """A folder that looks like a run whose checkpoint was written at that time."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\n")
    if weights:
        path = folder / "checkpoint.safetensors"
        save_file({"a": torch.zeros(1)}, path)
        os.utime(path, (seconds, seconds))


def test_latest_is_the_run_with_the_newest_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "outputs/train/zebra", 100)
    make_run(tmp_path / "outputs/train/ape", 200)
    assert find_run("latest").folder == Path("outputs/train/ape")
    make_run(tmp_path / "outputs/train/monday/3_model.heads=2", 300)
    assert find_run("latest").folder == Path("outputs/train/monday/3_model.heads=2")
    # nor does a time that only a wrong clock can have written, unless there is no other; a file server may be ahead
    make_run(tmp_path / "outputs/train/sometime", time.time() + 1e6)
    assert find_run("latest").folder == Path("outputs/train/monday/3_model.heads=2")
    make_run(tmp_path / "outputs/train/tuesday", time.time() + 60)
    assert find_run("latest").folder == Path("outputs/train/tuesday")
    shutil.rmtree(tmp_path / "outputs/train/tuesday")
    # neither a run without weights nor what an analysis left counts
    make_run(tmp_path / "outputs/train/young", 400, weights=False)
    make_run(tmp_path / "outputs/analyze/later", 500)
    assert find_run("latest").folder == Path("outputs/train/monday/3_model.heads=2")


def test_latest_without_a_run_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "outputs/train/young", 400, weights=False)
    line = refusal(find_run, "latest")
    assert all(part in line for part in ("run=latest", str(tmp_path / "outputs"), "rankbench train"))


def test_a_folder_is_held_by_one_process_at_a_time(tmp_path):
    run, again = Run(tmp_path / "run"), Run(tmp_path / "run")
    with run.locked(), pytest.raises(ConfigError, match="another process is writing there"), again.locked():
        pass
    with again.locked():  # the lock goes with its holder
        pass


def test_a_run_of_before_a_key_was_there_has_what_was_there_before(tmp_path):
    cfg = compose("train", "model.layers=3")
    run = Run(tmp_path / "run")
    run.begin(cfg, {})
    with stored_config(run) as plain:
        for section, key in (("model", "temperature"), ("trainer", "writers"), ("optimizer", "decay")):
            del plain[section][key]
        del plain["objective"]
    assert run.config == cfg
    run.check_same(cfg)
    (run.folder / "metrics.csv").write_text("step,seed\n0,0\n")  # training has begun
    with pytest.raises(ConfigError, match=r"model.temperature=2.0: the run in .* was begun with model.temperature=1.0"):
        run.check_same(compose("train", "model.layers=3", "model.temperature=2.0"))


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["always", "above"])
def test_a_run_of_when_contraction_had_two_ways_is_read_if_it_has_the_one_that_is_left(tmp_path, when):
    cfg = config("model=contractive_l2")
    run = Run(tmp_path / "run")
    run.begin(cfg, {})
    with stored_config(run) as plain:
        plain["model"]["contraction_when"] = when
    if when == "always":
        assert run.config == cfg
    else:
        assert f"{run.folder / 'config.yaml'}: model.contraction_when" in refusal(lambda: run.config)


def test_a_table_comes_back_and_knows_its_name(run):
    written = pd.DataFrame({"run": "run", "seed": [0, 1], "accuracy": [0.5, 1 / 3]})
    write_table(written, run.folder / "paths.csv")
    table = run.table("paths")
    pd.testing.assert_frame_equal(table, written)
    assert table.attrs == table[table.seed == 1].attrs and table.attrs["analysis"] == "paths"


@pytest.mark.parametrize(("name", "meant"), [("path", ", did you mean paths?"), ("zzz", "")])
def test_a_table_that_is_not_there_is_one_line(run, name, meant):
    for existing in ("paths", "residual"):
        (run.folder / f"{existing}.csv").write_text("a\n1\n")
    said = f"no such table{meant}; there are paths, residual; rankbench.analyze("
    assert f"{run.folder}/{name}.csv: {said}" in refusal(run.table, name)


@pytest.mark.parametrize(
    ("name", "next_step"), [("metrics", "put back the file"), ("layers", "trainer.dynamics_every=")]
)
def test_a_lost_table_of_a_training_is_not_to_be_had_by_an_analysis(run, name, next_step):
    assert f"{name}.csv: no such table; there are none; {next_step}" in refusal(run.table, name)
    (run.folder / f"{name}.csv").write_text("")
    line = refusal(run.table, name)
    assert line.endswith("; put back the file that was there, or make it again")


def test_metrics_say_whose_they_are(run):
    (run.folder / "metrics.csv").write_text("step,seed,split,loss\n0,0,test,2.5\n0,1,test,nan\n")
    metrics = run.metrics
    assert list(metrics) == ["run", "task", "model", "seed", "step", "split", "loss"]
    assert list(metrics.iloc[0]) == ["run", "sorting", "transformer", 0, 0, "test", 2.5]
    assert list(metrics.seed) == [0, 1] and math.isnan(metrics.loss[1])
