"""The rows that an unfinished analysis has measured, kept seed by seed: if it is stopped, it continues after them."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench.runs.files import write_json
from rankbench.runs.records import checksum, or_empty, read_json
from rankbench.runs.tables import write_table

SECONDS_KEPT = 10  # a seed that took less is not worth a file


@dataclass(frozen=True)
class KeptSeeds:
    """A folder with a table for each measured seed, and a record of what determines the tables.

    folder: created when the first seed is kept, removed once the analysis has written its own table. key: everything
    that determines the rows; rows under another key, and a table that changed since it was written, count as missing.
    """

    folder: Path
    key: dict[str, Any]

    def rows(self, number: int) -> pd.DataFrame | None:
        """The rows of the number-th subject, as texts that are written again unchanged; None if none are kept."""
        path = self._path(number)
        if (digest := checksum(path)) is None or digest != self._digests().get(path.name):
            return None
        return pd.read_csv(path, dtype=str, keep_default_na=False)

    def keep(self, number: int, rows: pd.DataFrame) -> None:
        """Write the rows of the number-th subject."""
        if not (digests := self._digests()):
            self.drop()
            self.folder.mkdir()
        path = self._path(number)
        write_table(rows, path)
        write_json(self._record, {"key": self.key, "files": digests | {path.name: checksum(path)}})

    def drop(self) -> None:
        """Remove what is kept."""
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.csv"

    @property
    def _record(self) -> Path:
        return self.folder / "kept.json"

    def _digests(self) -> dict[str, str]:
        record = or_empty(read_json, self._record)
        files = record.get("files")
        return files if record.get("key") == self.key and isinstance(files, dict) else {}
