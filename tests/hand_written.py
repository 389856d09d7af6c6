"""Folders of runs written by hand, as far as a report looks at them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import yaml


def write_run(
    folder: Path, config: dict[str, Any], seeds: Iterable[dict] = (), status: str = "finished", **tables: Any
) -> Path:
    """A run's folder. config: the keys that are not those of a san that sorts from seed 0. seeds: the final numbers of
    each, which are numbered from 0 unless they say otherwise; tables: rows of the tables, by name."""
    config = {"task": {"name": "sorting"}, "seed": 0} | config | {"model": {"name": "san"} | config.get("model", {})}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    rows = [{"seed": number, "status": status} | numbers for number, numbers in enumerate(seeds)]
    (folder / "summary.json").write_text(json.dumps({"status": status, "seeds": rows}))
    for name, table in tables.items():
        pd.DataFrame(table).to_csv(folder / f"{name}.csv", index=False)
    return folder
