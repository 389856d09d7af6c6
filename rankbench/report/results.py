"""The results as Markdown pages: an index, a page for each paper, and the tables that their numbers come from.

What the pages say of a preset stays until a complete run of it is available, so that results can be gathered in parts.
Everything else except the folder `notes` is rewritten: notes/<preset>.md is a person's text about a preset,
notes/index.md one about all of them.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from rankbench.config.keys import ConfigError
from rankbench.config.presets import claims_of
from rankbench.judging import (
    NOT_JUDGED,
    OUTCOMES,
    PAPERS,
    SECOND_SEED,
    by_paper,
    grouped,
    is_number,
    number_text,
    of_today,
    over_text,
    table_of,
)
from rankbench.plots.pictures import png_within
from rankbench.report.page import records
from rankbench.report.preset_runs import NO_CLAIMS, NOT_RUN, PresetRun
from rankbench.report.scales import BOTH, LAPTOP, both_scales, in_words, keep_laptop
from rankbench.runs.files import read_text, replacing, write_text
from rankbench.runs.tables import markdown, read_table, short, write_table

BEGIN = "<!-- Written by `rankbench report experiment=all`"  # of every page, also of those by older versions
MARK = f"{BEGIN}; the hand-written texts are in notes/. -->"
INDEX = "README.md"
BOARD = "scoreboard.html"
SECOND = "second_seeds.csv"  # a preset's verdicts of its second run
LARGEST = 200_000  # bytes of a figure
READING = (
    "A claim is\n\n"
    "- *held* if in every setting the 95 % interval over seeds lies on the claimed side of its threshold, and if it "
    "fails in its control, a set-up in which it is false;\n"
    "- *partly held* if it is held in some settings, *failed* if it fails in some and is held in none, else "
    "*undecided*;\n"
    "- *held after Holm* if it still holds when all claims of its paper are tested together;\n"
    f"- *replicated* if a second run, on seeds from {SECOND_SEED} on, has the same outcome in every setting that was "
    "judged in both. A setting that is held in one run and failed in the other is undecided."
)

# Columns of a paper's table of claims
COLUMNS = ["claim", "outcome", "num_held", "num_settings", "held_after_holm", "replicated", "threshold", "distance"]
COLUMNS += ["scale"]
RENAMED = {"num_held": "settings held", "num_settings": "settings", "held_after_holm": "held after Holm"}
THRESHOLDS = (
    "threshold: where it is neither the sign of a difference nor a number of the source, it is ours. distance: of the "
    "number that speaks most against the claim from the threshold, negative beyond it."
)


def check_pages(folder: Path) -> None:
    """Raise ConfigError if a page would overwrite a file that this command did not write."""
    for name in (INDEX, *(_page_of(paper) for paper in PAPERS)):
        if (folder / name).exists() and not read_text(folder / name).startswith(BEGIN):
            raise ConfigError(f"pages={folder}: {name} there was not written by this command; give another folder")


class KnownResult(NamedTuple):
    """A preset's result on the pages: its row of presets.csv, and the rows of its verdicts.csv."""

    board: dict[str, Any]
    verdicts: list[dict[str, Any]]


def known_before(folder: Path, names: Collection[str]) -> dict[str, KnownResult]:
    """The results of these presets on the folder's pages, by preset; presets without one are left out, and so are
    claims that a preset no longer has. A verdict whose claim is tested differently today is undecided."""
    if not (folder / "presets.csv").exists():
        return {}
    known = {}
    for board in records(read_table(folder / "presets.csv")):
        name = board["preset"]
        if name not in names or board["note"] == NOT_RUN:
            continue
        verdicts = of_today(records(read_table(folder / "presets" / name / "verdicts.csv")))
        claims = claims_of(name)
        known[name] = KnownResult(board, [row for row in verdicts if claims is None or row["claim"] in claims])
    return known


def known_second(folder: Path, preset: str) -> list[dict[str, Any]]:
    """The verdicts of a preset's second run on the folder's pages."""
    path = folder / "presets" / preset / SECOND
    return of_today(records(read_table(path))) if path.exists() else []


def drop_old_claims(folder: Path, known: dict[str, KnownResult]) -> None:
    """Take the claims that a preset no longer has out of its verdicts.csv on the folder's pages."""
    for name, result in known.items():
        path, kept = folder / "presets" / name / "verdicts.csv", {row["claim"] for row in result.verdicts}
        table = read_table(path)
        if not set(table.claim) <= kept:
            write_table(table[table.claim.isin(kept)], path)


