"""The scoreboard: the claims of all presets that have been run, paper by paper, next to the published numbers."""

import base64
import os
import re
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd
from markupsafe import Markup

from rankbench.analyses import ANALYSES
from rankbench.config.keys import ConfigError, check_known
from rankbench.config.presets import presets
from rankbench.judging import PAPERS, SECOND_SEED, beside_second, by_paper, grouped, statement_line, table_of
from rankbench.plots import caption_of
from rankbench.plots.readings import spots_over_png
from rankbench.report.page import link_to, render
from rankbench.report.preset_runs import NOT_RUN, PresetRun, across_presets, any_run, best_runs
from rankbench.report.results import (
    BOARD,
    check_pages,
    counted,
    counts_of,
    drop_old_claims,
    known_before,
    known_second,
    slug,
    write_pages,
)
from rankbench.runs.files import OUTPUTS, write_text
from rankbench.runs.tables import read_table, write_table

EVERY = "all"
TABLES = {"scoreboard.csv": "csv, a row for each claim", "verdicts.csv": "for each setting"}
TABLES |= {"presets.csv": "for each preset"}
TABLES_OF_PAGES = {"statements.csv": "csv, a row for each claim", "presets.csv": "for each preset"}


def check_experiment(name: str, outputs: Path = OUTPUTS, pages: Path | None = None) -> None:
    """Raise ConfigError unless the name is `all` or that of a preset, with a run in `outputs` or results on pages."""
    check_known("experiment", [name], [EVERY, *presets()])
    if pages is not None and (pages / "presets.csv").exists():
        return
    if not any_run(presets() if name == EVERY else [name], outputs):
        first = presets().get(name) or "rankbench train experiment=demo"
        raise ConfigError(f"experiment={name}: not run yet under {outputs.resolve()}; run it with `{first}`")


def scoreboard(experiment: str, folder: Path, pages: Path | None = None, outputs: Path = OUTPUTS) -> list[str]:
    """Write the scoreboard of one preset or `all` from the runs in `outputs`, and Markdown pages of the results.

    scoreboard.csv and .html: a row for each claim. verdicts.csv: a row for each setting. presets.csv: a row for each
    preset, with its newest complete run at the largest scale. pages: folder of the pages, which are of all presets;
    None for `results` in `folder`. Returns lines for the reader; ConfigError if no preset has been run.
    """
    selected = {name: command for name, command in presets().items() if experiment in (EVERY, name)}
    check_experiment(experiment, outputs, pages)
    best, second = best_runs(selected, outputs), best_runs(selected, outputs, second=True)
    pages = pages or folder / "results"
    check_pages(pages)
    verdicts = []
    for name, run in best.items():
        verdicts += beside_second(run.verdicts, second[name].verdicts if second.get(name, run) != run else ())
    statements = across_presets(verdicts)
    boards = [
        {"preset": name, **(best[name].about() if name in best else {"command": command, "note": NOT_RUN})}
        for name, command in selected.items()
    ]
    news = _news_since_last(folder, outputs / "report", statements, set(selected))
    write_table(pd.DataFrame(verdicts or {"claim": []}), folder / "verdicts.csv")
    write_table(pd.DataFrame(boards), folder / "presets.csv")
    write_table(table_of(statements), folder / "scoreboard.csv")
    drawn = {name: _drawn(run.folder, run.figures(), run.num_seeds, folder, True) for name, run in best.items()}
    write_text(folder / "scoreboard.html", _page(statements, boards, drawn, news, TABLES))
    written = [_all_pages(pages, boards, best, second)] if experiment == EVERY else []
    counts = counts_of(statements)
    unrun = [board["preset"] for board in boards if board["note"] == NOT_RUN]
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    return [
        f"{len(best)} of {len(selected)} presets run{said and '; '}{said}",
        *map(statement_line, statements),
        *([] if news is None else [news.line()]),
        *(f"{board['preset']}: {board['note']}" for board in boards if board["note"] not in ("", NOT_RUN)),
        *([f"not run: {', '.join(unrun)}"] if unrun else []),
        f"-> {folder / 'scoreboard.csv'} and .html; verdicts.csv, presets.csv",
        *(f"-> {index} and {BOARD}" for index in written),
    ]


