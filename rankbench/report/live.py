"""The page of a running sweep, rewritten regularly with the sweep's status and the time left."""

import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from rankbench.config.keys import ConfigError
from rankbench.report.jobs import find_runs, status_of
from rankbench.report.report import gather
from rankbench.runs.records import read_json, read_yaml
from rankbench.runs.run import Run

PAUSE = 10  # seconds between two pages, at least
SHARE = 0.25  # largest share of the time to spend on writing pages: the training needs the cores
WAITING = ("running", "missing", "absent")


def watched(runs: str, folder: Path, **how: Any) -> Iterator[list[str]]:
    """Rewrite the report of these runs until no job has been running for two looks, or until Ctrl-C. For every report
    but the last, yields only its status. how: see `gather`."""
    idle = 0
    try:
        while idle < 2:
            began, jobs = time.monotonic(), find_runs(runs)
            statuses = [status_of(job) for job in jobs]
            idle = 0 if "running" in statuses else idle + 1 if set(statuses) & set(WAITING) else 2
            live = "" if idle == 2 else status_line(jobs, statuses)
            lines = gather(jobs, folder, live=live, **how)
            yield lines if idle == 2 else [live, f"-> {folder / 'report.html'}"]
            if idle < 2:
                time.sleep(max(PAUSE, (time.monotonic() - began) / SHARE))
    except KeyboardInterrupt:
        yield [f"stopped; the jobs continue, and {folder / 'report.html'} stays as it is"]


def status_line(jobs: list[Path], statuses: list[str]) -> str:
    """How many jobs have finished, and how long the rest takes at the pace since the first one began."""
    shares = [
        _share(job) if status == "running" else float(status not in WAITING)
        for job, status in zip(jobs, statuses, strict=True)
    ]
    now = datetime.now().astimezone()
    begins = [began for job in jobs if (began := _began(job)) is not None]
    ends = f"{statuses.count('finished')} of {len(jobs)} jobs have finished, {statuses.count('running')} running"
    if begins and min(begins) < now and 0 < sum(shares) < len(jobs):
        left = (now - min(begins)) * ((len(jobs) - sum(shares)) / sum(shares))
        ends += f", about {timedelta(seconds=round(left.total_seconds()))} left"
    return f"{ends} ({now:%H:%M:%S}; this page is rewritten regularly)"


def _share(job: Path) -> float:
    """Share of the steps that a running job has evaluated."""
    try:
        steps = read_yaml(job / "config.yaml")["trainer"]["steps"]
        return min(1.0, max(Run(job).table("metrics").step, default=0) / steps)
    except (ConfigError, OSError, KeyError, TypeError, ZeroDivisionError):  # it has written too little yet
        return 0.0


def _began(job: Path) -> datetime | None:
    try:
        return datetime.strptime(read_json(job / "environment.json")["started"], "%Y-%m-%dT%H:%M:%S%z")
    except (ConfigError, OSError, KeyError, TypeError, ValueError):
        return None
