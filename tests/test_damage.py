"""Damaged run folders: one line names the file, or the report lists the run as damaged and goes on with the others."""

import io
import json
import os
import shutil
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
import yaml
from command_line import SMALLEST, refused
from interrupted import train_until_saved
from refusals import refusal
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rankbench.analysing.runner import analyze_trained
from rankbench.analysing.subjects import subjects_of_run
from rankbench.commands.compose import compose
from rankbench.config.keys import ConfigError
from rankbench.plots.figure import save
from rankbench.plots.sweep import draw_sweep
from rankbench.report.jobs import find_runs
from rankbench.report.report import gather
from rankbench.runs.machine import Machine
from rankbench.runs.records import read_json, read_yaml
from rankbench.runs.run import WEIGHTS, Run
from rankbench.runs.tables import read_table
from rankbench.training import loop
from rankbench.training.loop import train

TINY = [
    *(*SMALLEST, "trainer.steps=4", "trainer.eval_every=2", "trainer.checkpoint_every=2", "replicas=2"),
    *("analysis=[residual]", "analysis.residual.variants=[full]", "analysis.residual.sequences=2"),
]


@pytest.fixture(scope="module")
def cfg():
    return compose("train", *TINY, "trainer.dynamics_every=2")


@pytest.fixture(scope="module")
def trained(cfg, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("trained") / "run")
    train(cfg, run)
    analyze_trained(cfg, run)
    return run


@pytest.fixture(scope="module")
def stopped(cfg, tmp_path_factory):
    """A run that was interrupted at its first checkpoint, in the middle of training."""
    run = Run(tmp_path_factory.mktemp("stopped") / "run")
    train_until_saved(cfg, run, 2)
    return run


def copy_of(run, tmp_path, name="run"):
    return Run(shutil.copytree(run.folder, tmp_path / name))


def measured(path):
    """The networks of the run that has this file, as analyze reads them."""
    return subjects_of_run(Run(path.parent), Machine.prepare(compose("analyze")))


# --- the training state ----------------------------------------------------------------------------------------------


def narrowed(tensors, kind):
    return {name: x[..., :1].contiguous() if name.startswith(kind) and x.ndim > 1 else x for name, x in tensors.items()}


STATES = {  # tensors and facts that another rankbench, or a person, could have saved
    "other weights": lambda tensors, facts: (narrowed(tensors, "weights/"), facts),
    "other moments": lambda tensors, facts: (narrowed(tensors, "optimizer/"), facts),
    "fewer seeds": lambda tensors, facts: ({name: x[:1] if x.ndim else x for name, x in tensors.items()}, facts),
    "no sums": lambda tensors, facts: (tensors, {key: facts[key] for key in facts if key != "sums"}),
    "no sum of losses": lambda tensors, facts: ({name: tensors[name] for name in tensors if name[:4] != "sums"}, facts),
    "odd numbers": lambda tensors, facts: (tensors, facts | {"final": {"0": {"test_loss": "low"}}}),
    "odd seeds": lambda tensors, facts: (tensors, facts | {"final": {"first": {}}}),
    "odd status": lambda tensors, facts: (tensors, facts | {"status": ["training", "resting"]}),
    "status of one": lambda tensors, facts: (tensors, facts | {"status": ["training"]}),
    "later step": lambda tensors, facts: (tensors, facts | {"step": 10**30}),
    "word as step": lambda tensors, facts: (tensors, facts | {"step": "two"}),
    "another fact": lambda tensors, facts: (tensors, facts | {"mood": 1}),
    "a list": lambda tensors, facts: (tensors, [facts]),
}


@pytest.mark.parametrize("change", STATES)
def test_a_state_of_another_training_is_one_line(cfg, stopped, tmp_path, change):
    run = copy_of(stopped, tmp_path)
    run.save_state(*STATES[change](*run.state()))
    line = refusal(train, cfg, run)
    assert line.startswith(f"{run.folder}/training_state.safetensors: not a state of this training (")
    assert line.endswith("; remove it to train the run from the beginning")


