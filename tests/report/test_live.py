"""The page of one run, opened in a browser; and the page of a sweep that is running."""

import fcntl
import json
import webbrowser
from datetime import datetime, timedelta

import pandas as pd
import pytest
from command_line import succeeds
from hand_written import write_run

from rankbench.plots.training import draw_metrics
from rankbench.report import live
from rankbench.report.jobs import find_runs
from rankbench.report.live import status_line, watched
from rankbench.report.report import gather

pytestmark = pytest.mark.usefixtures("unpainted")


def run_at(folder, steps, finished):
    config = {"model": {"heads": 7}, "trainer": {"steps": 100}}
    rows = [
        {"step": step, "seed": seed, "split": split, "loss": 2 - step / 100 + seed / 10, "accuracy": step / 200}
        for step in range(0, steps + 1, 25)
        for split in ("train", "test")
        for seed in (0, 1)
    ]
    seeds = [{"test_accuracy": 0.5}] * 2 if finished else []
    write_run(folder, config, seeds, "finished" if finished else "running", metrics=rows)
    started = (datetime.now().astimezone() - timedelta(seconds=300)).strftime("%Y-%m-%dT%H:%M:%S%z")
    (folder / "environment.json").write_text(json.dumps({"started": started, "command": ["rankbench train", "a=b"]}))
    return folder


def test_the_page_of_one_run_has_curves_and_what_was_asked_and_is_opened(tmp_path, monkeypatch):
    run_at(tmp_path / "mine", 100, finished=True)
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    succeeds("report", "runs=mine", "out=page", "report.open=true", at=tmp_path)
    page = tmp_path / "page" / "report.html"
    assert opened == [page.as_uri()]
    text = page.read_text()
    assert "<h1>Run: sorting (san)</h1>" in text and "What was asked: the keys of the run" in text
    assert "<dt>model.heads</dt><dd>7</dd>" in text and "To repeat it: <code>rankbench train a=b</code>" in text
    assert "Loss and, where the task has one, accuracy over training steps" in text and "refresh" not in text
    joined = pd.read_csv(tmp_path / "page" / "metrics.csv")
    assert list(joined.columns[:4]) == ["run", "task", "model", "seed"] and len(joined) == 20


@pytest.fixture
def sweep(tmp_path):
    """One job that has finished, one at half of its steps."""
    return [run_at(tmp_path / "runs" / "0", 100, finished=True), run_at(tmp_path / "runs" / "1", 50, finished=False)]


def test_a_running_sweep_is_written_until_it_has_ended(sweep, tmp_path, monkeypatch):
    pauses = []

    def pause(seconds):
        pauses.append(seconds)
        text = (tmp_path / "report.html").read_text()
        assert 'http-equiv="refresh"' in text and "1 of 2 jobs have finished, 1 running, about 0:01:4" in text
        summary = {"status": "finished", "seeds": [{"seed": 0, "status": "finished"}]}
        (sweep[1] / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(live.time, "sleep", pause)
    with (sweep[1] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        during, after = watched(str(tmp_path / "runs"), tmp_path)
    assert during[0].startswith("1 of 2 jobs have finished") and after[0] == "2 jobs, 2 finished"
    assert len(pauses) == 1 and pauses[0] >= live.PAUSE
    assert "refresh" not in (tmp_path / "report.html").read_text()


def test_a_run_without_a_loss_yet_has_no_curves(tmp_path):
    folder = run_at(tmp_path / "runs" / "0", 0, finished=False)
    header = (folder / "metrics.csv").read_text().splitlines()[0]
    for text in (f"{header}\n", f"{header}\n0,0,test,nan,0.5\n", f"{header}\n0,0,test,many,0.5\n"):
        (folder / "metrics.csv").write_text(text)
        gather(find_runs(str(tmp_path / "runs")), tmp_path)
        assert (tmp_path / "report.html").exists() and not (tmp_path / "metrics.png").exists()


@pytest.mark.further
def test_watching_ends_by_ctrl_c_and_where_nothing_runs(sweep, tmp_path, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    with (sweep[1] / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        monkeypatch.setattr(live.time, "sleep", interrupt)
        *_, last = watched(str(tmp_path / "runs"), tmp_path)
    assert last == [f"stopped; the jobs continue, and {tmp_path / 'report.html'} stays as it is"]
    (lines,) = watched(str(tmp_path / "runs"), tmp_path)  # no process holds the lock
    assert lines[0] == "2 jobs, 1 finished, 1 interrupted"


def test_a_job_that_may_yet_begin_is_looked_for_twice(sweep, tmp_path, monkeypatch):
    (sweep[1] / "summary.json").unlink()
    pauses = []
    monkeypatch.setattr(live.time, "sleep", pauses.append)
    waiting, last = watched(str(tmp_path / "runs"), tmp_path)
    assert waiting[0].startswith("1 of 2 jobs have finished, 0 running") and last[0] == "2 jobs, 1 finished, 1 absent"
    assert len(pauses) == 1


def test_the_time_left_is_that_of_the_pace_so_far(sweep, tmp_path):
    missing = tmp_path / "runs" / "2"
    # 300 s for 1.5 of 3 jobs, and the seconds that this test has taken
    assert "about 0:05:0" in status_line([*sweep, missing], ["finished", "running", "missing"])
    assert "left" not in status_line([missing], ["missing"])
    header = (sweep[1] / "metrics.csv").read_text().splitlines()[0]
    (sweep[1] / "metrics.csv").write_text(f"{header}\n")  # it has evaluated nothing: 1 of 3 jobs
    assert "about 0:10:0" in status_line([*sweep, missing], ["finished", "running", "missing"])
    (sweep[1] / "metrics.csv").unlink()  # it has not got so far
    assert "about 0:10:0" in status_line([*sweep, missing], ["finished", "running", "missing"])
    for job in sweep:  # the clock was set back
        (job / "environment.json").write_text('{"started": "2999-01-01T00:00:00+0000"}')
    assert "left" not in status_line([*sweep, missing], ["finished", "running", "missing"])


def test_panels_of_learning_curves_share_their_axes_and_show_every_point():
    steps = [{"step": step, "seed": 0, "split": "test", "accuracy": step / 9} for step in range(3)]
    rows = [row | {"lr": lr, "loss": lr * 10.0 ** -row["step"]} for lr in (1.0, 30.0) for row in steps]
    figure = draw_metrics(pd.DataFrame(rows), "lr")
    losses = [axes for axes in figure.axes if axes.get_ylabel() == "loss (nats per token)"]
    assert len(losses) == 2 and all(axes.get_yscale() == "log" for axes in losses)
    low, high = losses[0].get_ylim()
    assert losses[1].get_ylim() == (low, high) and low < 0.01 and high > 30


def test_losses_on_a_logarithmic_axis_are_geometric_means_with_bands_above_zero():
    # the arithmetic mean's interval reaches below 0 at step 1
    losses = [(step, seed, 100 * 10.0 ** (-(seed % 3) * (1 + 3 * step))) for step in range(2) for seed in range(12)]
    (axes,) = draw_metrics(pd.DataFrame(losses, columns=["step", "seed", "loss"]).assign(split="test")).axes
    assert axes.lines[0].get_ydata() == pytest.approx([10.0, 1e-2])
    (band,) = axes.collections
    assert band.get_paths()[0].vertices[:, 1].min() == pytest.approx(10.0 ** (-2 - 4 * 0.54185), rel=1e-3)
