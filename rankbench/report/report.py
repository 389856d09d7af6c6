"""Report on many runs: their tables joined, a summary over seeds, figures, verdicts, and a page."""

import fcntl
import glob
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from rankbench.analyses import ANALYSES
from rankbench.analyses.runner import judge_all
from rankbench.claims import CLAIMS, figures_published
from rankbench.config import FigureKeys, StudyKeys
from rankbench.keys import ConfigError, as_typed, closest
from rankbench.plots.sweep import column_in_words
from rankbench.report.figures import FIGURES, draw_analyses, draw_final, draw_observed, draw_study, final_value
from rankbench.report.page import write_page
from rankbench.report.study import is_done, studied_columns, with_columns
from rankbench.runs.files import OUTPUTS, regular, write_text
from rankbench.runs.records import read_yaml
from rankbench.runs.run import OBSERVED, Run
from rankbench.runs.sweep import Sweep
from rankbench.runs.tables import (
    WHO,
    booleans_as_words,
    latex,
    markdown,
    over_seeds,
    read_table,
    with_errors,
    write_table,
)

# Keys that are not variables of an experiment: where it runs, on what, how often it is evaluated, what is measured.
SILENT = ("out", "beyond_memory", "seed", "replicas", "device", "threads", "run", "analysis", "claims", "published")
SILENT += ("trainer.eval_every", "trainer.checkpoint_every", "observe.every")
SKIPS = "model.skips"  # decides model.skip and model.mlp_skip, unless it is null


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

    def __getitem__(self, number: int) -> Run:
        return Run(self.folders[number])

    def __iter__(self) -> Iterator[Run]:
        return map(Run, self.folders)

    def table(self, name: str) -> pd.DataFrame:
        """Concatenate the runs' tables of an analysis; ConfigError if no run has one."""
        tables = {folder: _tables_at(folder, [name]) for folder in self.folders}
        table = _joined(name, tables, _names(self.folders), self._values)
        if table is None:
            names = sorted({table.stem for folder in self.folders for table in folder.glob("*.csv")})
            raise ConfigError(
                f"{name}: no run has such a table{closest(name, names)}; there are {', '.join(names) or 'none'}; "
                'rankbench.analyze(run, "paths") measures one run after the other'
            )
        return self._labelled(table, name)

    @property
    def metrics(self) -> pd.DataFrame:
        """Concatenate `Run.metrics` of all runs that have begun to train."""
        names, values = _names(self.folders), self._values
        begun = [run for run in self if (run.folder / "metrics.csv").exists()]
        if not begun:
            raise ConfigError("metrics: none of the runs has begun to train")
        parts = [run.metrics.assign(run=names[run.folder], **values[run.folder]) for run in begun]
        return self._labelled(pd.concat(parts, ignore_index=True), "metrics")

    @property
    def final(self) -> pd.DataFrame:
        """A row for each run and seed with its status and final numbers, as in a report's sweep.csv."""
        statuses = {folder: status_of(folder) for folder in self.folders}
        return self._labelled(_final_numbers(_names(self.folders), statuses, self._values), "sweep")

    @property
    def _values(self) -> dict[Path, dict[str, str]]:
        keys = [key for key in self.keys if key not in WHO]
        return {folder: _values(folder, keys) for folder in self.folders}

    def _labelled(self, table: pd.DataFrame, name: str) -> pd.DataFrame:
        """Convert the values of varied keys to numbers where possible, and put the table's name into `attrs`."""
        for key in self.keys:
            with suppress(ValueError):
                table[key] = pd.to_numeric(table[key].replace("", None))
        table.attrs = {"analysis": name, "varied": list(self.keys)}
        return table


def load_runs(text: str) -> Runs:
    """The runs given by `runs=`, with the keys that vary between them."""
    folders = find_runs(text)
    return Runs(folders, varying_keys(folders)[0])