def test_a_state_that_changed_since_it_was_written_is_one_line(stopped, tmp_path):
    """Even where everything fits: the moments of the optimizer are gone, and training would go on in other numbers."""
    path = copy_of(stopped, tmp_path).folder / "training_state.safetensors"
    with safe_open(path, "pt") as opened:
        header = opened.metadata()
    save_file({name: x for name, x in load_file(path).items() if not name.startswith("optimizer/")}, path, header)
    assert refusal(Run(path.parent).state).startswith(f"{path}: changed since it was written; ")


@pytest.mark.parametrize("facts", [None, "nonsense", "[" * 10**5, "9" * 5000], ids=lambda facts: str(facts)[:4])
def test_a_state_whose_facts_are_none_is_one_line(stopped, tmp_path, facts):
    path = copy_of(stopped, tmp_path).folder / "training_state.safetensors"
    save_file(load_file(path), path, {} if facts is None else {"facts": facts})
    line = refusal(Run(path.parent).state)
    assert line.startswith(f"{path}: not a training state (")
    assert line.endswith("; remove it to train the run from the beginning")


@pytest.mark.parametrize(
    "rows",
    ["=1+cmd(),0", "9" * 5000 + ",0", "\0,0", "1" * 200_000 + ",0", "0,0,0,0,0,0,0,0,0,0"],
    ids=lambda row: row[:9],
)
def test_odd_rows_of_an_interrupted_run_are_one_line(cfg, stopped, tmp_path, rows):
    path = copy_of(stopped, tmp_path).folder / "metrics.csv"
    path.write_text(path.read_text() + rows + "," * max(0, 7 - rows.count(",")) + "\n")
    assert refusal(train, cfg, Run(path.parent)).startswith(f"{path}: not readable as a table of steps (")


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_floating_point_numbers_are_one_line(stopped, tmp_path, dtype):
    run = copy_of(stopped, tmp_path)
    run.save_weights({name: weight.to(dtype) for name, weight in run.weights().items()})
    line = refusal(run.weights)
    assert line.startswith(f"{run.folder / WEIGHTS}: ")
    assert f" is of {dtype}, and weights are of floating point; " in line


def flipped(path):
    """Flip one bit in the last byte of a file, which is one of the last weight's mantissa."""
    content = bytearray(path.read_bytes())
    content[-4] ^= 1
    path.write_bytes(content)


DAMAGES_OF_WEIGHTS = {
    "flipped": flipped,
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.further
@pytest.mark.parametrize("damage", DAMAGES_OF_WEIGHTS)
def test_damaged_weights_of_a_finished_run_are_written_again_from_its_state(cfg, trained, tmp_path, damage):
    run = copy_of(trained, tmp_path)
    path = run.folder / WEIGHTS
    whole = path.read_bytes()
    DAMAGES_OF_WEIGHTS[damage](path)
    line = refusal(measured, path)
    what = "missing, though" if damage == "gone" else "changed since"
    assert line.startswith(f"{path}: {what} the training ended; put back the file that was there, or ")
    assert line in refused("analyze", f"run={run.folder}", "analysis=[residual]", "out=out", at=tmp_path)
    train(cfg, run)
    assert path.read_bytes() == whole
    run.drop_state()
    DAMAGES_OF_WEIGHTS[damage](path)
    said = f"{path}: missing, or changed since the training ended; put back the file "
    assert refusal(train, cfg, run).startswith(said)


def test_a_config_of_other_seeds_is_one_line(trained, tmp_path):
    path = copy_of(trained, tmp_path).folder / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"seed": 5}))
    said = f"run={path.parent}: config.yaml has the seeds [5, 6], summary.json has [0, 1]; put back the file"
    assert refusal(measured, path).startswith(said)


# --- a run that died before it began ---------------------------------------------------------------------------------


def test_a_folder_whose_run_died_before_training_may_begin_with_other_keys(cfg, tmp_path, monkeypatch):
    run, other = Run(tmp_path / "run"), compose("train", *TINY, "seed=7")
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match=r"^out of memory: "):
        patch.setattr(loop, "Training", Mock(side_effect=MemoryError))
        train(cfg, run)
    assert run.status == "failed" and not run.has_begun
    train(other, run)
    assert run.config.seed == 7 and [row["seed"] for row in run.summary()["seeds"]] == [7, 8]
    assert refusal(train, cfg, run).startswith(f"seed=0: the run in {run.folder} was begun with seed=7; ")


