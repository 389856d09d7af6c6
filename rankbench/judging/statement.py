"""A paper's claim as one entry: the verdicts of all its settings put together.

A setting is a row of verdicts.csv: a value of the swept keys and of the columns by which the claim is judged. A claim
is held where all its settings are, so the largest of their p-values is its own (an intersection-union test, which needs
no adjustment). A claim that an example exists is held where one setting is. The claims of a paper are tested together:
Holm's method keeps the chance that any of them is held by mistake below the level of one.
"""

import math
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import pandas as pd

from rankbench.judging.claim import BROKEN, CLAIMS, FAILED, HELD, NOTHING, PASSED, UNDECIDED, paper_of
from rankbench.judging.verdict import is_number, outcome_and_name, over_text, published_text, verdict_line
from rankbench.runs.intervals import LEVEL, holm

PARTLY = "partly held"
OUTCOMES = (HELD, PARTLY, FAILED, UNDECIDED)  # of a statement; a check is passed, broken or undecided
MOST_NAMED = 2  # settings of one outcome that a sentence names
OF_SETTING = ["where", "measured", "low95", "high95", "interval", "is_bound", "num_repeats", "repeats", "published"]
OF_CLAIM = ["kind", "statement", "source", "claimed", "threshold", "refuted_by", "control"]


