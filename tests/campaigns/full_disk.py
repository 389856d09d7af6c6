"""Files that the kernel refuses to let grow, as on a full disk; then, with room, the same command again."""

import math
import random
import resource
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from forked import begin
from limits import limited

from campaigns.campaign import Campaign
from campaigns.in_process import complaint
from campaigns.jobs import undisturbed
from campaigns.processes import ended_as

SMALLEST, LARGEST = 100, 200_000  # bytes of the largest file


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Give a random command a limit on its files, then none."""
    jobs, ended, errors = undisturbed(folder), Counter(), folder / "errors.txt"
    for _ in range(size):
        name = numbers.choice(list(jobs))
        job, limit = jobs[name], round(math.exp(numbers.uniform(math.log(SMALLEST), math.log(LARGEST))))
        at = job.folder(folder / "case")
        errors.write_text("")
        first = begin(*job.words, at=at, errors=errors, limits=limited(resource.RLIMIT_FSIZE, limit))
        result = ended_as(first)
        ended["ran" if result.code == 0 else "stopped"] += 1
        line = complaint(result)
        if line is None and result.code and "could not be written" not in first.last_line:
            line = f"does not name the file: {first.last_line[:300]}"
        afterwards = job.continued(at, errors)
        line = line or afterwards
        yield None if line is None else f"{name}, files of at most {limit} bytes: {line}"
    return ", ".join(f"{count} {how}" for how, count in ended.most_common())


CAMPAIGN = Campaign(
    about="A random one of the same commands runs while no file may grow beyond a random size, which the kernel "
    "refuses as it does on a full disk, and then once more without the limit.",
    wrong="a traceback, a line that does not name the file, or afterwards tables, weights or statuses that differ from "
    "those of an undisturbed command.",
    full_size=100,
    cases=cases,
)
