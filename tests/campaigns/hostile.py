"""Damaged and hostile run folders: bits flipped, files cut, swapped, linked elsewhere, nested, pickles that act."""

import json
import os
import pickle
import random
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from command_line import SMALLEST

from campaigns.campaign import Campaign
from campaigns.in_process import called, complaint
from campaigns.jobs import MEASURED
from rankbench.training.seeds_side_by_side import Training

SECONDS = 20  # of the processor, for one command
MEMORY = 1 << 20  # KiB by which a command may raise the memory of this process
TINY = [
    *(*SMALLEST, "trainer.steps=4", "trainer.eval_every=2", "trainer.checkpoint_every=2", "replicas=2"),
    *("trainer.dynamics_every=2", *MEASURED, "claims=[]"),
]
NUMBER = re.compile(rb"-?\d+(\.\d+)?(e-?\d+)?")
ODD = [
    *(b"9" * 400, b"9" * 5000, b"1e999", b"-1", b"0", b"nan", b"1e308", b"-1e-320", b"2147483648", b"", b"null", b"[]"),
    *(b"{}", b"=1+cmd()", b"x" * 100_000, b"\0", b"\xff\xfe", b"true", b"'", b'"', b"\n", b"${oc.env:HOME}"),
    *(b"$\\frac{$", b"!!python/object/apply:os.system ['touch canary']", b"&a [*a]", b"<script>alert(1)</script>"),
    *(b"../../x", b"1" * 25),
]
DEEP = b"[" * 10**5 + b"]" * 10**5


class Canary:
    """Pickled: whoever loads it touches a file of that name."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch canary",)


def _cut(content: bytes, numbers: random.Random) -> bytes:
    return content[: numbers.randrange(len(content) + 1)]


def _flipped(content: bytes, numbers: random.Random) -> bytes:
    flipped = bytearray(content)
    for _ in range(numbers.choice([1, 1, 3, 30])):
        if flipped:
            flipped[numbers.randrange(len(flipped))] ^= 1 << numbers.randrange(8)
    return bytes(flipped)


def _odd_number(content: bytes, numbers: random.Random) -> bytes:
    places = list(NUMBER.finditer(content[:200_000]))
    if not places:
        return numbers.choice(ODD)
    place = numbers.choice(places)
    return content[: place.start()] + numbers.choice(ODD) + content[place.end() :]


def _lines(content: bytes, numbers: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    number = numbers.randrange(len(lines)) if lines else 0
    change = numbers.choice(["lost", "doubled", "shuffled", "word"])
    if change == "lost":
        return b"".join(lines[:number] + lines[number + 1 :])
    if change == "doubled":
        return b"".join(lines[: number + 1] + lines[number:])
    if change == "shuffled":
        numbers.shuffle(lines)
        return b"".join(lines)
    words = re.split(rb"(\W+)", content)
    words[numbers.randrange(len(words))] = numbers.choice(ODD)
    return b"".join(words)


def _other_header(content: bytes, numbers: random.Random) -> bytes:
    """A file of tensors whose header lies about lengths, types, or itself."""
    header = {
        "a": {"dtype": numbers.choice(["F32", "F64", "U8", "X9"]), "shape": [numbers.choice([1, 2**40, -1, 2**62])]}
    }
    header["a"]["data_offsets"] = numbers.choice([[0, 4], [0, 2**60], [4, 0], [0, 2**63]])
    text = numbers.choice([json.dumps(header).encode(), DEEP, b"{}", b"null"])
    length = numbers.choice([len(text), 2**63, 0, 2**31])
    return length.to_bytes(8, "little") + text + content[:100]


CONTENTS: list[Callable[[bytes, random.Random], bytes]] = [
    *(_cut, _flipped, _flipped, _odd_number, _odd_number, _odd_number, _lines, _lines, _other_header),
    lambda content, numbers: b"",
    lambda content, numbers: DEEP,
    lambda content, numbers: b'{"a":' * 10**5,
    lambda content, numbers: pickle.dumps(Canary()),
    lambda content, numbers: content + numbers.choice(ODD) + b"\n",
    lambda content, numbers: numbers.randbytes(200),
    lambda content, numbers: numbers.choice(ODD),
]
KINDS = ["pipe", "zero", "dangling", "itself", "folder", "gone", "terabyte", "swapped"]


def damage(folder: Path, numbers: random.Random) -> str:
    """Change one random file of a folder; returns what was done in words."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".png", ".pdf", ".log"))
    files = [path for path in files if path.stat().st_size < 1 << 30]  # an earlier damage may be a terabyte
    path = numbers.choice(files)
    if numbers.random() < 0.75:
        change = numbers.choice(CONTENTS)
        path.write_bytes(change(path.read_bytes(), numbers))
        return f"{path.relative_to(folder)} {change.__name__}"
    kind = numbers.choice(KINDS)
    if kind == "swapped":
        other = numbers.choice(files)
        content, of_other = path.read_bytes(), other.read_bytes()
        path.write_bytes(of_other), other.write_bytes(content)
        return f"{path.relative_to(folder)} swapped with {other.relative_to(folder)}"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind != "gone":
        path.symlink_to({"zero": "/dev/zero", "dangling": "nothing", "itself": path.name}[kind])
    return f"{path.relative_to(folder)} {kind}"