def write_pages(
    folder: Path,
    statements: list[dict[str, Any]],
    boards: list[dict[str, str]],
    runs: dict[str, PresetRun],
    second: dict[str, PresetRun],
) -> Path:
    """Write the pages; return the index. statements: of all presets. boards: what is known of each preset's run. runs:
    those whose figures and tables replace the pages' own. second: second runs, whose verdicts replace the pages'."""
    folder.mkdir(parents=True, exist_ok=True)
    home = {
        row["preset"]: statement["paper"]
        for statement in reversed(statements)
        for row in reversed(statement["settings"])
    }
    write_table(table_of(statements), folder / "statements.csv")
    about = pd.DataFrame([{**board, "paper": home.get(board["preset"])} for board in boards])
    about = about.drop(columns="folder", errors="ignore")  # of no use elsewhere
    write_table(about, folder / "presets.csv")
    kept = {board["preset"] for board in boards if board["note"] != NOT_RUN} | runs.keys()
    for old in (folder / "presets").glob("*"):
        if old.name not in kept:
            _remove_old(old, spared=())
    for preset, run in runs.items():  # what is new is written first, so that an interrupted call loses nothing
        keep_laptop(folder / "presets" / preset, run.budget)
        written = _copy(run, folder / "presets" / preset)
        _remove_old(folder / "presets" / preset, spared=(SECOND, LAPTOP, *written))
    for preset, run in second.items():
        (folder / "presets" / preset).mkdir(parents=True, exist_ok=True)
        write_table(pd.DataFrame(run.verdicts or {"claim": []}), folder / "presets" / preset / SECOND)
    if len(both := both_scales(folder)):
        write_table(both, folder / BOTH)
    papers = grouped(statements, lambda row: row["paper"])
    for paper in dict.fromkeys([*PAPERS, *papers]):
        if paper in papers:
            at_home = [board for board in boards if home.get(board["preset"]) == paper]
            write_text(folder / _page_of(paper), "\n".join(_paper_page(paper, papers[paper], at_home, home, folder)))
        else:
            (folder / _page_of(paper)).unlink(missing_ok=True)
    write_text(folder / INDEX, index_of(folder))
    claims = [row["outcome"] for row in statements if row["kind"] == "claim"]
    done = [board for board in boards if board["note"] != NOT_RUN]
    write_text(folder / "claims.svg", badge("claims held", f"{claims.count(OUTCOMES[0])} of {len(claims)}"))
    write_text(folder / "presets.svg", badge("presets run", f"{len(done)} of {len(boards)}"))
    return folder / INDEX


def badge(label: str, value: str) -> str:
    """A badge for the README as SVG: a word on grey, a value on blue."""
    left, right = (7 * len(text) + 12 for text in (label, value))  # 7: about the width of a letter at 11 px
    middle = (left / 2, left + right / 2)
    texts = "".join(f'<text x="{x}" y="14">{text}</text>' for x, text in zip(middle, (label, value), strict=True))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {value}"><rect width="{left + right}" height="20" rx="3" fill="#0b5cad"/>'
        f'<path d="M3 0h{left - 3}v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3" fill="#555"/>'
        f'<g fill="#fff" text-anchor="middle" font-family="DejaVu Sans,Verdana,sans-serif" font-size="11">{texts}</g>'
        "</svg>\n"
    )


def index_of(folder: Path) -> str:
    """Text of the index page, from statements.csv and presets.csv in the folder."""
    statements, boards = (records(read_table(folder / f"{name}.csv")) for name in ("statements", "presets"))
    claims = by_paper(statements)
    rows = [counted(f"[{paper}]({_page_of(paper)})", of_paper) for paper, of_paper in claims.items()]
    rows.append(counted("all", [row for of_paper in claims.values() for row in of_paper]))
    checks = [row["outcome"] for row in statements if row["kind"] == "check"]
    not_judged = [row["claim"] for row in statements if NOT_JUDGED in row["reading"]]
    table = pd.DataFrame([_about(board) for board in boards if board["note"] != NOT_RUN])
    unrun = [board["preset"] for board in boards if board["note"] == NOT_RUN]
    without = ", ".join(board["preset"] for board in boards if NO_CLAIMS in (board["note"] or ""))
    parts = [
        MARK,
        "# Results\n",
        f"{len(table)} of {len(boards)} presets have been run{without and f'; without claims: {without}'}.\n",
        f"{READING}\n",
        f"[scoreboard.html]({BOARD}) is a page to search, with all claims and figures. By paper:\n",
        "".join(f"- [{paper}]({_page_of(paper)}): {_counts_in_words(of)}\n" for paper, of in claims.items()),
        _folded("These numbers in a table", markdown(pd.DataFrame(rows))),
        *([f"Checks of the tool: {checks.count('passed')} of {len(checks)} passed.\n"] if checks else []),
        *([f"In some setting {NOT_JUDGED}: {', '.join(not_judged)}.\n"] if not_judged else []),
        *_note(folder, "index"),
        *filter(None, [in_words(both_scales(folder))]),
        "## Presets\n",
        _folded(f"{len(table)} presets: scale, date and commit of each", markdown(table)),
        *([f"Not run: {', '.join(unrun)}.\n"] if unrun else []),
        "The tables behind the pages: [statements.csv](statements.csv), a row for each claim; "
        "[presets.csv](presets.csv); in presets/ the settings and final numbers of each preset.\n",
    ]
    return "\n".join(parts)


