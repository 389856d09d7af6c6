"""`make paper`, `make laptop`: every preset at one budget, two at a time, those that decide most claims an hour first.

    python -m paper_scale.queue paper         the plan, then the runs; the same command continues
    python -m paper_scale.queue paper plan    the plan alone

outputs/queue_<budget>.csv is the state: a row for each preset, with its minutes as they were measured here, or else as
its file states or estimates them.
"""

import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from threading import Lock
from typing import Any

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
PATIENCE = 60  # seconds that a run has to save a checkpoint when the time is over
WAITING, FINISHED, FAILED = "waiting", "finished", "failed"
CARD, GIVEN = "needs a card", "needs a network"


def plan(budget: str) -> pd.DataFrame:
    """A row for each preset, in the order of the queue: by claims per hour.

    minutes: of its command; `from`: measured here, stated or estimated by the preset's file, unknown. state: waiting;
    finished; failed, and tried again; needs a card, as its file gives a time on a GPU alone; needs a network, as a
    checkpoint, which the user names.
    """
    known, rows = kept(_state_of(budget)), []
    runs = best_runs(described(), OUTPUTS)
    for name, preset in described().items():
        minutes, source = _stated(preset, budget)
        if name in known and known[name]["from"] == "measured":
            minutes, source = known[name].minutes, "measured"
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


def kept(state: Path) -> dict[str, pd.Series]:
    """The rows of the table that was kept in this file, by name."""
    return {row.iloc[0]: row for _, row in read_table(state).iterrows()} if state.exists() else {}


def _state_of(budget: str) -> Path:
    return OUTPUTS / f"queue_{budget}.csv"


def work_off(table: pd.DataFrame, commands: pd.Series, state: Path, at_once: int, end: float = inf) -> None:
    """Run the commands of rows of a table that wait, some at once, and keep what came of them in it and in its file.

    end: of the time, in seconds of the monotonic clock. Rows with more minutes than are left do not begin.
    """
    lock = Lock()

    def run(index: Any, command: str) -> None:
        minutes, began = table.minutes[index], time.monotonic()
        if minutes > (left := (end - began) / 60):
            print(f"-- {command}: {how_long(minutes)}, and {how_long(left)} are left", flush=True)
            return
        print(f"== {command}: {how_long(minutes)}", flush=True)
        came_to = _done(command, end)
        with lock:
            table.loc[index, "state"] = came_to
            if came_to == FINISHED:
                table.loc[index, ["minutes", "from"]] = (time.monotonic() - began) / 60, "measured"
            write_table(table, state)

    waiting = commands[table.state == WAITING]
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, waiting.index, waiting))


def _done(command: str, end: float) -> str:
    """Run a command and return its state. At the end of the time it is asked to stop, and may be continued."""
    process = subprocess.Popen([sys.executable, "-m", *shlex.split(command)], stdin=subprocess.DEVNULL)
    try:
        return FAILED if process.wait(None if end == inf else max(0.0, end - time.monotonic())) else FINISHED
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        return WAITING


def run(table: pd.DataFrame, budget: str) -> bool:
    """Run what waits, two at a time; whether all of it ended well."""
    outs = (OUTPUTS / row.command / f"{budget}_{row.preset}" for row in table.itertuples())
    words = "rankbench " + table.command + " experiment=" + table.preset + f" budget={budget} out="
    work_off(table, words + [shlex.quote(str(out)) for out in outs], _state_of(budget), AT_ONCE)
    return not (table.state == FAILED).any()


def in_words(table: pd.DataFrame) -> list[str]:
    """What will run, with its time, the time of all of it, and what this machine cannot do."""
    waiting = table[table.state == WAITING]
    known = waiting.minutes[waiting.minutes < inf]
    lines = in_lines(waiting)
    lines.append(f"{len(waiting)} presets to run; {len(known)} of them take {how_long(known.sum())} of one core")
    of_state = {state: ", ".join(table.preset[table.state == state]) for state in (CARD, GIVEN, FINISHED)}
    return lines + [f"{state}: {names}" for state, names in of_state.items() if names]


def in_lines(rows: pd.DataFrame) -> list[str]:
    """Each row's name, time, where that is from, and number of claims."""
    return [
        f"{row.iloc[0]:<34}{how_long(row.minutes):<9}{row['from']:<11}{row.claims} claim{'s' * (row.claims != 1)}"
        for _, row in rows.iterrows()
    ]


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
