"""A sweep: a folder with a folder for each job, and the list of the jobs of its command."""

from dataclasses import asdict, dataclass
from pathlib import Path

from rankbench.config.keys import ConfigError
from rankbench.runs.files import write_json
from rankbench.runs.records import read_json

JOBS = "jobs.json"


@dataclass(frozen=True)
class Job:
    """One job: the name of its folder, and its own overrides."""

    folder: str
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Sweep:
    """The folder of a sweep whose jobs are known beforehand; a search (Optuna) has no such list."""

    folder: Path

    def jobs(self) -> list[Job]:
        """The jobs of the command, in order; empty if the list is missing or not readable."""
        try:
            listed = read_json(self.folder / JOBS, list)
            jobs = [Job(str(job["folder"]), tuple(map(str, job["overrides"]))) for job in listed]
        except (OSError, ValueError, TypeError, KeyError):
            return []
        return jobs if all(Path(job.folder).name == job.folder for job in jobs) else []  # folders of the sweep's own

    def missing(self) -> list[Job]:
        """The jobs that have not begun."""
        return [job for job in self.jobs() if not (self.folder / job.folder).exists()]

    def check_same(self, jobs: list[Job]) -> None:
        """Raise ConfigError if the folder holds a sweep whose jobs have other folders, which would mix two sweeps."""
        for number, (old, new) in enumerate(zip(self.jobs(), jobs, strict=False)):
            if old.folder != new.folder:
                raise ConfigError(
                    f"out={self.folder}: holds another sweep, whose job {number} is {old.folder} and not "
                    f"{new.folder}; give the same command to continue it, or another folder with out=<folder>"
                )

    def list_jobs(self, jobs: list[Job]) -> None:
        """Make the folder and write the list of its jobs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / JOBS, [asdict(job) for job in jobs])
