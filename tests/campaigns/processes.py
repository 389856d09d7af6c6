"""Commands in processes of their own, forked from this one so that none waits seconds for its imports, and the tables
and weights that they leave."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from command_line import rankbench

from rankbench.runs.run import Run

CLOCKS = ["seconds", "tokens_per_second", "train_seconds"]  # columns that differ from one run to the next
KILLED = -signal.SIGKILL


@dataclass
class Process:
    """A command that has been started."""

    pid: int
    errors: Path  # what it prints on its standard error
    code: int | None = None  # once it has ended; negative: the signal that ended it

    def wait(self, seconds: float = 120) -> int:
        """Its exit code; a process that takes longer is killed, and counts as such."""
        end = time.monotonic() + seconds
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                self.kill()
            else:
                time.sleep(0.002)
        return self.code

    def kill(self) -> None:
        """End it as the kernel does: at once, wherever it is."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def last_line(self) -> str:
        lines = self.errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def begin(*words: str, at: Path, errors: Path, limit: Callable[[], None] = lambda: None) -> Process:
    """Start a command in folder `at`. limit: called in its process before it begins."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Process(pid, errors)
    code = 70
    try:
        limit()
        result = rankbench(*words, at=at)
        code = result.code
        with open(errors, "w") as file:
            file.write(result.err)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def smaller_files(num_bytes: int) -> Callable[[], None]:
    """A limit on the size of a process's files: the kernel refuses what a full disk would."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def results(folder: Path) -> dict[str, object]:
    """All tables (without clocks), weights and statuses in a folder, by their path in it."""
    left: dict[str, object] = {}
    for path in sorted(folder.rglob("*.csv")):
        text = path.read_text()
        table = pd.read_csv(path) if text.strip() else pd.DataFrame()
        left[str(path.relative_to(folder))] = table.drop(columns=CLOCKS, errors="ignore").to_csv()
    for path in folder.rglob("summary.json"):
        run = Run(path.parent)
        left[str(path.relative_to(folder))] = run.status
        if (path.parent / "checkpoint.safetensors").exists():
            weights = run.weights()
            left[f"{path.relative_to(folder)} weights"] = {name: x.numpy().tobytes() for name, x in weights.items()}
    parts = [path for path in folder.rglob(".*") if path.name.endswith(".part") or path.name.startswith(".tmp")]
    return left | {f"{path.relative_to(folder)} left behind": True for path in parts}


def differences(ours: dict[str, object], wanted: dict[str, object]) -> str | None:
    """What differs between two folders' results, in words; None if nothing does."""
    names = [name for name in sorted(ours.keys() | wanted.keys()) if ours.get(name) != wanted.get(name)]
    kinds = {name: "missing" if name not in ours else "too many" if name not in wanted else "differs" for name in names}
    return ", ".join(f"{name} {kind}" for name, kind in kinds.items()) or None
