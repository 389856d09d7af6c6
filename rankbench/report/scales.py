"""Whether a verdict at budget=laptop foretells that at the paper's own scale, by the presets that were run at both."""

from pathlib import Path
from typing import Any

import pandas as pd

from rankbench.judging import number_text, of_today
from rankbench.judging.claim import UNDECIDED
from rankbench.report.page import records
from rankbench.runs.tables import markdown, read_table, write_table

LAPTOP = "laptop.csv"  # a preset's verdicts at budget=laptop, where a larger run has taken their place
BOTH = "laptop_and_paper.csv"


def keep_laptop(folder: Path, scale: str) -> None:
    """Keep a preset's verdicts at budget=laptop before a run at the scale of its paper replaces them."""
    path = folder / "verdicts.csv"
    if scale == "paper" and path.exists() and len(table := read_table(path)) and set(table.scale) == {"laptop"}:
        write_table(table, folder / LAPTOP)


def both_scales(folder: Path) -> pd.DataFrame:
    """A row for each setting that the presets on the folder's pages have at both scales. same: yes, no, or undecided,
    where one of the two is."""
    rows = []
    for kept in sorted((folder / "presets").glob(f"*/{LAPTOP}")):
        now, then = (of_today(records(read_table(path))) for path in (kept.with_name("verdicts.csv"), kept))
        before = {(row["claim"], row["where"] or ""): row for row in then}
        for row in now:
            if (old := before.get((row["claim"], row["where"] or ""))) is not None and row["scale"] == "paper":
                rows.append(_row(kept.parent.name, old, row))
    return pd.DataFrame(rows)


def _row(preset: str, laptop: dict[str, Any], paper: dict[str, Any]) -> dict[str, Any]:
    outcomes = {laptop["outcome"], paper["outcome"]}
    return {
        "preset": preset,
        "claim": paper["claim"],
        "where": paper["where"],
        "laptop": laptop["outcome"],
        "paper": paper["outcome"],
        "same": "yes" if len(outcomes) == 1 else "undecided" if UNDECIDED in outcomes else "no",
        "laptop_measured": number_text(laptop),
        "paper_measured": number_text(paper),
    }


def in_words(table: pd.DataFrame) -> str:
    """What the table says, as Markdown; empty without one."""
    if table.empty:
        return ""
    counts = table.same.value_counts()
    others = table[table.same != "yes"]
    said = f"Of {len(table)} settings that were judged at both scales, {counts.get('yes', 0)} have the same outcome"
    if "undecided" in counts:
        said += f", {counts['undecided']} {'is' if counts['undecided'] == 1 else 'are'} undecided at one of them"
    if "no" in counts:
        said += f", and {counts['no']} {'turns' if counts['no'] == 1 else 'turn'} round"
    listed = f"<details><summary>Where they differ</summary>\n\n{markdown(others)}\n</details>\n"
    return f"## Does the laptop foretell the paper's scale?\n\n{said} ([{BOTH}]({BOTH})).\n" + (
        f"\n{listed}" if len(others) else ""
    )
