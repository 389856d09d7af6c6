"""The scoreboard: every preset that has been run, with its figures, verdicts and published numbers."""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench.claims import measured_text, over_text
from rankbench.config import BUDGETS, conf_dir
from rankbench.keys import ConfigError, unknown
from rankbench.report.page import link_to, records, render
from rankbench.report.report import runs_in, status_of
from rankbench.runs.files import write_text
from rankbench.runs.records import read_yaml
from rankbench.runs.run import OUTPUTS
from rankbench.runs.tables import latex, markdown, read_table, short, write_table

EVERY = "all"
COLUMNS = ["preset", "budget", "kind", "claim", "where", "outcome", "measured", "low95", "high95", "interval"]
COLUMNS += ["is_bound", "num_repeats", "repeats", "published", "claimed", "reason", "control", "statement", "source"]
COLUMNS += ["folder", "finished"]
SHORT = ["claim", "where", "outcome", "measured", "published", "claimed", "over", "reason"]  # columns for readers


@dataclass(frozen=True)
class PresetRun:
    """A folder that a preset's command has written: that of a run, a sweep, or analyses of fresh models."""

    preset: str
    folder: Path
    budget: str
    complete: bool
    written: float  # seconds since 1970

    @property
    def rank(self) -> tuple[bool, int, float]:
        """Sort key: of several runs of a preset the scoreboard shows the last (complete, largest scale, newest)."""
        return self.complete, BUDGETS.index(self.budget), self.written

    def figures(self) -> list[Path]:
        """Figures of the run, without those of final numbers that every sweep has."""
        return [path for path in sorted(self.folder.glob("*.png")) if not re.fullmatch(r"sweep(_\d+)?", path.stem)]

    def verdicts(self) -> pd.DataFrame:
        """Rows of the run on the scoreboard; if nothing was judged, one row that says so."""
        path = self.folder / "verdicts.csv"
        table = read_table(path) if path.exists() else pd.DataFrame([{"outcome": "not judged"}])
        if "claim" in table and "control" not in table:
            table = pd.DataFrame([{"outcome": "not judged", "reason": "judged without controls: report it again"}])
        return table.assign(
            preset=self.preset,
            budget=self.budget,
            folder=str(self.folder),
            finished=f"{datetime.fromtimestamp(self.written):%Y-%m-%d %H:%M}",
        )