def find_runs(text: str) -> list[Path]:
    """The runs given by `runs=`, in order; ConfigError if there is none. `latest`: the newest sweep or run. A list:
    those of each of its folders.

    Folders of analyses count only if there is no folder of training.
    """
    if text == "latest":
        dated = [(max(map(_written, runs)), runs) for folder in OUTPUTS.glob("train/*") if (runs := runs_in(folder))]
        if not dated:
            raise ConfigError(f"runs=latest: no run under {OUTPUTS.resolve()}; train one with `rankbench train`")
        return max(dated)[1]
    names = text[1:-1].split(",") if text[:1] == "[" and text[-1:] == "]" and not Path(text).exists() else [text]
    matches = [[name] if Path(name).exists() else sorted(glob.glob(name, recursive=True)) for name in names]
    folders = [Path(match) for of_name in matches for match in of_name]
    jobs = list(dict.fromkeys(job for folder in folders for job in runs_in(folder)))
    configs = {job: _config(job) for job in jobs}
    jobs = [job for job in jobs if "bench" not in configs[job]]
    trained = [job for job in jobs if "run" not in configs[job]]
    if not any((job / "config.yaml").exists() for job in jobs):
        raise ConfigError(f"runs={text}: no run there; give a run's or a sweep's folder, a glob, or runs=latest")
    return trained or jobs


def runs_in(folder: Path) -> list[Path]:
    """The runs at or below a folder, with jobs in the order of their numbers.

    A sweep's jobs include those without a config, which have not begun or failed before they wrote one.
    """
    if (folder / "config.yaml").is_file():
        return [folder]
    if (folder / ".hydra").is_dir() and (folder.parent / "multirun.yaml").exists():
        return [folder]
    if not folder.exists() and folder.name in {job.folder for job in Sweep(folder.parent).missing()}:
        return [folder]
    if not folder.is_dir():
        return []
    below = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink() and path.name[0] != "."]
    below += [folder / job.folder for job in Sweep(folder).missing()]
    return [run for path in sorted(below, key=_number) for run in runs_in(path)]


def _written(job: Path) -> int:
    return max(
        (path.stat().st_mtime_ns for path in (job / "summary.json", job / "config.yaml") if path.exists()), default=0
    )


def _names_of_tables() -> list[str]:
    """The tables that runs leave and a report joins; a plug-in adds to the analyses."""
    return [*ANALYSES, *OBSERVED, "metrics"]


def _number(job: Path) -> tuple[int, str]:
    """Sort key for jobs by number: 2 before 10."""
    number = job.name.partition("_")[0]
    return (int(number) if number.isdigit() else -1, job.name)


def check_study(chosen: StudyKeys, jobs: list[Path]) -> None:
    """Raise ConfigError for a key that no run has, and for a column that cannot be drawn."""
    varying = varying_keys(jobs)[0]
    keys = _with_chosen(varying, chosen, jobs)
    studied = studied_columns(chosen, *_read_all(jobs, keys)[3:], keys) if chosen.value or chosen.where else {}
    known = dict.fromkeys([*_keys_of(jobs), *(str(name) for rows in studied.values() for name in rows)])
    for name, key in chosen.places.items():
        if key is not None and key not in known:
            raise ConfigError(
                f"report.{name}={key}: no key of these runs{closest(key, list(known))}; "
                f"those that vary are {', '.join(varying) or 'none'}"
            )


def _keys_of(jobs: list[Path]) -> list[str]:
    """All keys of the runs' configs."""
    return list(dict.fromkeys(["task", "model", *(key for job in jobs for key in _flat(_config(job)))]))


def _with_chosen(keys: list[str], chosen: FigureKeys | None, jobs: list[Path]) -> list[str]:
    """The varied keys and the runs' keys that the user chose for a figure."""
    known = _keys_of(jobs) if chosen else []
    added = [key for key in chosen.places.values() if key in known and key not in keys] if chosen else []
    return [*keys, *dict.fromkeys(added)]


def gather_sweep(folder: Path, varied: list[str]) -> list[str]:
    """Write the report of a finished sweep into its folder. varied: the keys that the sweep varied."""
    jobs = [job for job in runs_in(folder) if job != folder and not {"bench", "runs"} & _config(job).keys()]
    known = {key for job in jobs for key in _flat(_config(job))} | set(WHO)
    # a sweep over presets, groups or runs varies more keys than it names
    is_named = set(varied) <= (known | set(SILENT)) - {"run"}
    named = [key for key in varied if key not in SILENT] if is_named else None
    return gather(jobs, folder, named) if any((job / "config.yaml").exists() for job in jobs) else []


