"""The tables of several runs as one, with a column for each key that differs, and their summary over seeds."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from rankbench.analyses import ANALYSES
from rankbench.config.arguments import typed_arguments
from rankbench.config.keys import ConfigError, closest
from rankbench.plots.sweep import column_in_words
from rankbench.report.jobs import (
    config_at,
    config_of,
    find_runs,
    flattened,
    names_of,
    short_keys,
    status_of,
    values_by_job,
    varying_keys,
)
from rankbench.report.study import is_done
from rankbench.runs.run import OBSERVED, Run
from rankbench.runs.tables import RUN_COLUMNS, column_help, over_seeds, with_errors


@dataclass(frozen=True)
class Runs:
    """Several runs, such as those of a sweep, and the keys whose values differ between them.

    `runs[0]` is the first run; `for run in runs` visits all of them in the order of the sweep's jobs, including jobs
    that failed or never began. In the tables every varied key is a column.
    """

    folders: list[Path]
    keys: list[str]

    def __len__(self) -> int:
        return len(self.folders)

    @typed_arguments()
    def __getitem__(self, number: int) -> Run:
        return Run(self.folders[number])

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self.folders)

    @typed_arguments()
    def table(self, name: str) -> pd.DataFrame:
        """Concatenate the runs' tables of an analysis; ConfigError if no run has one."""
        tables = {folder: _tables_at(folder, [name]) for folder in self.folders}
        table = _joined(name, tables, names_of(self.folders), _varied_values(self.folders, self.keys))
        if table is None:
            names = sorted({table.stem for folder in self.folders for table in folder.glob("*.csv")})
            raise ConfigError(
                f"{name}: no run has such a table{closest(name, names)}; there are {', '.join(names) or 'none'}; "
                'rankbench.analyze(run, "paths") measures one run at a time'
            )
        return self._labelled(table, name)

    @property
    def metrics(self) -> pd.DataFrame:
        """Concatenate `Run.metrics` of all runs that have begun to train."""
        if not any((folder / "metrics.csv").exists() for folder in self.folders):
            raise ConfigError("metrics: none of the runs has begun to train")
        return self.table("metrics")

    @property
    def final(self) -> pd.DataFrame:
        """A row for each run and seed with its status and final numbers, as in a report's sweep.csv."""
        return self._labelled(_final_numbers(self.folders, self.keys), "sweep")

    def _labelled(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """Convert the values of varied keys to numbers where possible; put the table's name, and what its columns mean,
        into `attrs`."""
        for key in self.keys:
            with suppress(ValueError):
                table[key] = pd.to_numeric(table[key].replace("", None))
        table.attrs = {"analysis": name, "varied": list(self.keys), "columns": column_help(name, table)}
        return table


def load_runs(text: str) -> Runs:
    """The runs given by `runs=`, with the keys that vary between them."""
    folders = find_runs(text)
    return Runs(folders, varying_keys(folders)[0])


def _names_of_tables() -> list[str]:
    """Names of the tables that runs leave and a report joins, including those of analyses from plug-ins."""
    return [*ANALYSES, *OBSERVED, "metrics"]


class Joined(NamedTuple):
    """What a report reads from its runs: the name, status and damage of each, their tables by name, and a row of final
    numbers for each seed."""

    names: dict[Path, str]
    statuses: dict[Path, str]
    damage: dict[Path, str]
    tables: dict[str, pd.DataFrame]
    final: pd.DataFrame


def read_all(jobs: list[Path], keys: list[str]) -> Joined:
    """Read and join the tables of these runs, with a column for each of these keys."""
    names = names_of(jobs)
    values = _varied_values(jobs, keys)
    read, damage = _read(jobs)
    statuses = {job: "damaged" if job in damage else status_of(job) for job in jobs}
    tables = {name: table for name in _names_of_tables() if (table := _joined(name, read, names, values)) is not None}
    return Joined(names, statuses, damage, tables, _final_numbers(jobs, keys, statuses))


def columns_of(jobs: list[Path], keys: list[str]) -> dict[str, list[str]]:
    """The columns of each table that these runs have, from the tables' first lines alone; those of the final numbers
    under an empty name."""
    columns: dict[str, dict[str, None]] = {"": dict.fromkeys(map(str, _final_numbers(jobs, keys)))}
    varied = [key for key in keys if key not in RUN_COLUMNS]
    for name in _names_of_tables():
        for file in (job / f"{name}.csv" for job in jobs):
            if file.is_file():
                with file.open(encoding="utf-8", errors="replace") as lines:
                    header = lines.readline().rstrip("\n").split(",")
                columns.setdefault(name, {}).update(dict.fromkeys([*RUN_COLUMNS, *header, *varied]))
    return {name: list(names) for name, names in columns.items()}


def _varied_values(jobs: list[Path], keys: list[str]) -> dict[Path, dict[str, str]]:
    """The values of each run's varied keys, without run, task, model and seed, which are columns already."""
    return values_by_job(jobs, [key for key in keys if key not in RUN_COLUMNS])


def _tables_at(job: Path, names: Iterable[str]) -> dict[str, pd.DataFrame]:
    tables = {name: Run(job).table(name) for name in names if (job / f"{name}.csv").exists()}
    if "metrics" in tables:  # add the columns of RUN_COLUMNS, which the other tables have already
        flat, curves = flattened(config_of(job)), tables["metrics"]
        who = {"run": "", "task": flat.get("task.name", ""), "model": flat.get("model.name", "")}
        tables["metrics"] = curves.assign(**who)[[*RUN_COLUMNS, *curves.columns.drop("seed")]]
    return tables


def _read(jobs: list[Path]) -> tuple[dict[Path, dict[str, pd.DataFrame]], dict[Path, str]]:
    """The tables of each run, without those that changed since they were written; and for each run with a file that
    cannot be read, which file and why."""
    read, damage = {}, {}
    for job in jobs:
        try:
            config_at(job / "config.yaml")
            changed = Run(job).changed_files()
            read[job] = _tables_at(job, [name for name in _names_of_tables() if f"{name}.csv" not in changed])
        except ConfigError as error:
            damage[job] = str(error)
    return read, damage


def _joined(
    name: str,
    tables: dict[Path, dict[str, pd.DataFrame]],
    names: dict[Path, str],
    values: dict[Path, dict[str, str]],
) -> pd.DataFrame | None:
    """Concatenate the runs' tables of this name, with their values of the varied keys; None if no run has it."""
    parts = [held[name].assign(run=names[job], **values[job]) for job, held in tables.items() if name in held]
    return pd.concat(parts, ignore_index=True) if parts else None


def _final_numbers(jobs: list[Path], keys: list[str], statuses: dict[Path, str] | None = None) -> pd.DataFrame:
    """A row for each run and seed with its final numbers. statuses: of the runs, if they are known already."""
    names, values, rows = names_of(jobs), _varied_values(jobs, keys), []
    for job in jobs:
        config, status = flattened(config_of(job)), status_of(job) if statuses is None else statuses[job]
        who = {"run": names[job], "task": config.get("task.name", ""), "model": config.get("model.name", "")}
        seeds = [] if status == "damaged" else Run(job).summary().get("seeds")
        for numbers in seeds or [{"seed": config.get("seed", ""), "status": status}]:
            rows.append({**who, "seed": numbers.get("seed"), **values[job], "job_status": status, **numbers})
    return pd.DataFrame(rows)


def summarise(seeds: pd.DataFrame, axes: list[str], more: Iterable[str] = ()) -> pd.DataFrame:
    """Final test accuracy and losses by the varied keys, over the seeds of finished jobs: mean, interval, best. axes:
    the keys, without the seed; none: task and model. more: further columns, with mean and interval."""
    axes = axes or ["task", "model"]
    done = seeds[is_done(seeds)]
    summary = None
    best_of = {"test_accuracy": "largest", "valid_loss": "smallest", "test_loss": "smallest"}
    for value, best in (best_of | dict.fromkeys(more)).items():
        if value not in done or done[value].isna().all():
            continue
        names = {"num_seeds": f"{value}_seeds"} | ({best: f"{value}_best"} if best else {})
        names |= {column: f"{value}_{column}" for column in ("mean", "low95", "high95")}
        part = over_seeds(done, axes, value).rename(columns=names)[[*axes, *names.values()]]
        summary = part if summary is None else summary.merge(part, on=axes, how="outer")
    if summary is None:
        return pd.DataFrame()
    counted = [name for name in summary if name.endswith("_seeds")]
    summary.insert(len(axes), "num_seeds", summary[counted].max(axis=1).astype(int))
    return summary.drop(columns=counted)


def for_print(summary: pd.DataFrame, chosen: Iterable[str]) -> pd.DataFrame:
    """The summary with one column for each number, as mean and interval, and with names as in a paper. chosen: the
    numbers to keep; if the summary has none of them, it keeps all."""
    values = [name.removesuffix("_mean") for name in summary if name.endswith("_mean")]
    keys = list(summary.columns[: summary.columns.get_loc("num_seeds")])
    names = {
        key: key if short_key == key else short_key.replace("_", " ") for key, short_key in short_keys(keys).items()
    }
    table = summary[[*keys, "num_seeds"]].rename(columns=names | {"num_seeds": "seeds"})
    for value in [value for value in values if value in chosen] or values:
        ends = zip(*(summary[f"{value}_{end}"] for end in ("mean", "low95", "high95")), strict=True)
        table[column_in_words(value)] = [with_errors(*numbers) for numbers in ends]
    return table
