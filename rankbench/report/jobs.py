"""The runs of a report: where they are, how far they have come, and which keys of their configs differ."""

import fcntl
import glob
import os
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from rankbench.config.keys import ConfigError, as_typed
from rankbench.runs.files import OUTPUTS, by_time, regular
from rankbench.runs.records import read_yaml
from rankbench.runs.run import Run
from rankbench.runs.sweep import Sweep

# Keys that are not variables of an experiment: where and on what it runs, how often it is evaluated, what is measured.
SILENT: tuple[str, ...] = ("out", "beyond_memory", "seed", "seeds", "replicas", "device", "threads", "run", "analysis")
SILENT += ("claims", "published", "figures", "objective", "observe.every")
SILENT += ("trainer.eval_every", "trainer.checkpoint_every", "trainer.keep_state", "trainer.writers")
NETWORKS = ("checkpoint", "module")  # keys whose values are paths of networks
SKIPS = "model.skips"  # decides model.skip and model.mlp_skip, unless it is null


def find_runs(text: str) -> list[Path]:
    """The runs given by `runs=`, in order; ConfigError if there is none. `latest`: the newest sweep or run. A list: the
    runs of each of its folders, of which none may lack them.

    Folders of analyses count only if there is no folder of training.
    """
    if text == "latest":
        dated = [(max(map(_written, runs)), runs) for folder in OUTPUTS.glob("train/*") if (runs := runs_in(folder))]
        if not dated:
            raise ConfigError(f"runs=latest: no run under {OUTPUTS.resolve()}; train one with `rankbench train`")
        return max(dated)[1]
    is_list = text[:1] == "[" and text[-1:] == "]" and not Path(text).exists()
    names = _names_in(text) if is_list else [text]
    jobs = list(dict.fromkeys(job for name in names for job in _runs_named(name)))
    configs = {job: config_of(job) for job in jobs}
    jobs = [job for job in jobs if "bench" not in configs[job]]  # timings, by versions before 0.2
    trained = [job for job in jobs if "run" not in configs[job]]
    if not any((job / "config.yaml").exists() for job in jobs):
        raise ConfigError(f"runs={text}: no run there; give a run's or a sweep's folder, a glob, or runs=latest")
    return trained or jobs


def _names_in(text: str) -> list[str]:
    """The names in a list. A name may hold commas: a part between two of them that alone names no run is joined with
    those behind it. ConfigError for a part that is left over."""
    parts = text[1:-1].split(",")
    names: dict[int, list[str]] = {len(parts): []}  # those of the parts from each on
    for first in reversed(range(len(parts))):
        for end in (end for end in range(first + 1, len(parts) + 1) if end in names and first not in names):
            if _runs_named(name := ",".join(parts[first:end]).strip()):
                names[first] = [name, *names[end]]
    if 0 not in names:
        left = parts[max(set(range(len(parts))) - names.keys())].strip()
        raise ConfigError(f"runs={text}: no run in {left or 'an empty name'}; correct it, or leave it out")
    return names[0]


def _runs_named(name: str) -> list[Path]:
    """The runs in the folder of this name or, if there is none, in those of a glob."""
    name = os.path.expanduser(name)  # in a list no shell has done so
    matches = [name] if name and Path(name).exists() else sorted(glob.glob(name, recursive=True))
    return [job for match in matches for job in runs_in(Path(match))]


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


def _written(job: Path) -> tuple[bool, int]:
    files = [path for path in (job / "summary.json", job / "config.yaml") if path.exists()]
    return max((by_time(path.stat().st_mtime_ns) for path in files), default=by_time(0))


def _number(job: Path) -> tuple[int, str]:
    """Sort key for jobs by number: 2 before 10."""
    number = job.name.partition("_")[0]
    return (int(number) if number.isdecimal() else -1, job.name)


def status_of(job: Path) -> str:
    """Status of the run. `interrupted`: the summary says running, but no process is training there. `missing`: a job of
    a sweep that never began. `damaged`: its config or its summary cannot be read."""
    if not job.exists():
        return "missing"
    try:
        status = Run(job).status
        config_at(job / "config.yaml")
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


