"""The page of a report: one self-contained HTML file that any browser can open from disk, without a network."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rankbench import __version__
from rankbench.config.keys import ConfigError
from rankbench.judging import measured_text, over_text
from rankbench.runs.files import write_text
from rankbench.runs.records import or_empty, read_json, read_yaml
from rankbench.runs.tables import short

Runs = dict[str, tuple[Path, str, dict[str, str]]]  # name: folder, status, values of the varied keys


def write_page(
    folder: Path, runs: Runs, seeds: pd.DataFrame, summary: pd.DataFrame, captions: dict[str, str], **content: Any
) -> None:
    """Write report.html from the runs and from the files that the report has written to the folder.

    seeds: the table of sweep.csv. captions: of the figures, by file name. content: what else templates/report.html.j2
    names. The template escapes everything that comes from files; the figures are our own SVG.
    """
    folders = [run for run, _, _ in runs.values()]
    keys = list(next(iter(runs.values()))[2])
    commands = {as_typed_command(recorded_command(run)) if folders[1:] else command_of(run) for run in folders}
    text = render(
        "report",
        title=_title(folders, seeds, keys),
        name=folder.resolve().name,
        repeat=commands.pop() if len(commands) == 1 else "",
        num_runs=len(runs),
        counts=Counter(status for _, status, _ in runs.values()),
        facts=_environment(folders),
        summary=records(summary),
        summary_axes=[] if summary.empty else list(summary.columns[: summary.columns.get_loc("num_seeds") + 1]),
        summary_values=[name.removesuffix("_mean") for name in summary if name.endswith("_mean")],
        runs=[_run(name, *run, seeds, folder) for name, run in runs.items()],
        keys=keys,
        seeds=records(seeds),
        figures=[
            (name, caption, Markup(_inline(folder / f"{name}.svg", number)))
            for number, (name, caption) in enumerate(captions.items())
        ],
        files=sorted(path.name for path in folder.glob("*.csv")),
        **content,
    )
    write_text(folder / "report.html", text)


def render(kind: str, **content: Any) -> str:
    """Render the page of this kind from its template, which escapes texts in the content."""
    loader = PackageLoader("rankbench.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"short": short, "measured_text": measured_text, "over_text": over_text}
    environment.filters["in_words"] = lambda name: name if "." in name else name.replace("_", " ")
    return environment.get_template(f"{kind}.html.j2").render(version=__version__, **content)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts, with None for empty cells."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _title(folders: list[Path], seeds: pd.DataFrame, keys: list[str]) -> str:
    """Title of the page: the runs' presets, or else their tasks and models; their budget; the keys that vary."""
    words = [word.partition("=") for folder in folders for word in recorded_command(folder)]
    presets, budgets = ([value for key, _, value in words if key == name] for name in ("experiment", "budget"))
    tasks = [f"{task} ({model})" for task, model in zip(seeds.task, seeds.model, strict=True)]
    what = _named(presets if len(presets) == len(folders) else tasks)
    budget = f" at budget={_named(budgets)}" if len(budgets) == len(folders) else ""
    return f"{what}{budget}{' by ' if keys else ''}{_named(keys)}"


def _named(names: Iterable[str], most: int = 3) -> str:
    """The different names; of more than `most`, the first ones and the number of the others."""
    different = list(dict.fromkeys(names))
    return ", ".join(different[:most]) + (f" and {len(different) - most} more" if len(different) > most else "")


def _run(name: str, run_folder: Path, status: str, values: dict[str, str], seeds: pd.DataFrame, folder: Path) -> dict:
    rows_of_run = seeds[seeds.run.astype(str) == name]
    means = rows_of_run.reindex(columns=["test_accuracy", "test_loss"]).apply(pd.Series.mean).dropna().to_dict()
    return {
        "name": name,
        "link": link_to(run_folder, folder),
        "status": status,
        "values": values,
        "num_seeds": len(rows_of_run),
        "diverged": int((rows_of_run.status == "diverged").sum()),
        "means": means,
        "command": command_of(run_folder),
    }


