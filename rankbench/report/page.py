"""The page of a report: one HTML file that holds all it shows, for any browser, from a disk, without a network."""

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from rankbench import __version__
from rankbench.claims import over_text, published
from rankbench.runs.files import write_text
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
    """Write report.html from the runs and from what the report has written to the folder.

    captions: of the figures, by file name. follows: the keys that go with a varied one. Everything that comes from
    files is escaped by the template; the figures are our own SVG.
    """
    statuses = [status for _, status, _ in runs.values()]
    verdicts = records(read_table(folder / "verdicts.csv")) if judged else []
    verdicts = [row | {"over": over_text(row)} for row in verdicts]
    text = render(
        "report",
        folder,
        num_runs=len(runs),
        counts={status: statuses.count(status) for status in sorted(set(statuses), key=statuses.index)},
        facts=_environment([place for place, _, _ in runs.values()]),
        follows=follows,
        verdicts=[row for row in verdicts if row["kind"] == "claim"],
        checks=[row for row in verdicts if row["kind"] == "check"],
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
    """The page of this kind for a folder, from its template; texts in the content are escaped."""
    loader = PackageLoader("rankbench.report", "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["short"] = short
    template = environment.get_template(f"{kind}.html.j2")
    return template.render(title=folder.resolve().name, version=__version__, **content)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, None where a cell is empty."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def _run(name: str, place: Path, status: str, values: dict[str, str], seeds: pd.DataFrame, folder: Path) -> dict:
    mine = seeds[seeds.run.astype(str) == name]
    means = {
        column: float(mine[column].mean())
        for column in ("test_accuracy", "test_loss")
        if column in mine and mine[column].notna().any()
    }
    return {
        "name": name,
        "link": link_to(place, folder),
        "status": status,
        "values": values,
        "num_seeds": len(mine),
        "diverged": int((mine.status == "diverged").sum()),
        "means": means,
        "command": command_of(place),
    }


def link_to(place: Path, folder: Path) -> str:
    """The address of a folder for a page that lies in another one: quoted, so that no name becomes a scheme."""
    return quote(os.path.relpath(place.resolve(), folder.resolve()).replace(os.sep, "/")) + "/"


def command_of(place: Path) -> str:
    """The command line that repeats a run, into a folder of its own; empty where no record is left.

    Of a sweep's job, its own words: environment.json holds the whole sweep's.
    """
    recorded = _json(place / "environment.json").get("command")
    words = [str(word) for word in recorded] if isinstance(recorded, list) and recorded else []
    if not words:
        return ""
    overrides = place / ".hydra" / "overrides.yaml"
    if (place.parent / "multirun.yaml").exists() and overrides.exists():
        try:
            own = yaml.safe_load(overrides.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError):
            return ""
        words = [words[0], *map(str, own if isinstance(own, list) else [])]
    # what rankbench itself hands to Hydra, and the folder: the run there would be taken for trained already
    kept = [word for word in words[1:] if not word.startswith(("hydra.job.config.", "out="))]
    program = words[0] if words[0].startswith("rankbench ") else shlex.quote(words[0])
    return " ".join([program, *map(shlex.quote, kept)])


def _environment(places: list[Path]) -> dict[str, str]:
    """What made the runs: the first run's record, and what differs from it in others."""
    records = [record for place in places if (record := _json(place / "environment.json"))]
    if not records:
        return {}
    records.sort(key=lambda record: str(record.get("started")))
    facts = {"first run": str(records[0].get("started", ""))}
    for name, of in (
        ("rankbench commit", _commit),
        ("device", lambda record: record.get("gpu") or record.get("device")),
        ("precision", lambda record: record.get("precision")),
        ("threads", lambda record: record.get("threads")),
        ("platform", lambda record: record.get("platform")),
        ("python", lambda record: record.get("python")),
    ):
        facts[name] = _all_of(of(record) for record in records)
    packages = [record["packages"] for record in records if isinstance(record.get("packages"), dict)]
    for name in dict.fromkeys(name for one in packages for name in one):
        facts[name] = _all_of(one.get(name) for one in packages)
    return facts


def _all_of(values: Any) -> str:
    return "; ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "not recorded"


def _commit(record: dict) -> str | None:
    git = record.get("git")
    if not isinstance(git, dict):
        return None
    return f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"


def _json(path: Path) -> dict[str, Any]:
    """What a run recorded; empty where it is missing or damaged: a page is worth having without it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _inline(path: Path, number: int) -> str:
    """An SVG file as an element of a page: no prolog, no metadata, names of its own."""
    svg = path.read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="f{number}-', svg)
    svg = svg.replace("url(#", f"url(#f{number}-").replace('href="#', f'href="#f{number}-')
    return re.sub(r"<svg ", '<svg role="img" ', svg, count=1)
