"""One sweep of many tiny jobs: memory, open files and processor time of its process from first to last."""

import os
import random
import resource
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
from command_line import SMALLEST
from forked import begin

from campaigns.campaign import Campaign
from rankbench.runs.run import Run

SIZES = [*SMALLEST, "trainer.steps=4", "trainer.eval_every=2"]
REPORT_SECONDS, REPORT_MEMORY = 60, 1024  # of 500 runs; MiB
TICK = os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    """A process's memory in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def _measured(pid: int) -> tuple[float, int, float]:
    """A process's memory in MiB, its open files, and its processor time in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / TICK
    return _memory(pid), len(os.listdir(f"/proc/{pid}/fd")), seconds


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Run the sweep, measuring its process after each tenth of the jobs; then the same command, then a report."""
    errors, sweep = folder / "errors.txt", folder / "sweep"
    first = numbers.randrange(1000)
    words = ["train", "-m", *SIZES, f"seed=range({first},{first + size})", "out=sweep"]
    process, measured = begin(*words, at=folder, errors=errors), []
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        finished = sum(1 for _ in sweep.glob("*/summary.json"))
        if finished * 10 // size > len(measured):
            measured.append((finished, *_measured(process.pid)))
        time.sleep(0.05)
    code = process.wait()
    runs = [Run(path.parent) for path in sweep.glob("*/config.yaml")]
    for run in runs:
        yield None if run.status == "finished" else f"{run.name} is {run.status}"
    for _ in range(size - len(runs)):
        yield "a job is missing"
    finished, memory, files, seconds = np.array(measured).T
    per_job = np.diff(seconds) / np.diff(finished)
    began = time.monotonic()
    again = begin(*words, at=folder, errors=errors).wait(600)
    resumed = time.monotonic() - began
    began = time.monotonic()
    process, peak = begin("report", "runs=sweep", "out=report", at=folder, errors=errors), 0.0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak = max(peak, _memory(process.pid))
        time.sleep(0.05)
    reported, report = process.wait(), time.monotonic() - began
    yield (
        None
        if code == again == reported == 0
        else f"exit codes {code}, {again}, {reported}: {errors.read_text()[-300:]}"
    )
    yield None if memory.max() < 1.05 * memory[0] + 20 else f"memory grew: {memory.round()} MiB"
    # medians of the two halves, because a job at work has a few files open, and other processes slow single jobs down
    first, second = np.array_split(files, 2)
    yield None if np.median(second) <= np.median(first) + 2 else f"open files grew: {files}"
    first, second = np.array_split(per_job, 2)
    yield None if np.median(second) < 1.3 * np.median(first) else f"jobs became slower: {per_job.round(3)} s"
    yield None if report < REPORT_SECONDS * max(1, size / 500) else f"the report took {report:.0f} s"
    yield None if peak < REPORT_MEMORY else f"the report took {peak:.0f} MiB"
    return (
        f"memory {memory[0]:.0f} to {memory[-1]:.0f} MiB, open files {files[0]:.0f} to {files[-1]:.0f}, processor time "
        f"a job {per_job[0]:.2f} to {per_job[-1]:.2f} s, the finished sweep again {resumed / size:.2f} s a job, report "
        f"{report:.0f} s and {peak:.0f} MiB"
    )


CAMPAIGN = Campaign(
    about="One sweep of as many tiny jobs, the same command again when it has finished, and a report of all runs.",
    wrong="a job that is not finished, memory or open files that grow from the first tenth to the last, jobs that "
    "take 1.3 times longer in the second half (medians of tenths), or a report of 500 runs of more than a minute or "
    "1 GiB. The last six cases are these.",
    full_size=500,
    cases=cases,
    paints=True,
)