def link_to(target: Path, folder: Path) -> str:
    """Relative address of a folder for a page in another folder; quoted, so that no name is read as a URL scheme."""
    return quote(os.fsencode(os.path.relpath(target.resolve(), folder.resolve()).replace(os.sep, "/"))) + "/"


def command_of(run_folder: Path) -> str:
    """The command line that repeats a run in a new folder; empty if the run has no record.

    For a job of a sweep, its own overrides: environment.json holds the command of the whole sweep.
    """
    words = recorded_command(run_folder)
    overrides = run_folder / ".hydra" / "overrides.yaml"
    if words and (run_folder.parent / "multirun.yaml").exists() and overrides.exists():
        try:
            words = [words[0], *map(str, read_yaml(overrides, list))]
        except ConfigError:
            return ""
    return as_typed_command(words)


def recorded_command(run_folder: Path) -> list[str]:
    """The words of the command that made a run, or the whole sweep of a job; empty if the run has no record."""
    recorded = or_empty(read_json, run_folder / "environment.json").get("command")
    return [str(word) for word in recorded] if isinstance(recorded, list) else []


def as_typed_command(words: list[str]) -> str:
    """The words of a command as a line for a shell, without what rankbench itself passes to Hydra, and without the
    folder, where the run would count as already trained."""
    if not words:
        return ""
    kept = [word for word in words[1:] if not word.startswith(("hydra.job.config.", "out="))]
    program = words[0] if words[0].startswith("rankbench ") else shlex.quote(words[0])
    return " ".join([program, *map(shlex.quote, kept)])


def commits_of(folders: list[Path]) -> str:
    """The commits of rankbench with which the runs were begun and continued."""
    return _all_of(_commit(record) for folder in folders for record in _records_of(folder))


def _environment(folders: list[Path]) -> dict[str, str]:
    """The environment that made the runs: the first run's record, and the values that differ in other runs, or where
    a run was continued."""
    records = [record for folder in folders for record in _records_of(folder)]
    if not records:
        return {}
    records.sort(key=lambda record: str(record.get("started")))
    facts = {"first run": str(records[0].get("started", ""))}
    facts["rankbench commit"] = _all_of(map(_commit, records))
    facts["device"] = _all_of(record.get("gpu") or record.get("device") for record in records)
    for name in ("precision", "threads", "platform", "python"):
        facts[name] = _all_of(record.get(name) for record in records)
    packages = [record["packages"] for record in records if isinstance(record.get("packages"), dict)]
    for name in dict.fromkeys(name for versions in packages for name in versions):
        facts[name] = _all_of(versions.get(name) for versions in packages)
    return facts


def _records_of(folder: Path) -> list[dict[str, Any]]:
    """The environment that a run began with, then those that it was continued with; [] without a record."""
    continued = or_empty(read_json, folder / "continued.json", list)
    records = (or_empty(read_json, folder / "environment.json"), *continued)
    return [record for record in records if record and isinstance(record, dict)]


def _all_of(values: Any) -> str:
    return "; ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "not recorded"


def _commit(record: dict) -> str | None:
    git = record.get("git")
    if not isinstance(git, dict):
        return None
    changes = f" with changes {str(record.get('source', ''))[:6]}".rstrip() if git.get("dirty") else ""
    return f"{str(git.get('commit'))[:12]}{changes}"


def _inline(path: Path, number: int) -> str:
    """An SVG file as an element of a page, without prolog and metadata, with ids that are unique on the page, and as
    wide as the page or twice its own width."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="f{number}-', svg)
    svg = svg.replace("url(#", f"url(#f{number}-").replace('href="#', f'href="#f{number}-')
    return re.sub(
        r'<svg (.*?)width="([\d.]+)pt" height="[\d.]+pt"',
        r'<svg role="img" \1style="max-width: calc(2 * \2pt)"',
        svg,
        count=1,
    )
