"""The finished jobs of a sweep. Each leaves a record of what its config and results depend on. By this record the same
command recognises the job without composing its config, which takes Hydra a quarter of a second."""

import hashlib
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from rankbench import __version__
from rankbench.config import plugins
from rankbench.config.schema import conf_dir
from rankbench.progress import logging_to
from rankbench.runs.files import regular, write_json
from rankbench.runs.records import checksum, or_empty, read_json

RECORD = ".job.json"
# With these, a YAML file reads something outside of the YAML files; the shipped ones only read the clock, for out=
OUTSIDE = ("${now", "${oc.env", "${env")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedJob:
    """A finished job, from its record: the words that name it, and the lines that it printed."""

    folder: Path
    name: str
    lines: tuple[str, ...]

    def show(self, number: int, num_jobs: int) -> None:
        """Print what the job prints when it finds itself finished."""
        announce(number, num_jobs, self.name)
        with logging_to(self.folder / "train.log"):
            log.info("%s is trained already", os.path.relpath(self.folder))
        print("\n".join(self.lines), flush=True)


def announce(number: int, num_jobs: int, name: str) -> None:
    """Print the line with which a sweep's job begins. num_jobs: 0 if the sweeper does not know it."""
    print(f"job {number + 1}{f' of {num_jobs}' if num_jobs else ''}: {name}", flush=True)


def surroundings(hydra: DictConfig) -> str | None:
    """Digest of all that the configs and results of a sweep's jobs depend on, except their words and the texts that
    they read: the YAML files, the code, the versions of packages, the user's style of figures. None if they depend on
    something else, too.

    hydra: Hydra's part of the config of a job, or of its sweep.
    """
    from rankbench.plots.style import STYLE
    from rankbench.runs.machine import packages, source_digest

    yaml_files = _yaml_files([source.path for source in hydra.runtime.config_sources if source.schema == "file"])
    if yaml_files is None:
        return None
    parts = [list(hydra.overrides.hydra), hydra.job.config_name, os.getcwd(), yaml_files]
    return _digest([*parts, __version__, packages(), source_digest(), plugins.digest(), sorted(STYLE.items())])


def recipe(number: int, words: Iterable[str], around: str | None) -> str | None:
    """Digest of all that a job's config and results depend on, except the texts that it reads; None if they depend on
    something else, too. around: what surroundings() returned."""
    words = list(words)
    return None if around is None or any("$" in word for word in words) else _digest([number, words, around])


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _yaml_files(folders: Iterable[str]) -> str | None:
    """Digest of the YAML files in these folders; None if a user's file reads something outside of them."""
    digest = hashlib.sha256()
    for folder in map(Path, folders):
        for path in sorted(path for path in folder.rglob("*.yaml") if path.exists()):  # no locks of editors
            text = regular(path).read_bytes()
            if folder != conf_dir() and any(word.encode() in text for word in OUTSIDE):
                return None
            digest.update(f"{path} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def record(folder: Path, made_from: str | None, name: str, texts: Iterable[Path], lines: Iterable[str]) -> None:
    """Record that the job in this folder has finished. made_from: its recipe when it began; name: the words that name
    it; texts: the files that its task reads; lines: those that it printed."""
    own = [path.name for path in folder.iterdir() if path.is_file() and path.name[0] != "." and path.suffix != ".log"]
    files = {name: checksum(folder / name) for name in (*sorted(own), *(str(path.absolute()) for path in texts))}
    content = {"recipe": made_from, "name": name, "files": files, "lines": list(lines)}
    write_json(folder / RECORD, {**content, "digest": _digest(list(content.values()))})


def finished_job(folder: Path, made_from: str | None) -> FinishedJob | None:
    """The job in this folder if its record is of this recipe and all its files are unchanged, else None."""
    content = or_empty(read_json, folder / RECORD)
    recipe, name, files, lines = parts = [content.get(part) for part in ("recipe", "name", "files", "lines")]
    if made_from is None or recipe != made_from or content.get("digest") != _digest(parts) or None in files.values():
        return None
    is_same = all(checksum(folder / file) == digest for file, digest in files.items())  # texts have absolute paths
    return FinishedJob(folder, name, tuple(lines)) if is_same else None
