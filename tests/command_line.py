"""The rankbench command, run in this process, and programs in a fresh one."""

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from rankbench.analysing.modules import building_once
from rankbench.commands import cli

ROOT = Path(__file__).resolve().parents[1]
SMALLEST = [  # words of a training that takes a fraction of a second
    *("model.layers=1", "model.width=8", "task.length=4", "task.alphabet=5", "task.train_size=20", "task.test_size=30"),
    "trainer.batch_size=8",
]


@dataclass
class Result:
    """What the command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def rankbench(*words: str, at: Path, full_error: str | None = None) -> Result:
    """Call the command in folder `at`, and leave this process as it was. full_error: the value of HYDRA_FULL_ERROR."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    environment = dict(os.environ)
    with building_once(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(at)
        patch.setattr(sys, "argv", ["rankbench", *words])
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            GlobalHydra.instance().clear()
            os.environ.clear()
            os.environ.update(environment)
    return Result(code, out.getvalue(), err.getvalue())


def succeeds(*words: str, at: Path) -> Result:
    """The result of words that the command takes."""
    result = rankbench(*words, at=at)
    assert result.code == 0, result.err
    return result


def refused(*words: str, at: Path) -> str:
    """The one line that refuses these words; no traceback, exit code 1."""
    result = rankbench(*words, at=at)
    assert result.code == 1 and result.out == ""
    assert result.err.endswith("\n") and result.err.count("\n") == 1, result.err
    return result.err.rstrip("\n")


def python(*words: str, at: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter prints that gets these words, such as -c and a program, in folder `at`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=at, env=environment, capture_output=True, text=True)
