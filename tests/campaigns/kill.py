"""SIGKILL at random moments of training, analysis, a sweep and a report; then the same command again."""

import random
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from forked import begin

from campaigns.campaign import Campaign
from campaigns.jobs import undisturbed
from campaigns.processes import KILLED


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Kill a random command up to three times, then let it end."""
    jobs, kills, errors = undisturbed(folder), Counter(), folder / "errors.txt"
    for _ in range(size):
        name = numbers.choice(list(jobs))
        job, moments = jobs[name], []
        at = job.folder(folder / "case")
        for _ in range(numbers.choice([1, 1, 2, 3])):
            process = begin(*job.words, at=at, errors=errors)
            moments.append(numbers.uniform(0, 1.1 * job.seconds))
            time.sleep(moments[-1])
            process.kill()
            kills[name] += process.code == KILLED
        line = job.continued(at, errors)
        yield None if line is None else f"{name} killed after {[round(x, 3) for x in moments]} s: {line}"
    counted = ", ".join(f"{name} {kills[name]}" for name in jobs)
    return f"{sum(kills.values())} kills before the end: {counted}"


CAMPAIGN = Campaign(
    about="A random one of a training, a training with analyses and claims, a sweep, an analysis of a run and a report "
    "is killed one to three times at random moments, and then the same command is given once more.",
    wrong="tables, weights or statuses that differ from those of an undisturbed command (clocks aside), a file left "
    "behind, or a refusal.",
    full_size=300,
    cases=cases,
)
