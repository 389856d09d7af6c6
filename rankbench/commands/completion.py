"""Tab completion of commands, groups and keys in bash. Hydra's own script drops the subcommand; this one keeps it."""

from typing import get_origin

from rankbench import plugins
from rankbench.commands.cli import COMMANDS
from rankbench.commands.compose import named_plugins, register
from rankbench.config import SCHEMAS, conf_dir
from rankbench.keys import ConfigError, entries

SCRIPT = """_rankbench_complete() {
    local word="${COMP_WORDS[COMP_CWORD]}"
    COMPREPLY=($(compgen -W "$("${COMP_WORDS[0]}" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$word"))
    # a key or a group needs a value: no space after it
    [[ ${#COMPREPLY[@]} -eq 1 && "${COMPREPLY[0]}" == *[=.] ]] && compopt -o nospace
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o default -F _rankbench_complete rankbench"""


def script(words: list[str]) -> str:
    """The shell code that turns completion on; ConfigError for an unsupported shell."""
    if words != ["bash"]:
        raise ConfigError(f'completion {" ".join(words)}: only bash is known; use eval "$(rankbench completion bash)"')
    return SCRIPT


def candidates(words: list[str]) -> list[str]:
    """Completions of the last of these words (all that follow `rankbench`)."""
    word = words[-1] if words else ""
    if len(words) <= 1:
        return [
            name
            for name in (*COMMANDS, "explain", "list", "completion", "--help", "--version")
            if name.startswith(word)
        ]
    command = words[0]
    if command not in COMMANDS or not (conf_dir() / f"{command}.yaml").exists():
        return []
    key, equals, _ = word.partition("=")
    entry = next((entry for entry in entries(SCHEMAS[command]) if entry.name == key), None)
    if equals and entry and entry.key.choices and get_origin(entry.type) is not list:
        return [choice for value in entry.key.choices if (choice := f"{key}={value}").startswith(word)]
    if equals and command == "report" and key == "experiment":
        names = ["all", *sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))]
        return [choice for name in names if (choice := f"{key}={name}").startswith(word)]
    if equals and key == "plugins":
        plugins.find()
        return [choice for name in plugins.FOUND if (choice := f"{key}={name}").startswith(word)]
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.core_plugins.bash_completion import BashCompletion
    from hydra._internal.utils import create_config_search_path
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    try:
        plugins.find(named_plugins(words[1:-1]))
    except ConfigError:
        return []
    loader = ConfigLoaderImpl(create_config_search_path(str(conf_dir())))
    try:
        choices = BashCompletion(loader)._query(config_name=command, line=" ".join(words[1:]))
    except (HydraException, OmegaConfBaseException):  # words that do not compose have no continuation
        return []
    return choices if word.startswith("hydra") else [c for c in choices if not c.startswith(("hydra", "schema"))]
