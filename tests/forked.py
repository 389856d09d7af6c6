"""Processes forked from this one, in which all is imported already: a fresh one imports for two seconds.

For what is killed, interrupted, limited, or changes what a process has once. What a fresh interpreter imports, reads or
prints when it starts is tested in a fresh interpreter.
"""

import contextlib
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from command_line import rankbench


@dataclass
class Process:
    """A process that has been started. Use it as a context to have it killed at the end, whatever happens."""

    pid: int
    errors: Path  # what it prints on its standard error
    code: int | None = None  # once it has ended; negative: the signal that ended it
    took_too_long: bool = False  # and was killed for it, see `wait`

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code

    def wait(self, seconds: float = 120) -> int:
        """Its exit code; a process that takes longer is killed, and counts as such."""
        end = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > end:
                self.took_too_long = True
                self.kill()
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


def until(holds: Callable[[], object], process: Any, seconds: float = 240) -> None:
    """Wait until this holds, while the process, a `Process` or a subprocess.Popen, runs."""
    end = time.monotonic() + seconds
    while not holds():
        assert process.poll() is None and time.monotonic() < end, process
        time.sleep(0.02)


def fork(call: Callable[[], object], *, at: Path, errors: Path) -> Process:
    """Call this in a process of its own, in folder `at`. The process ends as a program with this one call would, except
    that nothing runs at its exit; what it prints on its standard output is lost."""
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads. Those of a test's worker are not in the child, which does not miss them.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return Process(pid, errors)
    code = 1
    try:
        code = _code_of(call, at, errors)
    finally:
        os._exit(code)  # pytest must not go on in the child


def begin(*words: str, at: Path, errors: Path, limits: contextlib.AbstractContextManager | None = None) -> Process:
    """Start a command in folder `at`. limits: entered by its process, and left before it prints into `errors`."""

    def call() -> None:
        with limits or contextlib.nullcontext():
            result = rankbench(*words, at=at)
        sys.stderr.write(result.err)
        sys.exit(result.code)

    return fork(call, at=at, errors=errors)


def _code_of(call: Callable[[], object], at: Path, errors: Path) -> int:
    # other threads of torch are not in the child, which would wait for them
    torch.set_num_threads(1)
    # a shell may start tests in the background, where interrupts are ignored, and nohup, where a closed terminal is
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with open(os.devnull, "w") as out, open(errors, "w", buffering=1) as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                os.chdir(at)
                call()
            except SystemExit as stop:
                return int(stop.code or 0)
            except BaseException:
                traceback.print_exc()
                return 1
    return 0