def _all_pages(
    pages: Path, boards: list[dict[str, str]], best: dict[str, PresetRun], second: dict[str, PresetRun]
) -> Path:
    """Write the pages from the runs and, for presets without a complete first run here, from what the pages say."""
    first = {name for name, run in best.items() if run.complete and not run.is_second}
    on_pages = known_before(pages, {board["preset"] for board in boards})
    known = {name: result for name, result in on_pages.items() if name not in first}
    drop_old_claims(pages, known)
    runs = {name: run for name, run in best.items() if name not in known}
    second = {name: run for name, run in second.items() if run != runs.get(name)}
    boards = [known[board["preset"]].board if board["preset"] in known else board for board in boards]
    verdicts = []
    for board in boards:
        name = board["preset"]
        if source := (known | runs).get(name):
            repeated = second[name].verdicts if name in second else known_second(pages, name)
            verdicts += beside_second(source.verdicts, repeated)
    about = "commit {commit}, scale {scale}, {finished}"
    repeats = {name: result.board.get("second") for name, result in on_pages.items()}
    repeats |= {name: about.format(**run.about()) for name, run in second.items()}
    boards = [board | {"second": repeats.get(board["preset"]) or ""} for board in boards]
    statements = across_presets(verdicts)
    index = write_pages(pages, statements, boards, runs, second)
    homes = {name: pages / "presets" / name for name in known | runs}
    drawn = {name: _drawn(home, sorted(home.glob("*.png")), 0, pages, False) for name, home in homes.items()}
    write_text(pages / BOARD, _page(statements, boards, drawn, None, TABLES_OF_PAGES))
    return index


class News(NamedTuple):
    """Claims with a new verdict: since when, and for each claim its new and its old verdict (None: there was none)."""

    since: str
    verdicts: dict[str, tuple[str, str | None]]

    def line(self) -> str:
        """The news as one line for a terminal."""
        changed = [
            f"{claim} {now} ({f'before: {then}' if then else 'new'})" for claim, (now, then) in self.verdicts.items()
        ]
        return f"since the report of {self.since}: {'; '.join(changed) or 'no new verdict'}"


def _news_since_last(folder: Path, reports: Path, statements: list[dict[str, Any]], presets: set[str]) -> News | None:
    """The statements whose verdicts differ from those in the last scoreboard of these presets, which is the one in
    `folder`, or else the newest in a folder of `reports`. None if there is no such scoreboard."""
    others = sorted(reports.glob("*/scoreboard.csv"), key=lambda path: path.stat().st_mtime)
    for table in (folder / "scoreboard.csv", *reversed(others)):
        try:
            if presets <= set(read_table(table.with_name("presets.csv"))["preset"]):
                before = read_table(table).set_index("claim")["outcome"].to_dict()
                break
        except (ConfigError, OSError, KeyError):  # no scoreboard, or no longer one
            continue
    else:
        return None
    since = datetime.fromtimestamp(table.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    now = {row["claim"]: row["outcome"] for row in statements}
    return News(since, {claim: (word, before.get(claim)) for claim, word in now.items() if before.get(claim) != word})


def _page(
    statements: list[dict[str, Any]],
    boards: list[dict[str, Any]],
    drawn: dict[str, dict[str, Any]],
    news: News | None,
    tables: dict[str, str],
) -> str:
    """The text of scoreboard.html. drawn: for each preset that has been run, its figures and the address of its folder.
    tables: the files next to the page, with what they hold."""
    run_boards = {board["preset"]: board | drawn[board["preset"]] for board in boards if board["preset"] in drawn}
    papers = by_paper(statements)
    groups = {paper: _by_preset(rows) for paper, rows in papers.items()}
    return render(
        "scoreboard",
        title=f"claims of {len(papers)} papers" if len(papers) > 1 else next(iter(papers), "no claims"),
        counts=counts_of(statements),
        second_seed=SECOND_SEED,
        news=news,
        totals=[{"slug": slug(paper)} | counted(paper, rows) for paper, rows in papers.items()],
        papers={paper: PAPERS.get(paper, "") for paper in papers},
        groups=groups,
        boards=run_boards,
        home={preset: paper for paper in reversed(groups) for preset in groups[paper]},
        checks=[row for row in statements if row["kind"] == "check"],
        unrun=[board for board in boards if board["preset"] not in drawn],
        tables=tables,
    )


def _by_preset(claims: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """A paper's claims by the preset that judges them; of several presets, by the one that judges most claims."""
    num_claims = Counter(preset for row in claims for preset in row["presets"].split(", "))
    return grouped(claims, lambda row: max(row["presets"].split(", "), key=num_claims.__getitem__))


def _drawn(home: Path, paths: Iterable[Path], num_seeds: int, folder: Path, is_inside: bool) -> dict[str, Any]:
    """The figures of a preset, which are inside the page, with readings of their marks, or files next to it. folder: of
    the page. num_seeds: 0 if it is not known."""
    link, figures = link_to(home, folder), []
    for path in paths:
        name = re.sub(r"_\d+$", "", path.stem)
        draw = ANALYSES[name].figure if name in ANALYSES else None  # no analysis of today may draw it
        figure = {"name": path.stem, "caption": caption_of(name, draw, num_seeds) if draw else "", "spots": ""}
        figure["link"] = figure["source"] = link + quote(os.fsencode(path.name))
        if is_inside:
            figure["source"] = f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"
            figure["spots"] = Markup(spots_over_png(path))
        figures.append(figure)
    return {"link": link, "figures": figures}
