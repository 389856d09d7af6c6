"""Commands in this process, many a second: bounded in time, without painting, and judged by what a user would see."""

import contextlib
import signal
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import matplotlib.figure
import pytest
from command_line import Result, rankbench
from matplotlib.layout_engine import ConstrainedLayoutEngine

LONGEST_LINE = 1000
TOO_LONG = -1  # exit code of a command that the clock stopped
BUSY = 20  # seconds by the clock that a second of the processor may take
CRASHED = -2  # of one that ended with an exception


class TimeIsUp(BaseException):
    """No Exception: what handles errors must not handle it."""


def called(*words: str, at: Path, seconds: int) -> Result:
    """The command's result; its err has the traceback of an exception that it let out. seconds: of the processor; by
    the clock it may take longer, because other processes may be at work."""

    def stop(*_: object) -> None:
        raise TimeIsUp

    kinds = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {kind: signal.signal(kind, stop) for kind in kinds}
    signal.setitimer(signal.ITIMER_PROF, seconds), signal.setitimer(signal.ITIMER_REAL, BUSY * seconds)
    try:
        return rankbench(*words, at=at)
    except TimeIsUp:
        return Result(TOO_LONG, "", f"still running after {seconds} s")
    except BaseException:
        return Result(CRASHED, "", traceback.format_exc())
    finally:
        for kind, timer in kinds.items():
            signal.setitimer(timer, 0)
            signal.signal(kind, before[kind])


@contextlib.contextmanager
def without_painting() -> Iterator[None]:
    """Save figures as they are drawn, without their seconds of arranging and painting."""

    def save(figure: matplotlib.figure.Figure, image: BinaryIO, *, format: str, **_: object) -> None:
        image.write(b"<svg></svg>" if format == "svg" else b"")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.figure.Figure, "savefig", save)
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda *_: None)
        yield


def complaint(result: Result) -> str | None:
    """What is wrong with how a command ended, whether it ran or was refused: a traceback, or more than its one line."""
    if result.code == CRASHED or "Traceback" in result.err:
        frames = [line.strip() for line in result.err.splitlines() if line.startswith("  File")]
        return f"traceback: {result.err.strip().splitlines()[-1][:200]} ({frames[-1] if frames else 'no frame'})"
    if result.code == 0:
        return None
    if result.code != 1:
        return f"exit code {result.code}: {result.err[-200:]}"
    line = result.err.splitlines()[-1] if result.err.strip() else ""
    if not line.startswith("rankbench"):
        return f"failed without its line: {result.err[-200:]!r}"
    return f"a line of {len(line)} characters: {line[:100]}..." if len(line) > LONGEST_LINE else None


def files_under(folder: Path) -> set[str]:
    """The files and folders in a folder, at any depth."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
