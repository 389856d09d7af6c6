"""rankbench.report.report: the tables of a sweep's jobs as one, checked against tables written by hand."""

import json

import pandas as pd
import pytest
from hand_written import write_run
from refusals import refusal

from rankbench.commands.compose import compose
from rankbench.commands.report import check
from rankbench.report.report import gather, gather_sweep

pytestmark = pytest.mark.usefixtures("unpainted")
ROWS = {"task": "sorting", "model": "san", "seed": [0, 1], "weights": "trained", "variant": "full", "layer": [0, 1]}
ROWS |= {"sublayer": ["input", "attention"], "relative_noise_floor": 2.0**-52}


def job(sweep, number, heads):
    residual = {"run": str(number), **ROWS, "relative_residual": [0.5 * heads, 0.25 * heads]}
    return write_run(sweep / str(number), {"model": {"heads": heads}}, residual=residual)


def test_rows_of_all_jobs_with_the_varied_key(tmp_path):
    numbers = [0, 1, 2, 10]  # 10 comes after 2, not after 1
    for number in numbers:
        job(tmp_path, number, heads=number + 1)
    lines = gather_sweep(tmp_path, ["model.heads", "seed"])
    gathered = pd.read_csv(tmp_path / "residual.csv")
    assert list(gathered.columns[:4]) == ["run", "task", "model", "seed"]
    assert list(gathered["run"]) == [number for number in numbers for _ in "01"]
    assert list(gathered["model.heads"]) == [number + 1 for number in numbers for _ in "01"]
    assert list(gathered.relative_residual[gathered["model.heads"] == 3]) == [1.5, 0.75]
    assert (tmp_path / "residual.png").exists() and (tmp_path / "residual.pdf").exists()
    assert any("residual.png" in line for line in lines)


def test_a_job_without_a_table_is_left_out(tmp_path):
    write_run(tmp_path / "0", {"model": {"heads": 1}})
    job(tmp_path, 1, heads=2)
    (tmp_path / "2").mkdir()  # failed before it had a config
    gather_sweep(tmp_path, ["model.heads"])
    assert set(pd.read_csv(tmp_path / "residual.csv")["model.heads"]) == {2}


def test_nothing_to_gather_writes_nothing(tmp_path):
    (tmp_path / "0").mkdir()
    assert gather_sweep(tmp_path, ["model.heads"]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_what_an_earlier_report_wrote_of_other_runs_is_removed(tmp_path):
    first, there = job(tmp_path / "a", 0, 1), tmp_path / "there"
    second = write_run(tmp_path / "b" / "1", {"model": {"heads": 2}}, [{"test_accuracy": 0.5}])
    gather([first], there)
    assert {"residual.csv", "residual.png", "residual.svg"} < {path.name for path in there.iterdir()}
    (there / "notes.txt").write_text("mine")
    gather([second], there)
    names = {path.name for path in there.iterdir()}
    assert not [name for name in names if name.startswith("residual")] and {"notes.txt", "summary.csv"} < names
    gather([second], there)
    assert {path.name for path in there.iterdir()} == names


def test_what_an_earlier_report_wrote_of_the_same_runs_is_kept(tmp_path):
    first, second = (job(tmp_path, number, 1 + number) for number in (0, 1))
    there = tmp_path / "there"
    gather([first], there)
    record = json.loads((there / ".report.json").read_text())
    (there / "study.png").write_text("a figure that was asked for then")
    (there / ".report.json").write_text(json.dumps(record | {"files": [*record["files"], "study.png"]}))
    gather([first, second], there)
    assert (there / "study.png").exists()
    gather([second], there)
    assert not (there / "study.png").exists()


def test_a_report_of_other_runs_does_not_go_into_the_folder_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (0, 1):
        job(tmp_path / "sweep", number, number + 1)
    (tmp_path / "sweep" / "jobs.json").write_text("[]")
    for own in ("sweep", f"{tmp_path}/sweep/", "sweep/[01]", "[sweep/1,sweep/0]"):
        check(compose("report", f"runs={own}", "out=sweep"))
    for other in ("sweep/0", job(tmp_path / "sweep2", 0, 1)):
        said = refusal(check, compose("report", f"runs={other}", "out=sweep"))
        assert said == "out=sweep: the folder of another sweep; give the report a folder of its own"


def test_jobs_are_listed_with_their_status_and_final_numbers(tmp_path):
    seeds = [{"steps": 5, "test_accuracy": seed / 2} for seed in (0, 1)]
    for number, status in enumerate(["finished", "diverged", "absent"]):
        write_run(tmp_path / str(number), {"model": {"heads": number + 1}}, seeds, status)
    (tmp_path / "2" / "summary.json").unlink()
    lines = gather_sweep(tmp_path, ["model.heads"])
    assert lines[:3] == ["3 jobs, 1 finished, 1 diverged, 1 absent", "1: diverged", "2: absent"]
    table = pd.read_csv(tmp_path / "sweep.csv")
    assert list(table["model.heads"]) == [1, 1, 2, 2, 3]
    assert list(table.job_status) == ["finished", "finished", "diverged", "diverged", "absent"]
    assert list(table.test_accuracy[:2]) == [0.0, 0.5]
