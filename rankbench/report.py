"""Many runs to one: the tables of a sweep's jobs gathered into one table each, with its figure and verdicts."""

from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rankbench.analyze import present
from rankbench.config import BaseConfig
from rankbench.run import Run
from rankbench.tables import WHO, read_table, write_table


def gather_sweep(cfg: BaseConfig, folder: Path, varied: list[str]) -> list[str]:
    """Join what the jobs in `folder` wrote, with a column for each key that varied; then present it.

    sweep.csv: a row for each job and seed with its status and final numbers. Of each analysis, the jobs' tables one
    below the other. cfg: what the jobs share. The first varied key tells the rows of the figures apart; seeds are what
    the spread is over. Returns lines for the reader.
    """
    jobs = sorted((path.parent for path in folder.glob("*/config.yaml")), key=_number)
    if not jobs:
        return []
    # run, task, model and seed are columns already
    values = {job: _varied(job, [key for key in varied if key not in WHO]) for job in jobs}
    facet = next((key for key in varied if key != "seed"), None)
    rows = [row for job in jobs for row in _summary_rows(job, values[job])]
    write_table(pd.DataFrame(rows), folder / "sweep.csv")
    unfinished = [f"{job.name}: {status}" for job in jobs if (status := Run(job).status) != "finished"]
    tables = {}
    for name in cfg.analysis:
        parts = [
            read_table(job / f"{name}.csv").assign(**values[job]) for job in jobs if (job / f"{name}.csv").exists()
        ]
        if parts:
            tables[name] = pd.concat(parts, ignore_index=True)
            write_table(tables[name], folder / f"{name}.csv")
    lines = present(cfg, tables, folder, facet) if tables else []
    return [
        f"{len(jobs)} jobs, {len(jobs) - len(unfinished)} finished",
        *unfinished,
        f"-> {folder / 'sweep.csv'}",
        *lines,
    ]


def _number(job: Path) -> tuple[int, str]:
    """Jobs in the order of their numbers: 2 before 10."""
    number = job.name.partition("_")[0]
    return (int(number) if number.isdigit() else -1, job.name)


def _varied(job: Path, keys: list[str]) -> dict[str, str]:
    """What this job's config holds at the keys, as text; of a group, the choice's name."""
    config = yaml.safe_load((job / "config.yaml").read_text())
    found = {}
    for key in keys:
        value: Any = config
        for part in key.split("."):
            value = value.get(part, {})
        found[key] = str(value["name"] if isinstance(value, dict) and "name" in value else value)
    return found


def _summary_rows(job: Path, varied: dict[str, str]) -> list[dict]:
    run = Run(job)
    config = yaml.safe_load((job / "config.yaml").read_text())
    who = {"run": run.name, "task": config["task"]["name"], "model": config["model"]["name"]}
    summary = run.summary()
    seeds = summary.get("seeds", [{"seed": config["seed"], "status": "absent"}])
    return [{**who, "seed": one["seed"], **varied, "job_status": run.status, **one} for one in seeds]
