"""Writes that survive a full disk and a power cut: whole files are moved into their place, rows are appended whole."""

import errno
import fcntl
import glob
import json
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rankbench.config.keys import ConfigError

OUTPUTS = Path("outputs")  # below it a folder for each command, in it one for each run or sweep
LARGEST = 1 << 26  # bytes of a config, a summary or another record of a run
LARGEST_TABLE = 1 << 30
AHEAD = 3600 * 10**9  # nanoseconds that the clock of another machine, such as a file server, may be ahead


class WriteError(OSError):
    """A file that could not be written, in one line: which file, why, what is kept."""


def by_time(written: int) -> tuple[bool, int]:
    """Sort key for times of writing, in nanoseconds since 1970: the newest is the largest. A time in the future comes
    from a clock that was wrong, and counts as older than all others."""
    return written <= time.time_ns() + AHEAD, written


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a disk error into a WriteError about this file, which the caller leaves as it was."""
    try:
        yield
    except OSError as error:
        if not path.parent.is_dir():
            raise WriteError(f"{path.parent}: the folder is gone, so {path.name} could not be written") from error
        kept = "the file is kept as it was" if path.exists() else "no part of it is left"
        raise WriteError(f"{path}: could not be written ({error.strerror or error}); {kept}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, then move it to `path`; a kill or a power cut leaves the old file or the new one.

    A kill can leave a partial file next to it, which the next writer of the file removes.
    """
    with naming(path):
        _remove_left_parts(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        fcntl.flock(handle, fcntl.LOCK_EX)  # until the end of this process, however it ends
        part = Path(name)
        try:
            yield part
            part.chmod(0o644)
            sync(part)
            part.replace(path)
            sync(path.parent)
        finally:
            os.close(handle)
            part.unlink(missing_ok=True)


def _remove_left_parts(path: Path) -> None:
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(FileNotFoundError, BlockingIOError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while its writer lives
            part.unlink()


def regular(path: Path) -> Path:
    """`path` itself, which may be absent; ConfigError for a folder, and for a pipe or device that may never end."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: not a regular file; put back the file that was there, or remove it")
    return path


def bounded(path: Path, most: int) -> Path:
    """`path` itself; ConfigError if it is not a regular file, or has more than `most` bytes."""
    if (size := regular(path).stat().st_size) > most:
        raise ConfigError(
            f"{path}: {size >> 20} MiB; the files of a run that are read as a whole have at most {most >> 20} MiB"
        )
    return path


def read_text(path: Path) -> str:
    """Read a record of a run."""
    return bounded(path, LARGEST).read_text(encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file's content, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def append(path: Path, text: str) -> None:
    """Append to an existing file: the whole text, or nothing if the disk refuses a part of it."""
    with naming(path), path.open("r+b", buffering=0) as file:
        end, rest = file.seek(0, os.SEEK_END), text.encode()
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise


def write_text(path: Path, text: str) -> None:
    """Replace the file by this text, atomically. Bytes of a file's name that are no UTF-8 are written as escapes."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_json(path: Path, content: Any) -> None:
    """Replace the file by this content as JSON, atomically; nan and infinities are written as null."""
    write_text(path, json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