def gather(
    jobs: list[Path],
    folder: Path,
    varied: list[str] | None = None,
    chosen: StudyKeys | None = None,
    statistic: str = "mean",
    column: str | None = None,
    live: str = "",
) -> list[str]:
    """Join the runs' tables, with a column for each varied key; then summarise, draw, judge, and write a page.

    sweep.csv: a row for each job and seed with its status and final numbers. summary.csv, .md and .tex: means over
    seeds. For each analysis, the jobs' tables are concatenated. varied: None to find the keys in the runs' configs.
    statistic: mean | best, over seeds, for the figure of final numbers. column: single | double, the figures' width.
    live: what a page that is written again and again says of that.
    Returns lines for the reader.
    """
    varying, follows = varying_keys(jobs)
    keys = _with_chosen(varying if varied is None else varied, chosen, jobs)
    names, statuses, damage, tables, final = _read_all(jobs, keys)
    studied = studied_columns(chosen, tables, final, keys)
    write_table(with_columns(final, studied, chosen, keys), folder / "sweep.csv")
    seeds = booleans_as_words(read_table(folder / "sweep.csv"))
    lines = [
        f"{len(jobs)} jobs, {', '.join(f'{count} {status}' for status, count in Counter(statuses.values()).items())}"
    ]
    lines += [
        f"{names[job]}: {status}{f' ({damage[job]})' if job in damage else ''}"
        for job, status in statuses.items()
        if status != "finished"
    ]
    for job in jobs:
        if job not in damage and (changed := Run(job).changed_files()):
            lines.append(f"{names[job]}: changed since it was written, so tables are left out: {', '.join(changed)}")
    lines.append(f"-> {folder / 'sweep.csv'}")
    summary = summarise(seeds, keys, (value for value in studied if "." in value))
    if len(summary):
        write_table(summary, folder / "summary.csv")
        write_text(folder / "summary.md", markdown(summary))
        write_text(folder / "summary.tex", latex(_for_print(summary, studied)))
        lines.append(f"-> {folder / 'summary.csv'}, .md and .tex")
    captions = {}
    if chosen:
        done = seeds[is_done(seeds)]
        captions = draw_study(studied, done, keys, chosen, statistic, folder, column, final_value(done))
        # a column of a table is a place in the figures of the study alone
        chosen = replace(chosen, **{place: None for place, key in chosen.places.items() if key not in keys})
    captions |= draw_final(seeds, keys, chosen, statistic, folder, column)
    for name, table in tables.items():
        write_table(table, folder / f"{name}.csv")
    configs = {job: _config(job) for job in jobs}
    requested = dict.fromkeys(claim for config in configs.values() for claim in config.get("claims") or ())
    claims = [name for name in requested if name in CLAIMS and CLAIMS[name].table in tables]
    figures = list({config.get("published") for config in configs.values() if config.get("published")})
    figure_published = figures[0] if len(figures) == 1 and figures[0] in figures_published() else None
    facets = [key for key in keys if key not in ("run", "seed")]
    over_steps = {name: tables[name] for name in ("metrics", *OBSERVED) if name in FIGURES and name in tables}
    captions |= draw_observed(over_steps, facets, chosen, folder, column)
    captions |= draw_analyses(tables, facets, chosen, figure_published, folder, column)
    lines += [f"-> {folder / name}.png, .pdf and .svg" for name in captions]
    lines += judge_all(claims, tables, folder, facets)
    write_page(
        folder,
        {names[job]: (job, statuses[job], _values(job, keys)) for job in jobs},
        {"seeds": seeds, "summary": summary},
        captions,
        figure_published,
        follows if varied is None else {},
        bool(claims),
        _shared(configs.values()),
        live,
    )
    return [*lines, f"-> {folder / 'report.html'}"]


def _for_print(summary: pd.DataFrame, chosen: Iterable[str]) -> pd.DataFrame:
    """The summary with a column for each number, as mean and interval, and with names as in a paper. chosen: the
    numbers to keep, if there are any among them."""
    values = [name.removesuffix("_mean") for name in summary if name.endswith("_mean")]
    keys = list(summary.columns[: summary.columns.get_loc("num_seeds")])
    last = Counter(key.rpartition(".")[2] for key in keys)
    names = {key: key if last[short_key := key.rpartition(".")[2]] > 1 else short_key.replace("_", " ") for key in keys}
    table = summary[[*keys, "num_seeds"]].rename(columns=names | {"num_seeds": "seeds"})
    for value in [value for value in values if value in chosen] or values:
        ends = zip(*(summary[f"{value}_{end}"] for end in ("mean", "low95", "high95")), strict=True)
        table[column_in_words(value)] = [with_errors(*numbers) for numbers in ends]
    return table


