"""Tab completion of commands, groups, keys, values and folders in bash, zsh and fish. Hydra's own script drops the
subcommand; these keep it."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import get_origin

from rankbench import plugins
from rankbench.commands.cli import COMMANDS
from rankbench.commands.compose import named_plugins, register
from rankbench.config import SCHEMAS, conf_dir
from rankbench.keys import ConfigError, entries

# A key, a group or a folder needs more behind it: no space follows.
BASH = """_rankbench_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" word words
    read -r -a words <<<"$line"
    [[ "$line" == *[[:space:]] ]] && words+=("")
    word="${words[${#words[@]} - 1]}"
    mapfile -t COMPREPLY < <("${words[0]}" __complete "${words[@]:1}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=./,] ]] && compopt -o nospace
    # bash replaces what follows the last = alone, where = ends words
    [[ "$COMP_WORDBREAKS" == *=* && "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%=*}="}")
}
complete -o default -F _rankbench_complete rankbench"""
ZSH = """(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
_rankbench_complete() {
    local -a all
    all=("${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- ${(M)all:#*[=./,]}
    compadd -- ${all:#*[=./,]}
    [[ -n "$all" ]] || _files
}
compdef _rankbench_complete rankbench"""
FISH = """function __rankbench_complete
    set -l words (commandline -opc)
    set -l program $words[1]
    set -e words[1]
    $program __complete $words (commandline -ct | string collect --allow-empty) 2>/dev/null
end
complete -c rankbench -f -a '(__rankbench_complete)'"""
SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
OPTIONS = ("-m", "--multirun", "--help", "--cfg", "--info", "--config-dir", "--version")
VALUES = {"--cfg": ("job", "hydra", "all"), "--info": ("defaults", "defaults-tree", "config", "searchpath", "all")}
PATHS = ("run", "runs", "out", "inputs", "table", "pages", "record", "task.path", "model.path")  # keys with a path
MOST_RUNS = 30  # that are offered where nothing of their folder is typed yet


def script(words: list[str]) -> str:
    """The shell code that turns completion on; ConfigError for an unsupported shell."""
    if len(words) != 1 or words[0] not in SCRIPTS:
        given = " ".join(["completion", *words])
        raise ConfigError(
            f'{given}: of which shell? bash and zsh: eval "$(rankbench completion bash)"; '
            "fish: rankbench completion fish | source"
        )
    return SCRIPTS[words[0]]


def candidates(words: list[str]) -> list[str]:
    """Completions of the last of these words (all that follow `rankbench`)."""
    word = words[-1] if words else ""
    return [completion for completion in _candidates(words, word) if completion.startswith(word)]


def _candidates(words: list[str], word: str) -> Iterable[str]:
    if len(words) <= 1:
        return (*COMMANDS, "explain", "list", "completion", "--help", "--version")
    command, before = words[0], words[-2]
    try:
        plugins.find(named_plugins(words[1:-1]))
    except ConfigError:
        return []
    if command == "completion":
        return SCRIPTS
    if command == "explain":
        from rankbench.commands.reference import written

        stated = [item.name for _, rows in written().values() for item in rows]
        return dict.fromkeys([entry.name for schema in SCHEMAS.values() for entry in entries(schema)] + stated)
    if command not in COMMANDS or not (conf_dir() / f"{command}.yaml").exists():
        return []
    if before in VALUES or word.startswith("-"):
        return VALUES.get(before, OPTIONS)
    key, equals, value = word.partition("=")
    if equals and key in PATHS:
        names = [*(["latest"] if key in ("run", "runs") else []), *_runs(value, key), *_below(value)]
        return [f"{key}={name}" for name in dict.fromkeys(names)]
    if value[:1] == "[":
        named, comma, _ = value.rpartition(",")
        return [f"{key}={named}{comma or '['}{name}" for name in _entries_of(command, key)]
    entry = next((entry for entry in entries(SCHEMAS[command]) if entry.name == key), None)
    if equals and entry and entry.key.choices and get_origin(entry.type) is not list:
        return [f"{key}={choice}" for choice in entry.key.choices]
    if equals and command == "report" and key == "experiment":
        return [f"{key}={name}" for name in ("all", *plugins.choices("experiment"))]
    if equals and key == "plugins":
        return [f"{key}={name}" for name in plugins.FOUND]
    return _of_hydra(command, words)


def _of_hydra(command: str, words: list[str]) -> list[str]:
    """Groups with their choices, and keys."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.core_plugins.bash_completion import BashCompletion
    from hydra._internal.utils import create_config_search_path
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
    try:
        choices = BashCompletion(loader)._query(config_name=command, line=" ".join(words[1:]))
    except (HydraException, OmegaConfBaseException):  # words that do not compose have no continuation
        return []
    return choices if words[-1].startswith("hydra") else [c for c in choices if not c.startswith(("hydra", "schema"))]


def _entries_of(command: str, key: str) -> Iterable[str]:
    """The entries that the list of this group or key may have."""
    if key in ("analysis", "experiment", "model", "task"):
        return plugins.choices(key)
    return next((entry.key.choices for entry in entries(SCHEMAS[command]) if entry.name == key), ())


def _runs(text: str, key: str) -> list[str]:
    """Folders below outputs/ with a run or a sweep, newest first, for keys that take one."""
    if key not in ("run", "runs"):
        return []
    jobs = [path.parent for depth in ("*", "*/*") for path in Path("outputs/train").glob(f"{depth}/config.yaml")]
    sweeps = [path.parent for path in Path("outputs/train").glob("*/multirun.yaml")]
    folders = sorted([*sweeps, *jobs], key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
    return [str(folder) for folder in folders if str(folder).startswith(text)][:MOST_RUNS]


def _below(text: str) -> list[str]:
    """What the file system has behind the beginning of a path; folders end in a slash."""
    folder, _, name = text.rpartition("/")
    where = folder or ("/" if text[:1] == "/" else ".")
    try:
        found = sorted(os.scandir(where), key=lambda entry: entry.name)
    except OSError:
        return []
    behind = [entry for entry in found if entry.name.startswith(name) and (name or entry.name[0] != ".")]
    return [f"{text[: len(text) - len(name)]}{entry.name}{'/' if entry.is_dir() else ''}" for entry in behind]
