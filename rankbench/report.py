"""Many runs to one: the tables of a sweep's jobs gathered into one table each, with its figure and verdicts."""

from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rankbench.analyze import present
from rankbench.config import BaseConfig
from rankbench.tables import read_table, write_table


def gather_sweep(cfg: BaseConfig, folder: Path, varied: list[str]) -> list[str]:
    """Join each analysis' tables over the jobs in `folder`, with a column for each key that varied; then present them.

    cfg: what the jobs share. The first varied key tells the rows of the figures apart. Returns lines for the reader.
    """
    jobs = sorted((path.parent for path in folder.glob("*/config.yaml")), key=lambda job: (len(job.name), job.name))
    tables = {}
    for name in cfg.analysis:
        parts = []
        for job in jobs:
            if (job / f"{name}.csv").exists():
                values = yaml.safe_load((job / "config.yaml").read_text())
                parts.append(read_table(job / f"{name}.csv").assign(**{key: str(_at(values, key)) for key in varied}))
        if parts:
            tables[name] = pd.concat(parts, ignore_index=True)
            write_table(tables[name], folder / f"{name}.csv")
    return present(cfg, tables, folder, varied[0] if varied else None) if tables else []


def _at(values: dict, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part, {})
    return values
