"""rankbench.runs.sweep: the list of a sweep's jobs, and what becomes of jobs that never began."""

import pandas as pd
import pytest
from hand_written import write_run

from rankbench.config.keys import ConfigError
from rankbench.report.jobs import find_runs
from rankbench.report.report import gather, gather_sweep
from rankbench.runs.sweep import Job, Sweep

JOBS = [Job(f"{number}_model.heads={heads}", (f"model.heads={heads}",)) for number, heads in enumerate((1, 2, 4))]


@pytest.fixture
def sweep(tmp_path):
    """Three jobs listed, of which one has finished and the last two have not begun."""
    sweep = Sweep(tmp_path / "sweep")
    sweep.list_jobs(JOBS)
    final = {"test_accuracy": 0.5, "test_loss": 1.0}
    write_run(sweep.folder / JOBS[0].folder, {"model": {"heads": 1}}, [final])
    return sweep


def test_the_list_is_read_back_and_what_has_no_folder_is_missing(sweep):
    assert sweep.jobs() == JOBS and sweep.missing() == JOBS[1:]


@pytest.mark.parametrize(
    "text",
    [
        *(None, "no JSON", "[1]", '[{"folder": "x"}]', '{"folder": []}', '[{"folder": 3}]'),
        *('[{"folder": "../elsewhere", "overrides": []}]', "[" * 100000),
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_folder_without_a_readable_list_misses_nothing(sweep, text):
    (sweep.folder / "jobs.json").unlink()
    if text is not None:
        (sweep.folder / "jobs.json").write_text(text)
    assert sweep.jobs() == [] and sweep.missing() == []


def test_a_sweep_can_be_continued_and_extended_but_not_renumbered(sweep):
    sweep.check_same(JOBS)
    sweep.check_same([*JOBS, Job("3_model.heads=8", ("model.heads=8",))])
    sweep.check_same(JOBS[:1])
    with pytest.raises(ConfigError, match=r"whose job 0 is 0_model.heads=1 and not 0_model.heads=4; give the same"):
        sweep.check_same([Job("0_model.heads=4", ("model.heads=4",))])


def test_a_report_lists_the_jobs_that_never_began(sweep, tmp_path, undrawn_here):
    (tmp_path / "report").mkdir()
    for lines, folder in (
        (gather_sweep(sweep.folder, ["model.heads"]), sweep.folder),
        (gather(find_runs(str(sweep.folder)), tmp_path / "report"), tmp_path / "report"),
    ):
        assert lines[:3] == ["3 jobs, 1 finished, 2 missing", *(f"{job.folder}: missing" for job in JOBS[1:])]
        table = pd.read_csv(folder / "sweep.csv")
        assert list(table.job_status) == ["finished", "missing", "missing"]
        page = (folder / "report.html").read_text()
        assert page.count(">missing<") >= 2 and "2_model.heads=4" in page
    assert list(pd.read_csv(sweep.folder / "sweep.csv")["model.heads"]) == [1, 2, 4]  # from the words of the list
    assert not (sweep.folder / JOBS[1].folder).exists()  # looking for it has not made it
