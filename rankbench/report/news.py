"""What is new in a scoreboard since the last one."""

from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from rankbench.config.keys import ConfigError
from rankbench.runs.tables import read_table


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


def news_since_last(folder: Path, reports: Path, statements: list[dict[str, Any]], presets: set[str]) -> News | None:
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