def _stopping_at_its_checkpoint(folder: Path) -> None:
    saved = Training.save

    def save_and_stop(self: Training, run: object) -> None:
        saved(self, run)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "save", save_and_stop)
        called("train", *TINY, "out=stopped", at=folder, seconds=60)


def cases(numbers: random.Random, size: int, folder: Path) -> Generator[str | None, None, str]:
    """Damage a trained run, an interrupted run or a sweep, then continue, analyse or report it."""
    whole, at = folder / "whole", folder / "case"
    whole.mkdir()
    ended = Counter()
    assert called("train", *TINY, "out=trained", at=whole, seconds=60).code == 0
    assert called("train", "-m", *TINY, "seed=0,1", "out=sweep", at=whole, seconds=60).code == 0
    _stopping_at_its_checkpoint(whole)
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(size):
        name = numbers.choice(["trained", "stopped", "sweep"])
        at.mkdir()
        shutil.copytree(whole / name, at / name)
        done = [damage(at / name, numbers) for _ in range(numbers.choice([1, 1, 1, 3]))]
        train = ["train", *(["-m", "seed=0,1"] if name == "sweep" else []), *TINY, f"out={name}"]
        report = ["report", numbers.choice([f"runs={name}", "runs=."]), "out=report"]
        run = numbers.choice(sorted(path.parent for path in (at / name).rglob("config.yaml")) or [at / name])
        chosen = numbers.choice(["residual", "curves", "dynamics", "path_counts", "lipschitz"])
        analyze = ["analyze", f"run={run.relative_to(at)}", f"analysis=[{chosen}]", f"out={numbers.choice('ab')}"]
        words = numbers.choice([train, train, report, analyze, analyze])
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = called(*words, at=at, seconds=SECONDS)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ended["went on" if result.code == 0 else "refused"] += 1
        line = complaint(result)
        if list(folder.rglob("canary")):
            line = "executed a file's content"
        elif peak - before > MEMORY:
            line = f"memory rose by {(peak - before) >> 10} MiB"
        shutil.rmtree(at)
        yield None if line is None else f"{', '.join(done)}; {' '.join(words)}: {line}"
    counted = ", ".join(f"{count} {how}" for how, count in ended.most_common())
    return f"{counted}; memory {began >> 10} to {peak >> 10} MiB"


CAMPAIGN = Campaign(
    about="One or three files of a finished run, an interrupted run or a sweep are cut, emptied, swapped, removed, get "
    "flipped bits, odd numbers and words, lost and doubled lines, deep JSON, false headers or a pickle that acts when "
    "it is loaded, or become a pipe, a folder, a link to /dev/zero or a terabyte; then the run is continued, analysed "
    "or reported.",
    wrong="a traceback, more than one line of refusal, an executed content, 20 seconds of the processor, or 1 "
    "GiB of memory.",
    full_size=400,
    cases=cases,
)