def _read_all(
    jobs: list[Path], keys: list[str]
) -> tuple[dict[Path, str], dict[Path, str], dict[Path, str], dict[str, pd.DataFrame], pd.DataFrame]:
    """The runs' names, statuses and damage; their tables, joined, by name; and the final numbers of every seed."""
    names = _names(jobs)
    # run, task, model and seed are columns already
    values = {job: _values(job, [key for key in keys if key not in WHO]) for job in jobs}
    read, damage = _read(jobs)
    statuses = {job: "damaged" if job in damage else status_of(job) for job in jobs}
    tables = {name: table for name in _names_of_tables() if (table := _joined(name, read, names, values)) is not None}
    return names, statuses, damage, tables, _final_numbers(names, statuses, values)


def varying_keys(jobs: list[Path]) -> tuple[list[str], dict[str, list[str]]]:
    """The keys whose values differ between the runs' configs, and for each of them the keys that follow it.

    The choice of a group stands for its keys: where model.name differs, a key of the model with one value for each name
    follows `model`. Likewise, any key can follow `budget`, and the skips of a model the key of all of them.
    """
    configs = [_flat(config) for job in jobs if (config := _config(job))]
    every = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key, "") for config in configs] for key in every}
    differ = [key for key in every if not _is_silent(key) and _num_values(key, values[key]) > 1]
    leaders = [key for key in differ if key in ("budget", SKIPS) or (key.endswith(".name") and key.count(".") == 1)]
    keys, follows = [], {}
    for key in differ:
        leader = next((candidate for candidate in leaders if candidate != key and _leads(candidate, key, values)), None)
        if leader is None:
            keys.append(key.removesuffix(".name") if key in leaders else key)
        else:
            follows.setdefault(leader.removesuffix(".name"), []).append(key)
    return keys, follows


def _is_option(key: str) -> bool:
    """Whether the key is an option of an analysis."""
    return key.startswith("analysis.") and key.count(".") > 1


def _is_silent(key: str) -> bool:
    return not _is_option(key) and any(key == silent or key.startswith(f"{silent}.") for silent in SILENT)


def _num_values(key: str, values: list[str]) -> int:
    """Number of values of a key; for an option of an analysis, among the runs that have the analysis."""
    return len(set(values) - ({""} if _is_option(key) else set()))


def _leads(leader: str, key: str, values: dict[str, list[str]]) -> bool:
    if leader == SKIPS:
        return key in ("model.skip", "model.mlp_skip") and "null" not in values[leader]
    if leader != "budget" and leader.partition(".")[0] != key.partition(".")[0]:
        return False
    pairs = set(zip(values[leader], values[key], strict=True))
    return len(pairs) == len(set(values[leader]))


def summarise(seeds: pd.DataFrame, keys: list[str], more: Iterable[str] = ()) -> pd.DataFrame:
    """Final test accuracy and loss by the varied keys, over the seeds of finished jobs: mean, interval, best; and of
    more columns mean and interval."""
    axes = [key for key in keys if key in seeds and key not in ("run", "seed")] or ["task", "model"]
    done = seeds[is_done(seeds)]
    summary = None
    for value, best in ({"test_accuracy": "largest", "test_loss": "smallest"} | dict.fromkeys(more)).items():
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


def _tables_at(job: Path, names: Iterable[str]) -> dict[str, pd.DataFrame]:
    tables = {name: Run(job).table(name) for name in names if (job / f"{name}.csv").exists()}
    if "metrics" in tables:  # without the columns of the others
        flat, curves = _flat(_config(job)), tables["metrics"]
        who = {"run": "", "task": flat.get("task.name", ""), "model": flat.get("model.name", "")}
        tables["metrics"] = curves.assign(**who)[[*WHO, *curves.columns.drop("seed")]]
    return tables


