"""The record of benchmarks: the ratios of every recorded run, a figure of them over time, and the page that shows the
newest run next to the one before."""

import platform
import time
from collections.abc import Iterable
from pathlib import Path

import pandas as pd
import torch

from benchmarks.figure import draw_benchmarks
from benchmarks.timing import RATIOS, Ratio, digits
from rankbench.plots import save
from rankbench.runs.files import read_text, write_text
from rankbench.runs.machine import Machine, git_state
from rankbench.runs.tables import markdown, read_table, write_table

COLUMNS = ["date", "commit", "device", "machine", "torch", "repeats", "benchmark", *Ratio._fields]
INTRODUCTION = """# Benchmarks

    make bench                                        # paths, training, startup
    make bench BENCH="training device=cuda"           # one of them, on a GPU, with words of `rankbench train`
    make bench BENCH="record=docs"                    # writes this page

Alternatives take turns (A B A B ...) after one warm-up each. A ratio is taken within a repetition; the tables give its
median [smallest, largest]. `outputs/bench/<stamp>/bench_<name>.csv` has the ratios and the seconds, `environment.json`
the machine. Other processes on the machine change the seconds by factors and the ratios by tens of per cent, so look at
the range first.

This page is written from [benchmarks/history.csv](benchmarks/history.csv), which every recorded run adds to, and from
[benchmarks/notes.md](benchmarks/notes.md), which is written by hand.

![ratios with a goal, over the recorded runs](benchmarks/history.png)
"""


def add(ratios: Iterable[tuple], repeats: int, machine: Machine, folder: Path) -> Path:
    """Add (benchmark, *Ratio) of this run to <folder>/benchmarks/history.csv; rewrite the figure and the page, and
    return the page."""
    git = git_state()
    # g: as in `git describe`, so that no commit reads as a number; +: with uncommitted changes
    commit = "unknown" if git is None else f"g{git['commit'][:7]}{'+' * git['dirty']}"
    who = time.strftime("%Y-%m-%d %H:%M"), commit, machine.device.type, _name_of(machine), torch.__version__, repeats
    table = pd.DataFrame([(*who, *ratio) for ratio in ratios], columns=COLUMNS)
    history = folder / "benchmarks" / "history.csv"
    if history.exists():
        table = pd.concat([read_table(history), table], ignore_index=True)
    history.parent.mkdir(parents=True, exist_ok=True)
    write_table(table, history)
    return write_page(folder)


def write_page(folder: Path) -> Path:
    """Draw <folder>/benchmarks/history.csv, and write <folder>/BENCHMARKS.md from it and from benchmarks/notes.md."""
    history, notes = read_table(folder / "benchmarks" / "history.csv"), folder / "benchmarks" / "notes.md"
    goals = {column: (meaning, goal) for column, (meaning, goal) in RATIOS.items() if goal is not None}
    with_goal = history[history.column.isin(goals)]
    save(draw_benchmarks(with_goal, goals), folder / "benchmarks" / "history", (".png",))
    write_text(folder / "BENCHMARKS.md", page(history) + ("\n" + read_text(notes) if notes.exists() else ""))
    return folder / "BENCHMARKS.md"


def page(history: pd.DataFrame) -> str:
    """The page without its notes: for each device and benchmark the newest run, and the one before in parentheses."""
    parts, history = [INTRODUCTION], history[history.column.isin(RATIOS)]  # not those of benchmarks that are gone
    for (device, benchmark), rows in history.groupby(["device", "benchmark"], sort=False):
        dates = sorted(rows.date.unique())
        newest, before = (rows[rows.date == date].set_index(["column", "case"]) for date in (dates[-1], dates[-2:][0]))
        run = newest.iloc[0]
        lines = pd.DataFrame(
            {
                "ratio": RATIOS[column][0],
                "case": case,
                "median": _median_of(Ratio(column, case, row["median"], row.smallest, row.largest)),
                "before": digits(before["median"][column, case]) if (column, case) in before.index else "",
                "goal": " ".join(map(str, RATIOS[column][1] or ())),
            }
            for (column, case), row in newest.iterrows()
        )
        if len(dates) == 1:
            lines = lines.drop(columns="before")
        where = f"{run.machine}, torch {run.torch}, {run.repeats} repetitions, commit {run.commit}."
        heading = f"\n## {benchmark.capitalize()}, {device}, {run.date}\n"
        since = f" Before: {dates[-2]}." if len(dates) > 1 else ""
        parts.append(f"{heading}\n{where}{since}\n\n{markdown(lines)}")
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _median_of(ratio: Ratio) -> str:
    median = f"**{digits(ratio.median)}**" if ratio.missed else digits(ratio.median)
    measured = "" if pd.isna(ratio.smallest) else f" [{digits(ratio.smallest)}, {digits(ratio.largest)}]"
    return median + measured + (" missed" if ratio.missed else "")


def _name_of(machine: Machine) -> str:
    """The GPU's name, or the processor's, with the threads in use."""
    if machine.device.type == "cuda":
        return torch.cuda.get_device_name(machine.device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {machine.threads} thread(s)"
