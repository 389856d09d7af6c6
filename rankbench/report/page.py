"""The page of a report: one self-contained HTML file that any browser can open from disk, without a network."""

import os
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rankbench import __version__
from rankbench.claims import measured_text, over_text, published, statements_of
from rankbench.keys import ConfigError
from rankbench.runs.files import write_text
from rankbench.runs.records import read_json, read_yaml
from rankbench.runs.tables import read_table, short

Runs = dict[str, tuple[Path, str, dict[str, str]]]  # name: folder, status, values of the varied keys


def write_page(
    folder: Path,
    runs: Runs,
    tables: dict[str, pd.DataFrame],
    captions: dict[str, str],
    figure_published: str | None,
    follows: dict[str, list[str]],
    judged: bool,
) -> None:
    """Write report.html from the runs and from the files that the report has written to the folder.

    captions: captions of the figures, by file name. follows: for each varied key, the keys that vary with it. The
    template escapes everything that comes from files; the figures are our own SVG.
    """
    statuses = [status for _, status, _ in runs.values()]
    statements = statements_of(records(read_table(folder / "verdicts.csv"))) if judged else []
    text = render(
        "report",
        folder,
        num_runs=len(runs),
        counts={status: statuses.count(status) for status in sorted(set(statuses), key=statuses.index)},
        facts=_environment([run for run, _, _ in runs.values()]),
        follows=follows,
        claims=[row for row in statements if row["kind"] == "claim"],
        checks=[row for row in statements if row["kind"] == "check"],
        summary=records(tables["summary"]),
        runs=[_run(name, *run, tables["seeds"], folder) for name, run in runs.items()],
        keys=list(next(iter(runs.values()))[2]),
        seeds=records(tables["seeds"]),
        figures=[
            (name, caption, Markup(_inline(folder / f"{name}.svg", number)))
            for number, (name, caption) in enumerate(captions.items())
        ],
        published=records(published(figure_published)) if figure_published else [],
        files=sorted(path.name for path in folder.glob("*.csv")),
    )
    write_text(folder / "report.html", text)


def render(kind: str, folder: Path, **content: Any) -> str:
    """Render the page of this kind for a folder from its template, which escapes texts in the content."""
    loader = PackageLoader("rankbench.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"short": short, "measured_text": measured_text, "over_text": over_text}
    template = environment.get_template(f"{kind}.html.j2")
    return template.render(title=folder.resolve().name, version=__version__, **content)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as dicts, with None for empty cells."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _run(name: str, run_folder: Path, status: str, values: dict[str, str], seeds: pd.DataFrame, folder: Path) -> dict:
    rows_of_run = seeds[seeds.run.astype(str) == name]
    means = {
        column: float(rows_of_run[column].mean())
        for column in ("test_accuracy", "test_loss")
        if column in rows_of_run and rows_of_run[column].notna().any()
    }
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
    return quote(os.path.relpath(target.resolve(), folder.resolve()).replace(os.sep, "/")) + "/"


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
    recorded = _json(run_folder / "environment.json").get("command")
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
    """The commits of rankbench that made the runs."""
    return _all_of(_commit(_json(folder / "environment.json")) for folder in folders)


def _environment(folders: list[Path]) -> dict[str, str]:
    """The environment that made the runs: the first run's record, and the values of other runs that differ."""
    records = [record for folder in folders if (record := _json(folder / "environment.json"))]
    if not records:
        return {}
    records.sort(key=lambda record: str(record.get("started")))
    facts = {"first run": str(records[0].get("started", ""))}
    for name, get in (
        ("rankbench commit", _commit),
        ("device", lambda record: record.get("gpu") or record.get("device")),
        ("precision", lambda record: record.get("precision")),
        ("threads", lambda record: record.get("threads")),
        ("platform", lambda record: record.get("platform")),
        ("python", lambda record: record.get("python")),
    ):
        facts[name] = _all_of(get(record) for record in records)
    packages = [record["packages"] for record in records if isinstance(record.get("packages"), dict)]
    for name in dict.fromkeys(name for versions in packages for name in versions):
        facts[name] = _all_of(versions.get(name) for versions in packages)
    return facts


def _all_of(values: Any) -> str:
    return "; ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "not recorded"


def _commit(record: dict) -> str | None:
    git = record.get("git")
    if not isinstance(git, dict):
        return None
    return f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"


def _json(path: Path) -> dict[str, Any]:
    """A run's record; empty if it is missing or damaged, because a page is useful without it."""
    try:
        return read_json(path)
    except (OSError, ConfigError):
        return {}


def _inline(path: Path, number: int) -> str:
    """An SVG file as an element of a page, without prolog and metadata, and with ids that are unique on the page."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="f{number}-', svg)
    svg = svg.replace("url(#", f"url(#f{number}-").replace('href="#', f'href="#f{number}-')
    return re.sub(r"<svg ", '<svg role="img" ', svg, count=1)