def presets() -> dict[str, str]:
    """The shipped presets by name, each with its command, which is the first comment line of its file."""
    commands = {}
    for path in sorted((conf_dir() / "experiment").glob("*.yaml")):
        comments = [line[1:].strip() for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
        command = next((line for line in comments if line.startswith("rankbench ")), "")
        commands[path.stem] = command.split("  ")[0]
    return commands


def check_experiment(name: str) -> None:
    """Raise ConfigError unless the name is that of a preset or `all`."""
    if name != EVERY and name not in presets():
        raise ConfigError(unknown("experiment", name, [EVERY, *presets()]))


def scoreboard(experiment: str, folder: Path, outputs: Path = OUTPUTS) -> list[str]:
    """Write scoreboard.csv, .md, .tex and .html of one preset or `all` from the runs in `outputs`.

    Each preset has its newest complete run at the largest scale, or a row saying that it has not been run. Returns
    lines for the reader; ConfigError if no preset has been run.
    """
    selected = {name: command for name, command in presets().items() if experiment in (EVERY, name)}
    best: dict[str, PresetRun] = {}
    for run in _preset_runs(outputs):
        if run.preset in selected and (run.preset not in best or run.rank > best[run.preset].rank):
            best[run.preset] = run
    if not best:
        first = selected.get(experiment) or "rankbench train experiment=demo"
        raise ConfigError(f"experiment={experiment}: not run yet under {outputs.resolve()}; run it with `{first}`")
    parts = []
    for name in selected:
        if name in best:
            parts.append(best[name].verdicts())
        else:
            parts.append(pd.DataFrame([{"preset": name, "outcome": "not run"}]))
    table = pd.concat([part.dropna(axis=1, how="all") for part in parts], ignore_index=True).reindex(columns=COLUMNS)
    write_table(table, folder / "scoreboard.csv")
    table = table.assign(over=["" if row["num_repeats"] is None else over_text(row) for row in records(table)])
    readable = _readable(table)
    write_text(folder / "scoreboard.md", "\n".join(_sections(readable)))
    write_text(folder / "scoreboard.tex", latex(readable[["preset", *SHORT]]))
    counts = table.outcome.value_counts()
    boards = [_board(name, command, best.get(name), table, folder) for name, command in selected.items()]
    write_text(folder / "scoreboard.html", render("scoreboard", folder, boards=boards, counts=counts.to_dict()))
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    lines = [f"{len(best)} of {len(selected)} presets run; {outcomes}", *map(_line, records(table))]
    return [*lines, f"-> {folder / 'scoreboard.csv'}, .md and .tex", f"-> {folder / 'scoreboard.html'}"]


def _readable(table: pd.DataFrame) -> pd.DataFrame:
    """Put the measured number and its interval into one text, for readers."""
    measured = [
        f"≤ {short(row.measured)}"
        if row.is_bound is True
        else f"{short(row.measured)} [{short(row.low95)}, {short(row.high95)}]"
        if pd.notna(row.low95)
        else short(row.measured)
        for row in table.itertuples()
    ]
    return table.assign(measured=measured)


def _sections(readable: pd.DataFrame) -> Iterator[str]:
    """Markdown: a heading for each preset with its scale, then its claims, then its checks of the tool."""
    for preset, rows in readable.groupby("preset", sort=False):
        scale = rows.budget.iloc[0]
        yield f"## {preset}{f' ({scale})' if pd.notna(scale) else ''}\n"
        for kind, of_kind in rows.groupby("kind", sort=False, dropna=False):
            if kind == "check":
                yield "Checks of the tool:\n"
            columns = SHORT if of_kind.claim.notna().any() else ["outcome", "reason"]
            yield markdown(of_kind[columns])


def _preset_runs(outputs: Path) -> Iterator[PresetRun]:
    for folder in sorted([*outputs.glob("train/*"), *outputs.glob("analyze/*")]):
        jobs = runs_in(folder) if folder.is_dir() else []
        if jobs and (preset := _preset_of(folder, jobs[0])):
            files = [path for path in (folder / "verdicts.csv", jobs[0] / "summary.json") if path.exists()]
            yield PresetRun(
                preset,
                folder,
                _yaml(jobs[0] / "config.yaml").get("budget") or "paper",
                {status_of(job) for job in jobs} == {"finished"},
                max((path.stat().st_mtime for path in files), default=0.0),
            )


def _preset_of(folder: Path, job: Path) -> str | None:
    """The preset that the command named, from Hydra's record; None if it named none."""
    for record in (folder / "multirun.yaml", job / ".hydra" / "hydra.yaml"):
        value = _yaml(record)
        for key in ("hydra", "runtime", "choices", "experiment"):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str) and value != "null":
            return value
    return None


def _yaml(path: Path) -> dict[str, Any]:
    try:
        return read_yaml(path)
    except (OSError, ConfigError):
        return {}


def _board(name: str, command: str, run: PresetRun | None, table: pd.DataFrame, folder: Path) -> dict[str, Any]:
    """Content of the page for one preset."""
    rows = records(table[table.preset == name])
    if run is None:
        return {"name": name, "command": command, "rows": rows, "run": None, "figures": []}
    figures = [
        (path.stem, f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}") for path in run.figures()
    ]
    about = {"link": link_to(run.folder, folder), "budget": run.budget, "complete": run.complete}
    about["finished"] = rows[0]["finished"]
    return {"name": name, "command": command, "rows": rows, "run": about, "figures": figures}


def _line(row: dict[str, Any]) -> str:
    if row["claim"] is None:
        reason = f": {row['reason']}" if row["reason"] else ""
        return f"{row['outcome']:<10} {row['preset']}{reason}"
    where = f" [{row['where']}]" if row["where"] else ""
    beside = "" if row["published"] is None else f", published {row['published']:g}"
    return f"{row['outcome']:<10} {row['preset']}: {row['claim']}{where}: {measured_text(row)}{beside}"