def counted(name: str, claims: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the totals by paper: its claims by outcome."""
    outcomes = [row["outcome"] for row in claims]
    replicated = [row["replicated"] for row in claims if row["replicated"]]
    counts: dict[str, Any] = {"paper": name, "claims": len(claims)}
    counts |= {outcome: outcomes.count(outcome) for outcome in OUTCOMES}
    counts["held after Holm"] = [row["held_after_holm"] for row in claims].count("yes")
    counts["replicated"] = f"{replicated.count('yes')} of {len(replicated)}" if replicated else ""
    scales = dict.fromkeys(scale for row in claims for scale in row["scale"].split(", "))
    return counts | {"scale": ", ".join(scales)}


def _about(board: dict[str, Any]) -> dict[str, Any]:
    page = f"[{board['preset']}]({_page_of(board['paper'])}#{board['preset']})" if board["paper"] else board["preset"]
    return {"preset": page, **{key: board[key] for key in ("scale", "finished", "commit", "note")}}


def threshold_text(row: dict[str, Any]) -> str:
    """What a statement claims of its number, and whether the threshold is ours or the source's."""
    return row["claimed"] + {"ours": " (ours)", "source": " (the source's)"}.get(row["threshold"], "")


def slug(paper: str) -> str:
    """A paper's name as part of an address."""
    return re.sub(r"\W+", "_", paper.lower())


def _page_of(paper: str) -> str:
    """Name of a paper's page."""
    return f"{slug(paper)}.md"


def _remove_old(folder: Path, spared: Collection[str]) -> None:
    """Remove a preset's tables and figures of an earlier call, except for the files that are spared."""
    for old in [*folder.glob("*.png"), *folder.glob("*.csv")]:
        if old.name not in spared:
            old.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _copy(run: PresetRun, folder: Path) -> list[str]:
    """Copy a preset's figures and small tables, by which its numbers can be checked; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["verdicts.csv"]
    write_table(pd.DataFrame(run.verdicts or {"claim": []}), folder / "verdicts.csv")
    if (run.folder / "summary.csv").exists():
        write_text(folder / "summary.csv", read_text(run.folder / "summary.csv"))
        names.append("summary.csv")
    for path in run.figures():
        with replacing(folder / path.name) as part:
            part.write_bytes(png_within(path, LARGEST))
        names.append(path.name)
    return names


def _note(folder: Path, name: str) -> list[str]:
    """The text that a person has written, if any."""
    path = folder / "notes" / f"{name}.md"
    return [read_text(path).strip() + "\n"] if path.exists() else []


def _paper_page(
    paper: str, statements: list[dict[str, Any]], boards: list[dict[str, str]], home: dict[str, str], folder: Path
) -> Iterator[str]:
    claims, checks = ([row for row in statements if row["kind"] == kind] for kind in ("claim", "check"))
    yield f"{MARK}\n# {paper}: {PAPERS.get(paper, 'its claims')}\n\n[All results]({INDEX})\n"
    if claims:
        yield f"{_counts_in_words(claims)}\n"
        yield "".join(f"{_sentence(row)}\n" for row in claims)
    if boards:
        yield "## Presets\n"
    for board in boards:
        yield from _preset(board, folder)
    if claims:
        yield "## Claims\n"
        table = pd.DataFrame(claims).assign(threshold=list(map(threshold_text, claims)))
        table = markdown(table[COLUMNS].rename(columns=RENAMED))
        yield _folded(f"{len(claims)} claims in a table", f"{table}\n{THRESHOLDS}")
    for row in claims:
        yield from _claim(row, home)
    if checks:
        yield "## Checks of the tool\n"
    for row in checks:
        yield from _claim(row, home)


def _sentence(row: dict[str, Any]) -> str:
    """A claim in a line: its verdict, what it says and its number."""
    anchor = f"#{row['claim']}-{row['outcome'].replace(' ', '-')}"
    return f"- **{row['outcome']}**: {_plain(row['statement'])} [{number_text(row)}]({anchor})"


def counts_of(statements: list[dict[str, Any]]) -> dict[str, int]:
    """How many claims, or checks, have each outcome, of those outcomes that there are."""
    outcomes = [row["outcome"] for row in statements]
    return {word: outcomes.count(word) for word in (*OUTCOMES, "passed", "broken") if word in outcomes}


def _counts_in_words(claims: list[dict[str, Any]]) -> str:
    """How many claims there are, and how many of them have each outcome."""
    counts = [f"{count} {word}" for word, count in counts_of(claims).items()]
    return f"{len(claims)} claim{'' if len(claims) == 1 else 's'}: {', '.join(counts)}."


def _folded(summary: str, text: str) -> str:
    """Markdown that is shown on demand."""
    return f"<details><summary>{summary}</summary>\n\n{text}\n</details>\n"


def _claim(row: dict[str, Any], home: dict[str, str]) -> Iterator[str]:
    """A claim with all that its verdict rests on; its settings on demand."""
    where = f" at {row['where']}" if row["where"] else ""
    several = f"{row['num_held']} of {row['num_settings']} hold"
    if short(row["smallest"]):
        several += f"; from {short(row['smallest'])} to {short(row['largest'])}"
    facts = {
        "Verdict": row["reading"],
        "Source": row["source"],
        "Refuted by": row["refuted_by"],
        "Control, in which it must fail": row["control"],
        "Measured": f"{number_text(row)}{where}, claimed {threshold_text(row)}",
        "Settings": several if row["num_settings"] > 1 else "",
        "Published": short(row["published"]),
        "p": _p_text(row),
        "With other seeds": _replication_text(row),
        "Scale": f"{row['scale']}, {over_text(row)}",
        "Presets": ", ".join(f"[{name}]({_page_of(home[name])}#{name})" for name in row["presets"].split(", ")),
    }
    yield f"### {row['claim']}: {row['outcome']}\n\n{row['statement']}\n"
    yield "\n".join(f"- {name}: {_plain(text)}" for name, text in facts.items() if text) + "\n"
    if len(row["settings"]) > 1:
        table = [
            {"where": setting["where"], "outcome": setting["outcome"], "measured": number_text(setting)}
            | {"p": setting["p_value"], "reason": setting["reason"]}
            for setting in row["settings"]
        ]
        yield _folded(f"{len(table)} settings", markdown(pd.DataFrame(table)))


def _p_text(row: dict[str, Any]) -> str:
    """The p-values of a claim; empty where no interval decided. Without any spread p is 0."""
    if not is_number(row["p_value"]):
        return ""
    adjusted = "" if row["kind"] == "check" else f", after Holm {short(row['p_holm'])}"
    return f"{short(row['p_value'])}{adjusted}{'' if row['p_value'] else ' (every seed gives the same number)'}"


def _replication_text(row: dict[str, Any]) -> str:
    """How many settings have the same outcome in a second run, and what it says in those that do not."""
    repeated = [setting for setting in row["settings"] if setting["replicated"]]
    if not repeated:
        return ""
    others = [
        f"{': '.join(filter(None, (setting['where'], setting['second_outcome'])))} ({setting['second_measured']})"
        for setting in repeated
        if setting["replicated"] == "no"
    ]
    if len(row["settings"]) == 1:
        return f"the same, {repeated[0]['second_measured']}" if not others else others[0]
    same = f"the same in {len(repeated) - len(others)} of {len(repeated)} settings"
    return "; ".join([same, *others])


def _plain(text: str) -> str:
    """The text, with the signs that Markdown would take for HTML replaced by entities."""
    return text.replace("<", "&lt;").replace(">", "&gt;")


def _preset(board: dict[str, str], folder: Path) -> Iterator[str]:
    name = board["preset"]
    files = sorted(path.name for path in (folder / "presets" / name).glob("*.csv"))
    links = ", ".join(f"[{file}](presets/{name}/{file})" for file in files)
    note = f"; {board['note']}" if board["note"] else ""
    yield f"### {name}\n\n    {board['command']}\n"
    second = f" With other seeds: {board['second']}." if board.get("second") else ""
    yield f"Commit {board['commit']}, scale {board['scale']}, {board['finished']}{note}.{second} {links}\n"
    yield from _note(folder, name)
    for path in sorted((folder / "presets" / name).glob("*.png")):
        yield f"![{path.stem} of {name}](presets/{name}/{path.name})\n"