# --- records ---------------------------------------------------------------------------------------------------------

ROW = {"seed": 0, "status": "finished", "test_loss": 1.0}


@pytest.mark.parametrize(
    "changes",
    [
        *({"seeds": seeds} for seeds in (3, "abc", [1, 2], {"a": 1}, [{"seed": 0}], [ROW | {"seed": [0]}])),
        *({"seeds": [ROW | {"test_loss": loss}]} for loss in ("=1+1", [1], 10**400)),
        *({"status": status} for status in (None, 3, ["finished"], "fine", "a\nb")),
        *({"files": files} for files in (3, {"../secret": "0"})),
        {"format": 2},
    ],
    ids=str,
)
def test_an_odd_summary_is_one_line(tmp_path, changes):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({"status": "finished", "seeds": [ROW]} | changes))
    line = refusal(Run(tmp_path).summary)
    assert line.startswith(f"{path}: ") and next(iter(changes)) in line


def test_a_format_of_another_type_is_told_apart(tmp_path):
    (tmp_path / "summary.json").write_text(json.dumps({"format": "1"}))
    assert "format='1': this rankbench reads format=1; " in refusal(Run(tmp_path).summary)


def test_the_summary_of_other_seeds_is_one_line(cfg, trained, tmp_path):
    path = copy_of(trained, tmp_path).folder / "summary.json"
    path.write_text(json.dumps({"status": "finished", "seeds": [ROW]}))
    assert refusal(train, cfg, Run(path.parent)).startswith(f"{path}: not the summary of seeds [0, 1]; ")


DEEP = "[" * 10**5 + "]" * 10**5
LAUGHS = "".join(f"a{number}: &a{number} [{f'*a{number - 1},' * 9}]\n" for number in range(1, 12))


ODD_JSON = [DEEP, "9" * 5000, "[]", "3", "", "{", "\xff\xfe"]
ODD_YAML = ["a: " + "[" * 400, "&a\nmodel: *a\n", f"a0: &a0 1\n{LAUGHS}", "a: " + "9" * 5000]
ODD_YAML += ["[a]", "[a]: 1", "a: 2020-13-45"]
ODD_TABLES = {
    f"seed,value\n0,1\n0,{'9' * 400}\n": "value has an integer that is too large",
    **dict.fromkeys(("", "a,b\n1,2\n1,2,3\n"), "not readable as a table"),
    **dict.fromkeys(("a,b\n1,2\n3,", "a,b\n1,2\n3,45", "a,b"), "ends in the middle of a row"),
}


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        *((read_json, text, "") for text in ODD_JSON),
        *((read_yaml, text, "not ") for text in ODD_YAML),
        *((read_table, text, reason) for text, reason in ODD_TABLES.items()),
    ],
    ids=lambda value: value[:9] if isinstance(value, str) else value.__name__,
)
def test_an_odd_file_is_one_line(tmp_path, read, text, reason):
    path = tmp_path / "file"
    path.write_text(text, encoding="latin-1")
    assert refusal(read, path).startswith(f"{path}: {reason}")


def without(column):
    """A function (lines of a table) -> the lines without this column."""
    return lambda lines: pd.read_csv(io.StringIO("\n".join(lines))).drop(columns=column).to_csv(index=False).split()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: [*lines, lines[-1]], "has a row twice"),
        (lambda lines: [*lines[:-1], "=1+1" + lines[-1][1:]], "step has an entry that is no number"),
        (lambda lines: lines[:1], "has no rows"),
        *((without(column), f"has no column {column}") for column in ("loss", "split", "accuracy")),
    ],
)
def test_metrics_that_training_has_not_written_are_one_line(trained, tmp_path, change, said):
    path = copy_of(trained, tmp_path).folder / "metrics.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    assert refusal(measured, path).startswith(f"{path}: {said}; put back the file that was there, or train")


# --- a report goes on without a damaged run --------------------------------------------------------------------------


