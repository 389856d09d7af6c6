"""C++ sources as libraries: compiled for this machine, once for each choice of sizes, and kept in the user's cache."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

log = logging.getLogger(__name__)

# No -ffast-math: it assumes finite numbers, and it makes the whole process round the smallest numbers to zero.
FLAGS: tuple[str, ...] = ("-std=c++17", "-O3", "-march=native", "-fopenmp-simd", "-fno-math-errno")
FLAGS += ("-fno-trapping-math", "-ffp-contract=fast", "-shared", "-fPIC")


class NoLibraryError(Exception):
    """A library cannot be made or loaded here; the message says why."""


class Source(NamedTuple):
    """A C++ file and the headers beside it, by name. It is read once, with the Python code that calls it, so that a
    package that is replaced while a process runs does not compile code that this process does not fit."""

    name: str
    files: tuple[tuple[str, bytes], ...]

    @classmethod
    def read(cls, path: Path) -> "Source":
        return cls(
            path.name, tuple((file.name, file.read_bytes()) for file in (path, *sorted(path.parent.glob("*.h"))))
        )


def library(source: Source, defines: Mapping[str, object]) -> ctypes.CDLL:
    """Load the library of this source with these macros, compiled now unless the cache has it; NoLibraryError if that
    fails. It is told apart by the source, the macros, the compiler and the features of the processor."""
    return _library(source, tuple(f"-D{name}={value}" for name, value in defines.items()))


@cache
def _library(source: Source, macros: tuple[str, ...]) -> ctypes.CDLL:
    compiler = _compiler()
    digest = hashlib.sha256(repr((source, macros, FLAGS, _target(compiler))).encode()).hexdigest()
    file = _folder() / f"{source.name.removesuffix('.cpp')}_{digest[:32]}.so"
    try:
        if not file.exists():
            _compile(compiler, source, macros, file)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise NoLibraryError(f"{file} cannot be written or loaded ({error})") from None


def _compiler() -> str:
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if (compiler := shutil.which(name)) is None:
        raise NoLibraryError(f"there is no C++ compiler ({name}, or what CXX names)")
    return compiler


@cache
def _target(compiler: str) -> str:
    """The compiler's version and the features of this processor that it uses, as it tells them."""
    return _run([compiler, *FLAGS, "-v", "-E", "-x", "c++", os.devnull]).stderr


def _folder() -> Path:
    """The user's cache folder of libraries. No other user may write there, and no run's folder is read."""
    import pooch

    folder = Path(pooch.os_cache("rankbench")) / "libraries"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        state = folder.stat()
    except OSError as error:
        raise NoLibraryError(f"{folder} cannot be made ({error.strerror})") from None
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise NoLibraryError(f"{folder} is not this user's alone")
    return folder


def _compile(compiler: str, source: Source, macros: tuple[str, ...], file: Path) -> None:
    log.info("compiling %s for these sizes, once for all runs: some seconds", source.name)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        part = Path(folder) / file.name
        for name, text in source.files:
            (Path(folder) / name).write_bytes(text)
        _run([compiler, *FLAGS, *macros, str(Path(folder) / source.name), "-o", str(part)])
        part.replace(file)  # whole or not at all, also if several processes compile it at once


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        # messages of compilers need not be UTF-8
        return subprocess.run(words, check=True, capture_output=True, errors="replace", stdin=subprocess.DEVNULL)
    except OSError as error:
        raise NoLibraryError(f"{words[0]} cannot be run ({error.strerror})") from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"exit status {error.returncode}"]
        raise NoLibraryError(f"{words[0]} failed: {lines[0][:200]}") from None
