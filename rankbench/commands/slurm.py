"""Jobs on Slurm: the command that submits them watches the queue, and says how to continue when one of them is lost."""

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher
from submitit.core.utils import JobPaths, UncompletedJobError
from submitit.slurm.slurm import SlurmInfoWatcher, SlurmJob

from rankbench.config.keys import ConfigError

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 30  # at most, into the queue
# States in which squeue still lists a job for some minutes, although it is over. Some may be queued again (NODE_FAIL).
OVER: tuple[str, ...] = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
OVER += ("PREEMPTED", "REVOKED", "TIMEOUT")


class Queue(SlurmInfoWatcher):
    """The states of jobs as squeue lists them. submitit's own watcher asks sacct, which knows nothing where accounting
    is off."""

    def __init__(self) -> None:
        super().__init__(delay_s=SECONDS_BETWEEN_LOOKS)
        self.states: dict[str, str] = {}  # of the registered jobs, at the last look
        self.empty_looks = 0  # how many looks in a row found none of them in the queue
        self.complained = False

    def listed(self) -> dict[str, str] | None:
        """The states of this user's jobs; None, and a warning the first time, if Slurm does not answer."""
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T", f"--user={os.getuid()}"]
        try:
            answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        except (OSError, subprocess.SubprocessError) as error:
            if not self.complained:
                log.warning("%s; rankbench goes on asking, and does not say so again", " ".join(str(error).split()))
            self.complained = True
            return None
        return dict(line.split(maxsplit=1) for line in answer.splitlines())

    def update(self) -> None:
        """Look into the queue."""
        self._last_status_check = time.time()
        if (listed := self.listed()) is None:
            return
        self.states = {job: listed.get(job, "no longer in the queue") for job in self._registered}
        in_queue = any(job in listed and state not in OVER for job, state in self.states.items())
        self.empty_looks = 0 if in_queue else self.empty_looks + 1

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether a job without a result is given up: only when none is in the queue any more, so that the command
        waits for the others. Two looks, because a job that is queued again is between two states for a moment."""
        self.update_if_long_enough(mode)
        return self.empty_looks > 1


class PatientLauncher(SlurmLauncher):
    """Submits a sweep's jobs, waits until all have ended, and raises ConfigError if some have no result."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Wait for the jobs that an earlier command submitted for this sweep, then submit these, and wait for them."""
        seconds, limit = self.params["signal_delay_s"], 60 * self.params["timeout_min"]
        if seconds >= limit:
            raise ConfigError(
                f"hydra.launcher.signal_delay_s={seconds}: a job of {limit} s would be warned as soon as it begins; "
                "give less, or more of hydra.launcher.timeout_min"
            )
        folder, queue = Path(self.params["submitit_folder"]).parent, Queue()
        _wait_for_earlier(folder, queue)
        SlurmJob.watcher = queue
        try:
            results = super().launch(job_overrides, initial_job_idx)
            for result in results:  # the property return_value raises all errors
                if isinstance(result._return_value, UncompletedJobError):
                    raise result._return_value
        except KeyboardInterrupt:
            log.warning("the jobs stay in Slurm's queue; `scancel %s` removes them", _arrays(queue.states))
            raise
        except UncompletedJobError as error:
            if not queue.states:
                raise ConfigError(f"cluster=slurm: sbatch refused: {str(error).strip().splitlines()[-1]}") from None
            while not queue.is_done(""):
                time.sleep(1)
            raise ConfigError(_how_they_ended(queue, folder, error)) from None
        return results


def _wait_for_earlier(folder: Path, queue: Queue) -> None:
    """Wait while jobs of an earlier command for this sweep are in the queue: two jobs cannot train the same run.

    folder: with a folder, named by Slurm's number, for each job that was ever submitted.
    """
    earlier, printed = {path.name for path in folder.glob("*") if re.fullmatch(r"\d+(_\d+)?", path.name)}, False
    while earlier and (listed := queue.listed()) is not None:
        if not (waiting := {job for job in earlier if listed.get(job, OVER[0]) not in OVER}):
            return
        if not printed:
            print(f"waiting for {len(waiting)} jobs of an earlier command; `scancel {_arrays(waiting)}` removes them")
            sys.stdout.flush()
        printed = True
        time.sleep(SECONDS_BETWEEN_LOOKS / 10)


def _arrays(jobs: Iterable[str]) -> str:
    """The numbers of the arrays that these jobs belong to."""
    return " ".join(sorted({job.partition("_")[0] for job in jobs}))


def _how_they_ended(queue: Queue, folder: Path, error: UncompletedJobError) -> str:
    """The line about jobs that ended without a result."""
    paths = {job: JobPaths(folder / "%j", job_id=job, task_id=0) for job in queue.states}
    lost = [job for job, its in paths.items() if its.submitted_pickle.exists() and not its.result_pickle.exists()]
    reasons = [f"{job} ({queue.states[job]})" for job in sorted(lost)]
    reasons += re.findall(r"Job not requeued because: (.*)\.", str(error))[-1:]
    return (
        f"cluster=slurm: a job ended without a result: {', '.join(reasons) or str(error).splitlines()[0]}; what the "
        f"jobs printed is in {folder}; the same command continues what has not finished"
    )