def with_odd_claims(config):
    return yaml.safe_dump(yaml.safe_load(config) | {"claims": [["a"]]})


DAMAGES = {  # what is done to a run's folder
    "config": lambda folder: (folder / "config.yaml").write_text("&a\nmodel: *a\n"),
    "claims": lambda folder: (folder / "config.yaml").write_text(with_odd_claims((folder / "config.yaml").read_text())),
    "summary": lambda folder: (folder / "summary.json").write_text('{"status": "finished", "seeds": 3}'),
    "table": lambda folder: (folder / "paths.csv").write_text(""),
    "pipe": lambda folder: os.mkfifo(folder / "paths.csv"),
}


def test_a_report_lists_damaged_runs_and_goes_on_with_the_others(trained, tmp_path, undrawn_here):
    runs = {"whole": copy_of(trained, tmp_path / "runs", "whole")}
    for name, damage in DAMAGES.items():
        damage(copy_of(trained, tmp_path / "runs", name).folder)
    (tmp_path / "runs" / "whole" / "environment.json").write_text(DEEP)  # a page is useful without it
    changed = copy_of(trained, tmp_path / "runs", "changed")
    lines = (changed.folder / "residual.csv").read_text().replace(",0.", ",abc.")
    (changed.folder / "residual.csv").write_text(lines)
    (tmp_path / "report").mkdir()
    printed = gather(find_runs(str(tmp_path / "runs")), tmp_path / "report")
    assert printed[0].startswith("7 jobs, ") and {"5 damaged", "2 finished"} <= set(printed[0].split(", "))
    for name in DAMAGES:
        (line,) = [line for line in printed if line.startswith(f"{name}: damaged (")]
        assert str(tmp_path / "runs" / name) in line and "\n" not in line
    assert "changed: changed since it was written, so tables are left out: residual.csv" in printed
    assert set(read_table(tmp_path / "report" / "residual.csv").run) == set(runs)
    final = read_table(tmp_path / "report" / "sweep.csv").set_index("run")
    assert set(final.loc["whole"].test_accuracy) == {row["test_accuracy"] for row in trained.summary()["seeds"]}
    assert final.job_status["config"] == "damaged"
    assert "damaged" in (tmp_path / "report" / "report.html").read_text()


# --- checksums -------------------------------------------------------------------------------------------------------


def test_a_run_knows_which_of_its_files_changed(trained, tmp_path):
    names = ["metrics.csv", "layers.csv", "checkpoint.safetensors", "residual.csv"]
    assert list(trained.summary()["files"]) == names and trained.changed_files() == []
    run = copy_of(trained, tmp_path)
    run.save_weights({name: weight + 1 for name, weight in run.weights().items()})
    (run.folder / "layers.csv").unlink()
    assert run.changed_files() == ["layers.csv", "checkpoint.safetensors"]


def test_a_changed_table_is_computed_again(cfg, trained, tmp_path, caplog, undrawn_here):
    caplog.set_level("INFO", "rankbench")
    path = copy_of(trained, tmp_path).folder / "residual.csv"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"0.", b"1."))
    analyze_trained(cfg, Run(path.parent))
    assert path.read_bytes() == whole and Run(path.parent).changed_files() == []
    assert "residual.csv is computed again: the file changed since it was written" in caplog.text


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_report_names_a_run_whose_folder_is_no_utf8(trained, tmp_path, undrawn_here):
    name = os.fsdecode(b"a\xffb")
    (tmp_path / "report").mkdir()
    gather([copy_of(trained, tmp_path, name).folder], tmp_path / "report")
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert "../a%FFb/" in page and "a\\udcffb" in page


@pytest.mark.parametrize("name", ["a$\\frac{$b", "a$b$c", "$"])
def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is(tmp_path, name):
    rows = pd.DataFrame({"model": [name, "san"], "task": "sorting", "seed": 0, "test_accuracy": [0.1, 0.2]})
    save(draw_sweep(rows, "model", None, None, "test_accuracy"), tmp_path / "figure", (".svg",))
    assert f"<!-- {name} -->" in (tmp_path / "figure.svg").read_text()
