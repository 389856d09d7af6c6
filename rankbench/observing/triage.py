"""Signs that a training has lost the rank of its states, read off what the observer measures of the last layer.

floor: in every sequence the residual is at or below its rounding error: all tokens agree.
half: the effective rank, a mean over the sequences, is below half of what it was at the first look.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

SIGNS = {
    "floor": "the residual of layer {layer} is at its rounding error, so all tokens agree",
    "half": "the effective rank of layer {layer} is below half of its first, {effective_rank:.3g} of {first:.3g}",
}
LOOKS = 3  # in a row at which a sign is seen before it counts: a single look can be odd
VIEW = "all"  # of the states: all tokens, as they are


class Stopped(Exception):
    """Ends a watched training at a sign that it should stop at; the `with` block of the watch takes it."""


class Triage:
    """The looks of one watch so far. since: for each sign that counts, the step at which it was first seen."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        self._first_rank: float | None = None
        self._seen: dict[str, list[int]] = {sign: [] for sign in SIGNS}  # steps of the looks in a row

    def look_again(self, table: pd.DataFrame) -> None:
        """Take in the rows of observed_states of the looks before this process."""
        for step, rows in table.groupby("step"):
            self.look(int(step), rows.to_dict("records"))

    def look(self, step: int, rows: Sequence[dict[str, Any]]) -> Iterable[str]:
        """Take in the rows of observed_states at one step; returns a sentence for each sign that counts from now on."""
        of_view = [row for row in rows if row["view"] == VIEW]
        if not of_view:
            return []
        last = max(of_view, key=lambda row: row["layer"])
        if self._first_rank is None:
            self._first_rank = last["effective_rank"]
        found = {"floor": last["below_floor"] == 1, "half": last["effective_rank"] < 0.5 * self._first_rank}
        sentences = []
        for sign, is_there in found.items():
            self._seen[sign] = [*self._seen[sign], step] if is_there else []
            if len(self._seen[sign]) == LOOKS and sign not in self.since:
                self.since[sign] = self._seen[sign][0]
                sentences.append(f"{SIGNS[sign].format(**last, first=self._first_rank)}, since step {self.since[sign]}")
        return sentences