def _read(jobs: list[Path]) -> tuple[dict[Path, dict[str, pd.DataFrame]], dict[Path, str]]:
    """The tables of the analyses of each run, without those that changed since they were written; and, of runs with a
    file that cannot be read, which one and why."""
    read, damage = {}, {}
    for job in jobs:
        try:
            _config_at(job / "config.yaml")
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


def _names(jobs: list[Path]) -> dict[Path, str]:
    """Names of the runs in tables: the folder's name, after the sweep's name if two folders have the same."""
    counts = Counter(Run(job).name for job in jobs)
    return {
        job: Run(job).name if counts[Run(job).name] == 1 else f"{job.resolve().parent.name}/{Run(job).name}"
        for job in jobs
    }


def status_of(job: Path) -> str:
    """Status of the run. `interrupted`: the summary says running, but no process is training there. `missing`: a job of
    a sweep that never began. `damaged`: its config or its summary cannot be read."""
    if not job.exists():
        return "missing"
    try:
        status = Run(job).status
        _config_at(job / "config.yaml")
    except ConfigError:
        return "damaged"
    if status != "running":
        return status
    try:
        with regular(job / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # there is no lock, so no process is training
        pass
    return "interrupted"


def _config(job: Path) -> dict[str, Any]:
    """The run's config as written; empty if there is none, or one that cannot be read: `status_of` says so. An analysis
    of a trained run takes its network, task and training from that run, if the run still exists."""
    try:
        config = _config_at(job / "config.yaml")
        if config.get("run") is None or Run(job).status != "finished":
            return config
        trained = _config_at(Path(Run(job).summary().get("run") or config["run"]) / "config.yaml")
    except ConfigError:
        return {}
    return config | {key: trained[key] for key in ("model", "task", "optimizer", "trainer") if key in trained}


def _config_at(path: Path) -> dict[str, Any]:
    """Keys of a config, empty if there is none; ConfigError for a file that is not a config."""
    if not path.exists():
        return {}
    stat = path.stat()
    return _read_config(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=1024)  # a report asks ten times, and YAML is read slowly
def _read_config(path: Path, written: tuple[int, int, int]) -> dict[str, Any]:
    """Read the config that has this inode, size and time."""
    config = read_yaml(path)
    for key, kind in {"claims": list, "published": str, "run": str}.items():
        if not isinstance(config.get(key), kind | None):
            raise ConfigError(f"{path}: not a run's config: {key}={as_typed(config[key])}")
    if not all(isinstance(claim, str) for claim in config.get("claims") or ()):
        raise ConfigError(f"{path}: not a run's config: claims={as_typed(config['claims'])}")
    return config


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and their values as a user would write them."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = as_typed(value)
    return flat


def _values(job: Path, keys: list[str]) -> dict[str, str]:
    """Values of the keys in this job's config, as text; for a group, the name of the choice. A job that has not begun
    only has its own overrides."""
    flat = _flat(_config(job)) or _own_words(job)
    return {key: flat.get(key, flat.get(f"{key}.name", "")) for key in keys}


def _shared(configs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The keys that have the same value in all runs that have begun."""
    flats = [_flat(config) for config in configs if config]
    first = flats[0] if flats else {}
    return {key: value for key, value in first.items() if all(flat.get(key) == value for flat in flats)}


def _own_words(job: Path) -> dict[str, str]:
    overrides = [listed.overrides for listed in Sweep(job.parent).jobs() if listed.folder == job.name]
    values = dict(word.lstrip("+").split("=", 1) for words in overrides for word in words if "=" in word)
    return {key: text.lower() if text in ("True", "False") else text for key, text in values.items()}


def _final_numbers(
    names: dict[Path, str], statuses: dict[Path, str], values: dict[Path, dict[str, str]]
) -> pd.DataFrame:
    rows = [row for job, name in names.items() for row in _summary_rows(job, name, statuses[job], values[job])]
    return pd.DataFrame(rows)


def _summary_rows(job: Path, name: str, status: str, values: dict[str, str]) -> list[dict]:
    config = _flat(_config(job))
    who = {"run": name, "task": config.get("task.name", ""), "model": config.get("model.name", "")}
    seeds = [] if status == "damaged" else Run(job).summary().get("seeds")
    seeds = seeds or [{"seed": config.get("seed", ""), "status": status}]
    return [{**who, "seed": numbers.get("seed"), **values, "job_status": status, **numbers} for numbers in seeds]
