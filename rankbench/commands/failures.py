"""How a command ends that cannot go on: one line, an exit code and, for a user's own code, the frames of that code.

Everything that a command does runs within `refusing`, or within `one_line` of a job.
"""

import errno
import io
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from rankbench.config.keys import ConfigError, shortened

INTERRUPTED, READER_GONE = 130, 141  # exit codes, as the shell has them for SIGINT and SIGPIPE
# what a command writes before the first result
RECORDS = {".hydra", ".lock", "config.yaml", "environment.json", "analyze.log", "train.log"}
wants_traceback = False  # whether the user has set HYDRA_FULL_ERROR=1
is_interrupted = False  # whether a signal has come that ends the command


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """End the process with one line if what is inside cannot go on. A bug of ours passes, with its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        refuse(command, "interrupted", INTERRUPTED)
    except BaseException as error:
        if isinstance(error, BrokenPipeError):
            quit_silently()
        if is_interrupted and not isinstance(error, SystemExit):  # Python can make another error of an interruption
            refuse(command, "interrupted", INTERRUPTED)
        refusal = refusal_of(error)
        if refusal is None or (wants_traceback and not isinstance(error, SystemExit)):
            raise
        refuse(command, refusal)


@contextmanager
def leaving_nothing(out: Path) -> Iterator[None]:
    """Remove a folder that what is inside has made if that is refused before it leaves more there than records."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        yield
    except (ConfigError, SystemExit) as error:
        is_refusal = isinstance(error, ConfigError) or error.code == 1
        if is_refusal and out in made:
            remove_records(out)
            with suppress(OSError):  # what is inside, or another command, has left something
                for folder in made[1:]:
                    folder.rmdir()
        raise


def remove_records(out: Path) -> None:
    """Remove a command's folder if it holds no more than records."""
    if {path.name for path in out.glob("*")} <= RECORDS:
        from rankbench.runs.run import Run

        with suppress(ConfigError, OSError), Run(out).locked():  # another command may be writing there
            shutil.rmtree(out)


def refuse(command: str, refusal: str | ConfigError, code: int = 1) -> NoReturn:
    """Print the line of a refusal, and the frames of a user's code if it has any, and exit."""
    line = shortened(str(refusal))
    print(f"rankbench {command}: {line}" if command else f"rankbench: {line}", file=sys.stderr)
    print(getattr(refusal, "frames", ""), end="", file=sys.stderr)
    raise SystemExit(code) from None


def quit_silently() -> NoReturn:
    """Exit because the reader of our output has exited: `rankbench train --help | head`."""
    for stream in (sys.stdout, sys.stderr):  # what is left in their buffers goes nowhere
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise SystemExit(READER_GONE) from None


def refusal_of(error: BaseException) -> ConfigError | None:
    """The error as a refusal: a mistake of the user, a disk or the memory that is full, or an error or an exit in the
    user's own code. None for a bug of ours, for an interruption and for our own exit."""
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, KeyboardInterrupt | BrokenPipeError):
        return None
    if type(error).__name__ == "TerminatedWorkerError":  # joblib's
        return ConfigError(
            "cluster=joblib: a worker was killed, perhaps for want of memory; the same command with the sweep's folder "
            "as out= continues; hydra.launcher.n_jobs=1 needs less memory"
        )
    if type(error).__name__ == "NotFinite":  # rankbench.measures.states', which would import torch
        return ConfigError(str(error))
    if isinstance(error, MemoryError | RuntimeError) and (reason := _out_of_memory(error)) is not None:
        return ConfigError(reason)
    from rankbench.config.plugins import frames_of_user

    if frames := frames_of_user(error):
        what = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))
        place = f"{frames[-1].filename}, line {frames[-1].lineno}"
        refusal = ConfigError(f"{place}: your own code raised {what}; HYDRA_FULL_ERROR=1 shows all that led there")
        refusal.frames = "".join(traceback.format_list(frames))
        return refusal
    return ConfigError(_line_of_disk(error)) if isinstance(error, OSError) else None


def _out_of_memory(error: MemoryError | RuntimeError) -> str | None:
    """The refusal of an allocation, of which torch says the bytes; None for another error."""
    try:
        from rankbench.runs.machine import gib, physical_memory, refused_allocation
    except MemoryError:  # torch does not fit
        return "out of memory while starting; `ulimit -v` sets what a process may take"
    reason = refused_allocation(error)
    return None if reason is None else f"out of memory ({reason}); this machine has {gib(physical_memory())}"


def _line_of_disk(error: OSError) -> str:
    """A disk error with the file concerned, which Hydra's own writes do not name."""
    if error.errno is None:
        return str(error)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{error.filename or 'a file'}: cannot be opened ({error.strerror}); `ulimit -n` raises their number"
    if error.filename is not None:
        named = f"{error.filename}: cannot be made, read or written ({error.strerror})"
        failed = Path(str(error.filename)).absolute()
        for word in sys.argv[1:]:
            if word.startswith("out=") and Path(word[4:].strip("'")).absolute().is_relative_to(failed):
                return f"{word}: {named}; give another folder"
        return named
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    written = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, io.TextIOWrapper)]
    name = os.path.relpath(written[-1].name) if written else "standard output"
    return f"{name}: could not be written ({error.strerror})"
