"""Two commands at once on the same folders."""

import random
import shutil
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from forked import begin

from campaigns.campaign import Campaign
from campaigns.in_process import complaint
from campaigns.jobs import MEASURED, undisturbed
from campaigns.processes import ended_as

BESIDE = {  # what is begun beside a command that writes the folders `run` or `sweep`
    "analyze": ["analyze", "run=run", *MEASURED, "out=measured"],
    "report": ["report", "runs=.", "out=report"],
}


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Begin a second command while a first one runs; when both have ended, give the first once more."""
    jobs, ended = undisturbed(folder), Counter()
    for _ in range(size):
        name = numbers.choice(list(jobs))
        second = (
            numbers.choice(["same", "same", *BESIDE]) if name in ("train", "train and analyze", "sweep") else "same"
        )
        job = jobs[name]
        at = job.folder(folder / "case")
        first = begin(*job.words, at=at, errors=folder / "errors1.txt")
        delay = numbers.uniform(0, job.seconds)
        time.sleep(delay)
        other = begin(*BESIDE.get(second, job.words), at=at, errors=folder / "errors2.txt")
        line, of_other = complaint(ended_as(first)), complaint(ended_as(other))
        line = line or of_other
        ended["both ended well" if first.code == other.code == 0 else "one refused"] += 1
        if second != "same" and first.code != 0:
            line = line or f"the first was disturbed: {first.last_line}"
        if first.code != 0 and other.code != 0 and name != "sweep":
            line = line or f"neither ended: {first.last_line}; {other.last_line}"
        for path in (at / "measured", at / "report"):
            if second != "same" and path.exists():
                shutil.rmtree(path)
        afterwards = job.continued(at, folder / "errors1.txt")
        line = line or afterwards
        yield None if line is None else f"{name} and {second} after {delay:.3f} s: {line}"
    return ", ".join(f"{count} {how}" for how, count in ended.most_common())


CAMPAIGN = Campaign(
    about="While one of the same commands runs, it is begun a second time in the same folder, or an analysis of its "
    "run or a report of its folder is begun; when both have ended, the first is given once more.",
    wrong="a traceback, a refusal of more than one line, a training that an analysis or a report disturbs, two "
    "commands that refuse each other, or tables, weights or statuses that differ from those of an undisturbed command.",
    full_size=100,
    cases=cases,
)
