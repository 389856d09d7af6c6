"""The run that represents each preset (newest, complete, at the largest scale), and the presets' claims."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench.config.presets import presets
from rankbench.config.schema import BUDGETS
from rankbench.judging import CLAIMS, PAPERS, SECOND_SEED, is_outdated, judge, of_today, statements_of, with_holm
from rankbench.report.jobs import runs_in, status_of, varying_keys
from rankbench.report.page import as_typed_command, commits_of, recorded_command, records
from rankbench.runs.files import by_time
from rankbench.runs.records import or_empty, read_yaml
from rankbench.runs.run import Run
from rankbench.runs.tables import booleans_as_words, read_table

NOT_RUN = "not run"  # note of a preset without a run
OF_REPORT = re.compile(r"(sweep|differences)(_\d+)?")  # figures of final numbers, which every sweep has
NO_CLAIMS = "no claims"  # note of a preset that measures and judges nothing


@dataclass(frozen=True)
class PresetRun:
    """A folder that a preset's command has written: that of a run, a sweep, or analyses of fresh models."""

    preset: str
    folder: Path
    jobs: list[Path]
    budget: str
    claims: list[str]  # names of those that the preset judges
    complete: bool  # whether all jobs are finished and, where the preset has claims, judged
    written: float  # seconds since 1970
    is_second: bool  # whether its seeds begin at SECOND_SEED or later

    @property
    def rank(self) -> tuple[bool, int, bool, tuple[bool, int]]:
        """Sort key: of several runs of a preset, the last one (complete, largest scale, first seeds, newest) represents
        it."""
        return self.complete, BUDGETS.index(self.budget), not self.is_second, by_time(round(self.written * 1e9))

    @property
    def num_seeds(self) -> int:
        """The largest number, over finished jobs, of seeds that did not diverge."""
        of_jobs = [Run(job).summary().get("seeds", ()) for job in self.jobs if status_of(job) == "finished"]
        return max((len([seed for seed in seeds if seed["status"] != "diverged"]) for seeds in of_jobs), default=0)

    def figures(self) -> list[Path]:
        """Figures of the run, without those of OF_REPORT."""
        return [path for path in sorted(self.folder.glob("*.png")) if not OF_REPORT.fullmatch(path.stem)]

    @cached_property
    def verdicts(self) -> list[dict[str, Any]]:
        """Rows of verdicts.csv, each with the preset and its scale. If any row comes from an earlier test of its claim,
        the tables are judged again; without tables such a row is undecided."""
        path = self.folder / "verdicts.csv"
        rows = records(read_table(path)) if path.exists() else []
        if any(map(is_outdated, rows)):
            rows = self._judged_again() or rows
        return [{"preset": self.preset, "scale": self.budget, **row} for row in of_today(rows)]

    def _judged_again(self) -> list[dict[str, Any]]:
        """Verdicts of today's claims on the tables in the folder."""
        facets = [key for key in varying_keys(self.jobs)[0] if key not in ("run", "seed")] if len(self.jobs) > 1 else []
        rows = []
        for name in (name for name in self.claims if name in CLAIMS):
            if (path := self.folder / f"{CLAIMS[name].table}.csv").exists():
                table = read_table(path)
                keys = [key for key in facets if key in table]
                rows += judge(name, table.assign(**booleans_as_words(table[keys])), keys)
        return records(pd.DataFrame(rows))

    def about(self) -> dict[str, str]:
        """The run in words: command, commit, scale, and what is missing from it."""
        notes = [] if {status_of(job) for job in self.jobs} == {"finished"} else ["not all jobs finished"]
        notes += [] if self.verdicts else ["not judged" if self.claims else NO_CLAIMS]
        budget = "" if self.budget == "paper" else f" budget={self.budget}"
        return {
            "command": as_typed_command(recorded_command(self.jobs[0])) or presets()[self.preset] + budget,
            "commit": commits_of(self.jobs),
            "scale": self.budget,
            "finished": f"{datetime.fromtimestamp(self.written):%Y-%m-%d %H:%M}",
            "folder": str(self.folder),
            "note": "; ".join(notes),
        }


def best_runs(names: Iterable[str], outputs: Path, second: bool = False) -> dict[str, PresetRun]:
    """The run in `outputs` that represents each of these presets, where there is one.

    second: only complete runs with seeds from SECOND_SEED on; where a preset has no other, they also represent it.
    """
    best: dict[str, PresetRun] = {}
    for run in _preset_runs(outputs):
        if (run.is_second and run.complete) or not second:
            best[run.preset] = max(best.get(run.preset, run), run, key=lambda candidate: candidate.rank)
    return {name: best[name] for name in names if name in best}


def any_run(names: Collection[str], outputs: Path) -> bool:
    """Whether one of these presets has a run in `outputs`."""
    return any(run.preset in names for run in _preset_runs(outputs))


def across_presets(verdicts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims among the presets' verdicts, paper by paper, adjusted for their number.

    A claim that several presets judge has the settings of all of them, each then preceded by its preset.
    """
    num_presets = Counter(claim for claim, _ in {(row["claim"], row["preset"]) for row in verdicts})
    settings = [
        row | {"where": ", ".join(filter(None, (row["preset"], row["where"])))}
        if num_presets[row["claim"]] > 1
        else row
        for row in verdicts
    ]
    statements = with_holm(statements_of(settings))
    for statement in statements:
        for name, of_setting in (("presets", "preset"), ("scale", "scale")):
            statement[name] = ", ".join(dict.fromkeys(row[of_setting] for row in statement["settings"]))
    position = {paper: number for number, paper in enumerate(PAPERS)}
    return sorted(statements, key=lambda row: (row["kind"] == "check", position.get(row["paper"], len(position))))


def _preset_runs(outputs: Path) -> Iterator[PresetRun]:
    for folder in sorted([*outputs.glob("train/*"), *outputs.glob("analyze/*")]):
        jobs = runs_in(folder) if folder.is_dir() else []
        if jobs and (preset := _preset_of(folder, jobs[0])):
            files = [path for path in (folder / "verdicts.csv", jobs[0] / "summary.json") if path.exists()]
            config = or_empty(read_yaml, jobs[0] / "config.yaml")
            claims, seed = config.get("claims") or [], config.get("seed")
            yield PresetRun(
                preset,
                folder,
                jobs,
                config.get("budget") or "paper",
                claims,
                {status_of(job) for job in jobs} == {"finished"} and (not claims or (folder / "verdicts.csv").exists()),
                max((path.stat().st_mtime for path in files), default=0.0),
                isinstance(seed, int) and seed >= SECOND_SEED,
            )


def _preset_of(folder: Path, job: Path) -> str | None:
    """The preset that the command named, from Hydra's record; None if it named none."""
    for record in (folder / "multirun.yaml", job / ".hydra" / "hydra.yaml"):
        value = or_empty(read_yaml, record)
        for key in ("hydra", "runtime", "choices", "experiment"):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and value != "null":
            return value
    return None