def statements_of(verdicts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry for each claim among the verdicts, in their order.

    `outcome`: held | partly held | failed | undecided, or passed | broken | undecided. `where`, `measured` and the
    like: of the setting that speaks most against the claim. smallest and largest: of all settings. distance: of
    `measured` from the threshold, negative beyond it. `reading`: one sentence. `replicated`: whether every setting of a
    second run has the same outcome there: yes or no; None without such a run. `settings`: the verdicts themselves.
    """
    return [_statement(name, rows) for name, rows in grouped(verdicts, itemgetter("claim")).items()]


def grouped(rows: Iterable[dict[str, Any]], name_of: Callable[[dict], str]) -> dict[str, list[dict[str, Any]]]:
    """The rows by the name of each, in their order."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(name_of(row), []).append(row)
    return groups


def _statement(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [row for row in rows if row["reason"] != NOTHING] or rows[:1]
    good, bad = (PASSED, BROKEN) if rows[0]["kind"] == "check" else (HELD, FAILED)
    by_outcome = {outcome: [row for row in rows if row["outcome"] == outcome] for outcome in (bad, UNDECIDED, good)}
    held, failed = len(by_outcome[good]), len(by_outcome[bad])
    if rows[0]["exists"]:
        outcome = good if held else UNDECIDED
        speaks_most = max(rows, key=_margin)
    else:
        outcome = good if held == len(rows) else PARTLY if held and good == HELD else bad if failed else UNDECIDED
        speaks_most = min(next(filter(None, by_outcome.values())), key=_margin)
    measured = [row["measured"] for row in rows if is_number(row["measured"])]
    replicated = {row.get("replicated") for row in rows} - {None}
    return {
        "claim": name,
        "paper": paper_of(rows[0]["source"]),
        "outcome": outcome,
        "num_settings": len(rows),
        "num_held": held,
        "num_failed": failed,
        **{key: speaks_most[key] for key in OF_SETTING},
        "smallest": min(measured, default=math.nan),
        "largest": max(measured, default=math.nan),
        "distance": _margin(speaks_most) if is_number(speaks_most["measured"]) else math.nan,
        "p_value": _p_value(rows, good),
        "reading": _reading(rows, by_outcome, outcome, good),
        "replicated": "no" if "no" in replicated else next(iter(replicated), None),
        **{key: speaks_most[key] for key in OF_CLAIM},
        "settings": rows,
    }


def _margin(row: dict[str, Any]) -> float:
    """How far a setting's number is on the claimed side of the threshold; negative beyond it."""
    if not is_number(row["measured"]):
        return -math.inf
    return row["side"] * (row["measured"] - row["line"]) if row["side"] else row["line"] - abs(row["measured"])


def _p_value(rows: list[dict[str, Any]], good: str) -> float:
    """nan if no interval decided: the numbers are exact or bounds, or a setting could not be judged."""
    tested = [row["p_value"] for row in rows if is_number(row["p_value"])]
    if rows[0]["exists"]:
        return min(1.0, len(tested) * min(tested)) if tested else math.nan
    if any(not is_number(row["p_value"]) and row["outcome"] != good for row in rows):
        return math.nan
    return max(tested, default=math.nan)


def _reading(rows: list[dict[str, Any]], by_outcome: dict[str, list[dict[str, Any]]], outcome: str, good: str) -> str:
    """One sentence: how many settings hold, and the numbers closest to the threshold or against the claim."""
    line, exists = f"{'' if rows[0]['side'] else '±'}{rows[0]['line']:g}", rows[0]["exists"]
    closest = (min if by_outcome[good] and not exists else max)(rows, key=_margin)
    comparison = _in_words(closest) or f"{_measured(closest)} against a threshold of {line}"
    if len(rows) == 1:
        return "; ".join(filter(None, (f"{outcome}: {comparison}", closest["reason"])))
    num_held = len(by_outcome[good])
    if exists:
        best = f"the best is {closest['where']}, {comparison}"
        return f"{outcome}: an example in {num_held} of {len(rows)} settings; {best}"
    every = "both" if len(rows) == 2 else f"all {len(rows)}"
    if len(by_outcome.get(outcome, ())) == len(rows):
        in_all = f"{outcome} in {every} settings"
        if outcome == UNDECIDED:
            return f"{in_all}, threshold {line}: {_named(rows)}"
        return f"{in_all}; the closest is {closest['where']}, {comparison}"
    others = [f"{word}: {_named(of_word)}" for word, of_word in by_outcome.items() if of_word and word != good]
    return "; ".join([f"{good} in {num_held} of {len(rows)} settings, threshold {line}", *others])


def _in_words(row: dict[str, Any]) -> str:
    """The sentence of a claim whose measure is a log10, about the number itself; empty for other claims."""
    claim = CLAIMS.get(row["claim"])
    if claim is None or not claim.in_words or not is_number(row["measured"]):
        return ""
    measured, threshold = (f"{10.0 ** row[name]:.2g}" for name in ("measured", "line"))
    return f"{claim.in_words.format(measured)} (threshold {threshold})"


def _measured(row: dict[str, Any]) -> str:
    if not is_number(row["measured"]):
        return "not measured"
    return f"{'at most ' if row['is_bound'] else ''}{row['measured']:.3g}"


def _named(rows: list[dict[str, Any]]) -> str:
    """The settings that are farthest from what is claimed, with their numbers and reasons."""
    rows = sorted(rows, key=_margin)
    notes = ("; ".join(filter(None, (_measured(row), row["reason"]))) for row in rows[:MOST_NAMED])
    named = [f"{row['where']} ({note})" for row, note in zip(rows, notes, strict=False)]
    return ", ".join(named) + (f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else "")


def with_holm(statements: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The statements with `p_holm`, adjusted among the claims of the same paper, and `held_after_holm`: yes or no.

    A claim that is held by exact numbers or by bounds has no p-value, and stays held.
    """
    adjusted: dict[str, float] = {}
    for claims in by_paper(statements).values():
        family = [row for row in claims if is_number(row["p_value"])]
        p_values = holm([row["p_value"] for row in family])
        adjusted |= {row["claim"]: p_holm for row, p_holm in zip(family, p_values, strict=True)}
    return [_after_holm(row, adjusted.get(row["claim"], math.nan)) for row in statements]


def _after_holm(statement: dict[str, Any], p_holm: float) -> dict[str, Any]:
    still_held = statement["outcome"] == HELD and not p_holm >= LEVEL
    word = None if statement["kind"] == "check" else "yes" if still_held else "no"
    return statement | {"p_holm": p_holm, "held_after_holm": word}


def by_paper(statements: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The claims among the statements, by paper."""
    return grouped((row for row in statements if row["kind"] == "claim"), itemgetter("paper"))


def table_of(statements: list[dict[str, Any]]) -> pd.DataFrame:
    """The statements as a table, without the rows of their settings."""
    columns = ["claim", "paper", "kind", "outcome", "settings"]  # of a table without statements
    return pd.DataFrame(statements, columns=None if statements else columns).drop(columns="settings")


def statement_line(statement: dict[str, Any]) -> str:
    """A statement as one line for a terminal."""
    setting, *others = statement["settings"]
    if others:
        numbers = f"{statement['reading']}{published_text(statement)}"
        return f"{outcome_and_name(statement)}: {numbers} - {statement['source']}"
    words = _in_words(setting)
    over = f"{'the worst of ' if setting['interval'] == 'worst' else ''}{over_text(setting)}"
    return verdict_line(setting, words and f"{words}, {over}")
