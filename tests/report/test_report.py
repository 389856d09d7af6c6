"""rankbench.report.report: the tables of a sweep's jobs as one, checked against tables written by hand."""

import json

import pandas as pd
import pytest
import yaml

from rankbench.report.report import gather_sweep

pytestmark = pytest.mark.usefixtures("unpainted")
ROWS = {"task": "sorting", "model": "san", "seed": [0, 1], "weights": "trained", "variant": "full", "layer": [0, 1]}
CONFIG = {"task": {"name": "sorting"}, "seed": 0}
ROWS |= {"sublayer": ["input", "attention"], "relative_noise_floor": 2.0**-52, "relative_residual": [0.5, 0.25]}


def job(sweep, number, heads, table=True):
    folder = sweep / str(number)
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"model": {"name": "san", "heads": heads}}))
    if table:
        frame = pd.DataFrame({"run": str(number), **ROWS})
        frame["relative_residual"] *= heads
        frame.to_csv(folder / "residual.csv", index=False)


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
    job(tmp_path, 0, heads=1, table=False)
    job(tmp_path, 1, heads=2)
    (tmp_path / "2").mkdir()  # failed before it had a config
    gather_sweep(tmp_path, ["model.heads"])
    assert set(pd.read_csv(tmp_path / "residual.csv")["model.heads"]) == {2}


def test_nothing_to_gather_writes_nothing(tmp_path):
    (tmp_path / "0").mkdir()
    assert gather_sweep(tmp_path, ["model.heads"]) == []
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_jobs_are_listed_with_their_status_and_final_numbers(tmp_path):
    for number, status in enumerate(["finished", "diverged", None]):
        job(tmp_path, number, heads=number + 1, table=False)
        if status:
            seeds = [{"seed": seed, "status": status, "steps": 5, "test_accuracy": seed / 2} for seed in (0, 1)]
            (tmp_path / str(number) / "summary.json").write_text(json.dumps({"status": status, "seeds": seeds}))
    lines = gather_sweep(tmp_path, ["model.heads"])
    assert lines[:3] == ["3 jobs, 1 finished, 1 diverged, 1 absent", "1: diverged", "2: absent"]
    table = pd.read_csv(tmp_path / "sweep.csv")
    assert list(table["model.heads"]) == [1, 1, 2, 2, 3]
    assert list(table.job_status) == ["finished", "finished", "diverged", "diverged", "absent"]
    assert list(table.test_accuracy[:2]) == [0.0, 0.5]
