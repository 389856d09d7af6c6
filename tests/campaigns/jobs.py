"""The tiny commands that are killed, cut short and doubled, each with what an undisturbed one leaves."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from command_line import SMALLEST
from forked import begin

from campaigns.processes import differences, results

TINY = [*SMALLEST, "trainer.eval_every=2", "trainer.checkpoint_every=4", "replicas=2"]
MEASURED = ["analysis=[residual,path_counts]", "analysis.residual.sequences=2"]
COMMANDS = {
    "train": ["train", *TINY, "trainer.steps=60", "trainer.dynamics_every=5", "out=run"],
    "train and analyze": ["train", *TINY, "trainer.steps=8", *MEASURED, "claims=[dong_claim31]", "out=run"],
    "sweep": ["train", "-m", *TINY, "trainer.steps=10", "model.heads=1,2", "out=sweep"],
    "analyze": ["analyze", "run=given", *MEASURED, "out=measured"],
    "report": ["report", "runs=given", "out=report"],
}
NEEDS_A_RUN = ("analyze", "report")


@dataclass(frozen=True)
class Job:
    """A command, the folder that it starts in, what it leaves if nothing disturbs it, and how long it then takes."""

    words: list[str]
    given: Path
    wanted: dict[str, object]
    seconds: float

    def folder(self, at: Path) -> Path:
        """Make `at` the folder that the command starts in."""
        return Path(shutil.copytree(self.given, at))

    def continued(self, at: Path, errors: Path) -> str | None:
        """Give the command once more in its folder, which goes; returns what is wrong with how it ends, or leaves."""
        again = begin(*self.words, at=at, errors=errors)
        line = differences(results(at), self.wanted) if again.wait() == 0 else f"not continued: {again.last_line}"
        shutil.rmtree(at)
        return line


def undisturbed(folder: Path) -> dict[str, Job]:
    """Run each command once without a disturbance."""
    jobs, errors = {}, folder / "errors.txt"
    empty, with_run = folder / "empty", folder / "with_run"
    empty.mkdir(), with_run.mkdir()
    words = ["train", *TINY, "trainer.steps=8", *MEASURED, "out=given"]
    assert begin(*words, at=with_run, errors=errors).wait() == 0, errors.read_text()
    for name, words in COMMANDS.items():
        job = Job(words, with_run if name in NEEDS_A_RUN else empty, {}, 0.0)
        at, began = job.folder(folder / f"undisturbed {name}"), time.monotonic()
        assert begin(*words, at=at, errors=errors).wait() == 0, errors.read_text()
        jobs[name] = Job(words, job.given, results(at), time.monotonic() - began)
    return jobs
