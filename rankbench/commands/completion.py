"""Tab completion of commands, groups, keys, values and folders in bash, zsh and fish.

Hydra's own script drops the subcommand; those in the folder shells keep it. Hydra takes too long to import and to
compose a config while a user waits, so completions come from the keys and the YAML files themselves.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args, get_origin

from rankbench.config import plugins, presets
from rankbench.config.keys import ConfigError, entries
from rankbench.config.schema import SCHEMAS

TEXTS = ("list", "explain", "check", "new", "completion")  # commands without a config
SHELLS = ("bash", "zsh", "fish")
HOW = 'bash and zsh: eval "$(rankbench completion bash)"; fish: rankbench completion fish | source'
HELP = f"Usage: rankbench completion {'|'.join(SHELLS)}\n\n{HOW}"
OPTIONS = ("-m", "--multirun", "--help", "--cfg", "--info", "--config-dir", "--version")
VALUES = {"--cfg": ("job", "hydra", "all"), "--info": ("defaults", "defaults-tree", "config", "searchpath", "all")}
PATHS = ("run", "runs", "out", "inputs", "table", "pages", "task.path", "model.path")  # keys with a path
MOST_RUNS = 30  # most runs and sweeps to offer


def script(words: list[str]) -> str:
    """The shell code that turns completion on; ConfigError for an unsupported shell."""
    if len(words) != 1 or words[0] not in SHELLS:
        raise ConfigError(": ".join([*words, f"of which shell? {HOW}"]))
    return (Path(__file__).with_name("shells") / f"completion.{words[0]}").read_text(encoding="utf-8")


def candidates(words: list[str]) -> list[str]:
    """Completions of the last of these words (all that follow `rankbench`)."""
    word = words[-1] if words else ""
    return [completion for completion in _candidates(words, word) if completion.startswith(word)]


def _candidates(words: list[str], word: str) -> Iterable[str]:
    if len(words) <= 1:
        return (*SCHEMAS, *TEXTS, "--help", "--version")
    command, before = words[0], words[-2]
    try:
        plugins.find(plugins.named(words[1:-1]))
    except ConfigError:
        return []
    if command == "explain":
        all_keys = [name for schema in SCHEMAS.values() for name in _keys(schema)]
        for group in ("task", "analysis"):
            all_keys += _keys_of_choices(group, plugins.choices(group))
        return dict.fromkeys(all_keys)
    if command not in SCHEMAS:
        new = ("plugin",) if len(words) == 2 else ()
        return {"completion": SHELLS, "new": new, "list": ("plugins=",), "check": ("plugins=",)}.get(command, ())
    if before in VALUES or word.startswith("-"):
        return VALUES.get(before, OPTIONS)
    ((sign, key, equals, value),) = re.findall(r"\A(\+*)([^=]*)(=?)(.*)\Z", word, re.DOTALL)
    if equals:
        return [f"{sign}{key}={rest}" for rest in _values(command, key, value)]
    # complete up to the next dot of each name; the next Tab offers what is below it
    ahead = re.compile(rf"{re.escape(key)}[^.]*\.?")
    names = {match[0] for name in _names(command, words[1:-1], key) if (match := ahead.match(name))}
    return [f"{sign}{name}{'' if name.endswith('.') else '='}" for name in sorted(names)]


def _values(command: str, key: str, value: str) -> Iterable[str]:
    """The values that may follow `key=`."""
    if key in PATHS:
        runs = ["latest", *_runs(value)] if key in ("run", "runs") else []
        below = sorted(glob.glob(f"{glob.escape(value)}*"))
        return dict.fromkeys([*runs, *(f"{path}/" if os.path.isdir(path) else path for path in below)])
    if command == "report" and key == "experiment":
        return ["all", *plugins.choices(key)]
    choices: Iterable[str] = ()
    if key == "plugins":
        choices = plugins.FOUND
    elif key in plugins.groups_of(command):
        choices = plugins.choices(key)
    elif (entry := next((entry for entry in entries(SCHEMAS[command]) if entry.name == key), None)) is not None:
        is_boolean = bool in (entry.type, *get_args(entry.type))
        choices = ("true", "false") if is_boolean else entry.key.choices
    before = value[: max(value.rfind("["), value.rfind(",")) + 1]
    return [f"{before}{choice}" for choice in choices]


def _names(command: str, words: list[str], key: str) -> list[str]:
    """The command's groups and keys; also those below task and analysis, unless `key` begins in another group."""
    names = list(_keys(SCHEMAS[command]))
    group, dot, _ = key.partition(".")
    if dot and group not in ("task", "analysis"):  # then no YAML file matters
        return names
    chosen = plugins.groups_of(command)
    names += [*chosen, *(["experiment"] if command == "report" else [])]
    typed = dict(word.lstrip("+").split("=", 1) for word in words if "=" in word)
    chosen |= {**_chosen_by(typed.get("experiment")), **typed}
    for group in ("task", "analysis"):
        choices = chosen.get(group) or []
        choices = choices.strip("[]").split(",") if isinstance(choices, str) else choices
        names += _keys_of_choices(group, choices)
    return names


def _chosen_by(preset: str | None) -> dict[str, str | list[str]]:
    """The choices, by group, of a preset and of those that it builds on."""
    entries = (entry for file in presets.files_of(preset or "") for entry in plugins.defaults_of(file))
    choices = (entry.items() for entry in entries if isinstance(entry, dict))
    return {group.removeprefix("override /"): choice for items in choices for group, choice in items}


def _keys(schema: type) -> Iterator[str]:
    """The keys of a command without those of its task and its analyses."""
    return (entry.name for entry in entries(schema) if get_origin(entry.type) is not dict)


def _keys_of_choices(group: str, choices: Iterable[str]) -> list[str]:
    """The keys that these choices of `task` or `analysis` bring."""
    files = plugins.choices(group)
    prefixes = {name: f"{group}." if group == "task" else f"{group}.{name}." for name in choices if name in files}
    return [f"{prefix}{key}" for name, prefix in prefixes.items() for key in plugins.keys_in(files[name])]


def _runs(text: str) -> list[str]:
    """Folders below outputs/ with a run or a sweep, newest first."""
    jobs = [path.parent for depth in ("*", "*/*") for path in Path("outputs/train").glob(f"{depth}/config.yaml")]
    sweeps = [path.parent for path in Path("outputs/train").glob("*/multirun.yaml")]
    folders = sorted([*sweeps, *jobs], key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
    return [str(folder) for folder in folders if str(folder).startswith(text)][:MOST_RUNS]
