"""Commands in odd surroundings: streams, locales, homes, limits, variables, folders. Each in a fresh interpreter."""

import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from campaigns.campaign import Campaign
from campaigns.jobs import TINY
from campaigns.processes import differences, results

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # of one command, on a machine that may be busy
WORDS = ["train", *TINY, "trainer.steps=4", "trainer.compile=false", "out=run"]
VARIABLES: dict[str, dict[str, str | None]] = {  # None: not set
    "C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii streams": {"PYTHONIOENCODING": "ascii"},
    "streams of two bytes": {"PYTHONIOENCODING": "utf-16"},
    "no home": {"HOME": None},
    "missing home": {"HOME": "/nowhere"},
    "home is a device": {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "XDG_CONFIG_HOME": "/dev/null"},
    "no folder for temporary files": {"TMPDIR": "/nowhere"},
    "unknown backend of figures": {"MPLBACKEND": "nonsense"},
    "settings of figures are a device": {"MPLCONFIGDIR": "/dev/null"},
    "without asserts and docstrings": {"PYTHONOPTIMIZE": "2"},
    "warnings are errors": {"PYTHONWARNINGS": "error::UserWarning"},
    "unknown time zone": {"TZ": "Nowhere/Nothing"},
    "far time zone": {"TZ": "XYZ-23:59"},
    "unknown locale": {"LC_ALL": "xx_XX.UTF-8", "LANG": "xx"},
    "no terminal": {"TERM": "", "COLUMNS": "0", "LINES": "-1"},
    "columns are a word": {"COLUMNS": "x"},
    "threads are a word": {"OMP_NUM_THREADS": "x", "MKL_NUM_THREADS": "-1"},
    "no such gpu": {"CUDA_VISIBLE_DEVICES": "7,x"},
    "all tracebacks": {"HYDRA_FULL_ERROR": "1"},
    "no path": {"PATH": ""},
    "hash seed": {"PYTHONHASHSEED": "1"},
    "unbuffered": {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    "user's name with odd letters": {"USER": "\udc80\n", "LOGNAME": "", "EDITOR": "\x1b"},
}
SHELL = {  # before the command, after it
    "no input": ("", "<&-"),
    "no output": ("", ">&-"),
    "no streams": ("", "<&- >&- 2>&-"),
    "full output": ("", ">/dev/full"),
    "full errors": ("", "2>/dev/full"),
    "reader leaves": ("", "| head -c 9"),
    "few open files": ("ulimit -n 24;", ""),
    "files of a kilobyte": ("ulimit -f 2;", ""),
    "little memory": ("ulimit -v 900000;", ""),
    "small stack": ("ulimit -s 256;", ""),
    "few processes": ("ulimit -u 1;", ""),
    "no one may read": ("umask 777;", ""),
    "folder removed": ("mkdir gone; cd gone; rmdir ../gone;", ""),
    "hangups ignored": ("nohup", ""),
    "interrupts ignored": ("trap '' INT TERM HUP;", ""),
}


def _run(at: Path, variables: dict[str, str | None], before: str = "", after: str = "") -> tuple[int, str]:
    """The exit code of a training, and what it printed as errors."""
    changed = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    environment = {name: value for name, value in changed.items() if value is not None}
    line = f'{before} "{sys.executable}" -m rankbench {" ".join(WORDS)} {after}'
    words, at_end = ["/bin/sh", "-c", line], {"timeout": SECONDS, "start_new_session": True}
    ended = subprocess.run(words, cwd=at, env=environment, capture_output=True, **at_end)
    return ended.returncode, ended.stderr.decode(errors="replace")


def _complaint(code: int, errors: str) -> str | None:
    lines = [line for line in errors.splitlines() if line.startswith("rankbench ")]
    if "Traceback" in errors:
        return f"traceback: {errors.strip()[-300:]}"
    return None if code == 0 or len(lines) == 1 else f"exit code {code}, {len(lines)} lines: {errors.strip()[-300:]}"


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Train in each of the surroundings in turn."""
    (folder / "whole").mkdir()
    assert _run(folder / "whole", {})[0] == 0
    wanted, ended = results(folder / "whole"), Counter()
    odd = [(name, variables, ("", "")) for name, variables in VARIABLES.items()]
    odd += [(name, {}, around) for name, around in SHELL.items()]
    for number in range(size):
        if number % len(odd) == 0:
            numbers.shuffle(odd)
        (name, variables, around), at = odd[number % len(odd)], folder / "case"
        at.mkdir()
        code, errors = _run(at, variables, *around)
        line = _complaint(code, errors)
        if line is None and code == 0 and name not in ("folder removed", "reader leaves"):
            line = differences(results(at), wanted)
        ended["ran" if code == 0 else "refused"] += 1
        shutil.rmtree(at)
        yield None if line is None else f"{name}: {line}"
    return ", ".join(f"{count} {how}" for how, count in ended.most_common())


CAMPAIGN = Campaign(
    about="A training runs with closed and full streams, a reader that leaves, odd locales, homes, variables, time "
    "zones and threads, without asserts, with small limits, in a folder that was removed.",
    wrong="a traceback, no line or more than one of a command that fails, 300 seconds, or other numbers.",
    full_size=38,
    cases=cases,
)
