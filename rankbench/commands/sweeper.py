"""A version of Hydra's sweeper over all combinations that skips finished jobs."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf

if TYPE_CHECKING:
    from rankbench.commands.finished_jobs import FinishedJob

NAME = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"  # of the class that SkippingSweeper replaces


class SkippingSweeper(Sweeper):
    """Launches the jobs that the callback has checked; in place of a finished job, prints the lines that it printed.

    jobs: the words of each job. finished: the finished jobs by number. The callback sets both.
    """

    jobs: ClassVar[list[list[str]]] = []
    finished: ClassVar[dict[int, "FinishedJob"]] = {}

    def __init__(self, max_batch_size: int | None, params: dict[str, str] | None = None) -> None:
        self.max_batch_size = max_batch_size  # params is a part of jobs
        self.num_run, self.seconds = 0, 0.0  # of the jobs that this command has run

    config: Any  # of Hydra, once it is set up

    def setup(self, *, config: DictConfig, **context: Any) -> None:
        """Make the launcher."""
        from hydra.core.plugins import Plugins

        self.config = config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(config=config, **context)

    def sweep(self, arguments: list[str]) -> list[list[JobReturn]]:
        """Run the jobs in batches; raises the error of the first job that failed in a batch."""
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        size = self.max_batch_size or len(self.jobs)
        results: list[list[JobReturn]] = []
        for first in range(0, len(self.jobs), size):
            results.append(self._launch(range(first, min(first + size, len(self.jobs)))))
            for result in results[-1]:
                _ = result.return_value  # raises the job's error
        return results

    def _launch(self, numbers: range) -> list[JobReturn]:
        """Launch those of these jobs that have not finished.

        A launcher numbers the jobs that it gets consecutively. A parallel launcher therefore gets all jobs from the
        first to the last unfinished one; finished jobs in between notice that and end by themselves.
        """
        todo = [number for number in numbers if number not in self.finished]
        if todo and not self.config.hydra.launcher._target_.endswith("BasicLauncher"):
            todo = list(range(todo[0], todo[-1] + 1))
            pieces = {todo[0]: todo}
        else:
            pieces = {number: [number] for number in todo}
        results: list[JobReturn] = []
        for number in numbers:
            if number in pieces:
                begins = time.monotonic()
                results += self.launcher.launch([self.jobs[job] for job in pieces[number]], initial_job_idx=number)
                self._print_time_left(pieces[number], time.monotonic() - begins)
            elif number not in todo:
                self.finished[number].show(number, len(self.jobs))
        return results

    def _print_time_left(self, jobs: list[int], seconds: float) -> None:
        """Print how long the other jobs will take, if they take as long as those that have been run."""
        from rankbench.progress import duration

        self.num_run, self.seconds = self.num_run + len(jobs), self.seconds + seconds
        left = sum(number not in self.finished for number in range(jobs[-1] + 1, len(self.jobs)))
        if left:
            time_left = duration(self.seconds / self.num_run * left)
            print(f"{left} job{'s' * (left > 1)} left, about {time_left}", file=sys.stderr, flush=True)
