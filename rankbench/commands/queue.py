"""`make paper`, `make laptop`: every preset at one budget, two at a time, those that decide most claims an hour first.

    python -m rankbench.commands.queue paper         the plan, then the runs; the same command continues
    python -m rankbench.commands.queue paper plan    the plan alone

outputs/queue_<budget>.csv is the state: a row for each preset, with its minutes as they were measured here, or else as
its file states or estimates them.
"""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path

import pandas as pd

from rankbench.commands.budgets import costs
from rankbench.commands.failures import refusing
from rankbench.config.keys import ConfigError, check_known
from rankbench.config.presets import Preset, all_claims_of, described
from rankbench.config.schema import BUDGETS
from rankbench.progress import duration
from rankbench.report.preset_runs import best_runs
from rankbench.runs.files import OUTPUTS
from rankbench.runs.tables import read_table, write_table

AT_ONCE = 2  # processes, of one thread each
WAITING, FINISHED, FAILED = "waiting", "finished", "failed"
CARD, GIVEN = "needs a card", "needs a network"


def plan(budget: str) -> pd.DataFrame:
    """A row for each preset, in the order of the queue: by claims per hour.

    minutes: of the command; `from`: measured here, stated or estimated by the preset's file, unknown. state: waiting;
    finished; failed, and tried again; needs a card, as its file gives a time on a GPU alone; needs a network, as a
    checkpoint, which the user names.
    """
    known, rows = _measured(budget), []
    runs = best_runs(described(), OUTPUTS)
    for name, preset in described().items():
        minutes, source = known.get(name) or _stated(preset, budget)
        claims = len(all_claims_of(name))
        is_for_card = minutes == inf and "GPU" in preset.cost
        state = GIVEN if preset.of_given_network else CARD if is_for_card else WAITING
        if name in runs and runs[name].complete and runs[name].budget == budget:
            state = FINISHED
        rows.append((name, preset.verb, claims, minutes, source, 60 * claims / minutes, state))
    table = pd.DataFrame(rows, columns=["preset", "command", "claims", "minutes", "from", "claims_per_hour", "state"])
    return table.sort_values(["claims_per_hour", "preset"], ascending=[False, True], ignore_index=True)


def _stated(preset: Preset, budget: str) -> tuple[float, str]:
    laptop, paper = costs(preset.cost)
    seconds = laptop if budget == "laptop" else paper
    return seconds / 60, "unknown" if seconds == inf else "estimated" if "estimate" in preset.cost else "stated"


def _measured(budget: str) -> dict[str, tuple[float, str]]:
    """Minutes of the commands that have run here."""
    if not (path := _state_of(budget)).exists():
        return {}
    rows = read_table(path)
    return {row.preset: (row.minutes, "measured") for row in rows[rows["from"] == "measured"].itertuples()}


def _state_of(budget: str) -> Path:
    return OUTPUTS / f"queue_{budget}.csv"


def run(table: pd.DataFrame, budget: str) -> bool:
    """Run what waits, two at a time, and keep the state; whether all of it ended well."""

    def ran(row: pd.Series) -> tuple[str, float, str]:
        out = OUTPUTS / row.command / f"{budget}_{row.preset}"
        words = [row.command, f"experiment={row.preset}", f"budget={budget}", f"out={out}"]
        print(f"== {row.preset}: {how_long(row.minutes)}", flush=True)
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "rankbench", *words], stdin=subprocess.DEVNULL).returncode
        return row.preset, (time.monotonic() - began) / 60, FAILED if code else FINISHED

    waiting = [row for _, row in table[table.state == WAITING].iterrows()]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for name, minutes, state in pool.map(ran, waiting):
            at = table.preset == name
            table.loc[at, "state"] = state
            if state == FINISHED:
                table.loc[at, ["minutes", "from"]] = minutes, "measured"
            write_table(table, _state_of(budget))
    return not (table.state == FAILED).any()


def in_words(table: pd.DataFrame) -> list[str]:
    """What will run, with its time, the time of all of it, and what this machine cannot do."""
    waiting = table[table.state == WAITING]
    lines = [
        f"{row.preset:<34}{how_long(row.minutes):<9}{row['from']:<11}{row.claims} claims"
        for _, row in waiting.iterrows()
    ]
    known = waiting.minutes[waiting.minutes < inf]
    lines.append(f"{len(waiting)} presets to run; {len(known)} of them take {how_long(known.sum())} of one core")
    of_state = {state: ", ".join(table.preset[table.state == state]) for state in (CARD, GIVEN, FINISHED)}
    return lines + [f"{state}: {names}" for state, names in of_state.items() if names]


def how_long(minutes: float) -> str:
    """Minutes as a duration; ? where they are not known."""
    return duration(60 * minutes) if minutes < inf else "?"


def main(words: list[str]) -> int:
    """Returns the exit code: 1 if a run failed."""
    if not words or words[1:] not in ([], ["plan"]):
        raise ConfigError(f"queue {' '.join(words)}: give a budget and, for the plan alone, the word plan")
    check_known("budget", words[:1], BUDGETS)
    table = plan(words[0])
    OUTPUTS.mkdir(exist_ok=True)
    write_table(table, _state_of(words[0]))
    print("\n".join(in_words(table)), flush=True)
    return int("plan" not in words and not run(table, words[0]))


if __name__ == "__main__":
    with refusing("queue"):
        sys.exit(main(sys.argv[1:]))