def varying_keys(jobs: list[Path]) -> tuple[list[str], dict[str, list[str]]]:
    """The keys whose values differ between the runs' configs, and for each of them the keys that follow it.

    The choice of a group stands for its keys: where model.name differs, a key of the model with one value for each name
    follows `model`. Likewise, any key can follow `budget`, and model.skip and model.mlp_skip can follow model.skips.
    """
    configs = [flattened(config) for job in jobs if (config := config_of(job))]
    every = dict.fromkeys(key for config in configs for key in config)
    values = {key: [config.get(key, "") for config in configs] for key in every}
    # an option of an analysis has a value only in the runs that have the analysis
    num_values = {key: len(set(values[key]) - {"" if _is_option(key) else None}) for key in every}
    differ = [key for key in every if not _is_silent(key) and num_values[key] > 1]
    leaders = [key for key in differ if key in ("budget", SKIPS) or (key.endswith(".name") and key.count(".") == 1)]
    keys: list[str] = []
    follows: dict[str, Any] = {}
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


def _leads(leader: str, key: str, values: dict[str, list[str]]) -> bool:
    if leader == SKIPS:
        return key in ("model.skip", "model.mlp_skip") and "null" not in values[leader]
    if leader != "budget" and leader.partition(".")[0] != key.partition(".")[0]:
        return False
    pairs = set(zip(values[leader], values[key], strict=True))
    return len(pairs) == len(set(values[leader]))


def keys_of(jobs: list[Path]) -> list[str]:
    """All keys of the runs' configs."""
    return list(dict.fromkeys(["task", "model", *(key for job in jobs for key in flattened(config_of(job)))]))


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Each key without its group, or the whole key where two would be the same."""
    last = {key: key.rpartition(".")[2] for key in keys}
    counts = Counter(last.values())
    return {key: name if counts[name] == 1 else key for key, name in last.items()}


def names_of(jobs: list[Path]) -> dict[Path, str]:
    """Names of the runs in tables: the folder's name, after the sweep's name if two folders have the same."""
    names = {job: Run(job).name for job in jobs}
    counts = Counter(names.values())
    return {job: name if counts[name] == 1 else f"{job.resolve().parent.name}/{name}" for job, name in names.items()}


def config_of(job: Path) -> dict[str, Any]:
    """The run's config as written; empty if it is missing or cannot be read, which `status_of` reports. An analysis of
    a trained run takes its network, task and training from that run, if the run still exists."""
    try:
        config = config_at(job / "config.yaml")
        if config.get("run") is None or Run(job).status != "finished":
            return config
        trained = config_at(Path(Run(job).summary().get("run") or config["run"]) / "config.yaml")
    except ConfigError:
        return {}
    return config | {key: trained[key] for key in ("model", "task", "optimizer", "trainer") if key in trained}


def config_at(path: Path) -> dict[str, Any]:
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


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys and their values as a user would write them."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = as_typed(value)
    return flat


def values_of(job: Path, keys: list[str]) -> dict[str, str]:
    """Values of the keys in this job's config, as text; for a group, the name of the choice. A job that has not begun
    has only its own overrides."""
    flat = flattened(config_of(job)) or _own_words(job)
    return {key: flat.get(key, flat.get(f"{key}.name", "")) for key in keys}


def values_by_job(jobs: list[Path], keys: list[str]) -> dict[Path, dict[str, str]]:
    """Values of the keys in each job's config. Of the paths of checkpoints and modules the last parts, as many as tell
    them apart."""
    values = {job: values_of(job, keys) for job in jobs}
    for key in (key for key in NETWORKS if key in keys):
        paths = {of_job[key] for of_job in values.values()}
        parts = 1
        while len({_tail(path, parts) for path in paths}) < len(paths):
            parts += 1
        for of_job in values.values():
            of_job[key] = _tail(of_job[key], parts)
    return values


def _tail(path: str, parts: int) -> str:
    """The last parts of a path; all of it if it has fewer."""
    return "/".join(path.rstrip("/").split("/")[-parts:]) if path.count("/") >= parts else path


def shared(configs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """The keys that have the same value in all runs that have begun."""
    flats = [flattened(config) for config in configs if config]
    first = flats[0] if flats else {}
    return {key: value for key, value in first.items() if all(flat.get(key) == value for flat in flats)}


def _own_words(job: Path) -> dict[str, str]:
    overrides = [listed.overrides for listed in Sweep(job.parent).jobs() if listed.folder == job.name]
    values = dict(word.lstrip("+").split("=", 1) for words in overrides for word in words if "=" in word)
    return {key: text.lower() if text in ("True", "False") else text for key, text in values.items()}
