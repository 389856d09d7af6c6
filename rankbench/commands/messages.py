"""Errors of Hydra and OmegaConf in one line: what, got, allowed, next step."""

import dataclasses
import difflib
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from rankbench.config import plugins
from rankbench.config.keys import WANTED, ConfigError, as_typed, closest, entries, listed, unknown
from rankbench.config.model import ModelConfig
from rankbench.config.schema import KEYS, SCHEMAS, OptimizerConfig, TrainerConfig, conf_dir

EXTRAS = ("joblib", "submitit", "ray", "optuna")  # beginnings of the names of launchers and sweepers
DIGITS = "integer string conversion"  # in Python's ValueError for an integer of more than 4300 digits

# Characters of a value that Hydra's grammar has only in quotes; no control characters, no bytes that are no UTF-8
UNKNOWN_TO_HYDRA = re.compile("[^\\x00-\\x9f\\u2028\\u2029\\ud800-\\udfff]|[~#'\"<>&;!^`]")


@contextmanager
def explaining(command: str, words: list[str]) -> Iterator[None]:
    """Turn the errors of Hydra and OmegaConf into ConfigErrors of one line; other errors are bugs of ours and pass."""
    try:
        yield
    except Exception as error:
        of_words = isinstance(error, HydraException | OmegaConfBaseException) or _within_hydra(error)
        unreadable = _unreadable_file(error)
        if isinstance(error, ConfigError) or not (of_words or unreadable):
            raise
        raise ConfigError(unreadable or explain(error, command, words)) from None


def _unreadable_file(error: Exception) -> str | None:
    """The refusal of a file of choices that is no YAML, or whose choices lead back to itself; None for other errors."""
    if isinstance(error, RecursionError):
        return "a YAML file leads back to itself, by its defaults or by an alias; take the circle out"
    paths = [frame.f_locals.get("full_path") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not any(paths) or not isinstance(error, YAMLError | UnicodeDecodeError | OSError):
        return None
    return plugins.unreadable(next(filter(None, paths)), error)


def _within_hydra(error: Exception) -> bool:
    """Whether Hydra or OmegaConf itself stumbled: over null in a list of choices, or an integer of very many digits. A
    disk error does not count."""
    (*_, (innermost, _)) = traceback.walk_tb(error.__traceback__)
    package = innermost.f_globals.get("__name__", "").partition(".")[0]
    return isinstance(error, TypeError | ValueError | AssertionError) and package in ("hydra", "omegaconf")


def explain(error: BaseException, command: str, words: list[str]) -> str:
    """Explain in one line an error in the words of a command line, or in a config file that they name."""
    if isinstance(error, OverrideParseException):
        if odd := UNKNOWN_TO_HYDRA.search(error.override.replace("'", "").replace('"', "").partition("=")[2]):
            return f"""{error.override}: not understood because of {odd[0]}; quote it, as in '["{odd[0]}"]'"""
        return f"{error.override}: not understood; give key=value, in quotes where the value holds brackets or commas"
    if (file := re.match(r"In '(.*)': \w+ raised while composing", str(error))) and error.__context__ is not None:
        return f"{file[1]}.yaml: {_explain_file(error.__context__, command, words)}"
    stumbled = not isinstance(error, HydraException | OmegaConfBaseException)  # over a choice that is not a name
    # OmegaConf's own errors have it all; under a debugger, or with OC_CAUSE=1, their causes lead back to themselves
    while error.__cause__ is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__
    text = str(error)
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error.missing_cfg_file or "", words)
    if isinstance(error, ConfigAttributeError | ConfigKeyError):
        return _unknown_key(error.full_key or "", command, words)
    if isinstance(error, ValidationError):
        return _wrong_value(error)
    if DIGITS in text:
        return f"{max(words, key=len)}: too many digits; give a smaller number"
    culprits = [word for word in words if word.partition("=")[0].lstrip("+~") in ("", *groups())]
    if stumbled and culprits:
        culprit = max(culprits, key=lambda word: sum(letter in word for letter in "[]{}$"))
        if (value := culprit.partition("=")[2]).isidentifier() and value not in ("null", "nan", "inf", "true", "false"):
            return f"{culprit}: its file's defaults are not a list of choices, as in `- override /model: san`"
        return f"{culprit}: a group needs one of its choices, as in model=san; groups are {', '.join(groups())}"
    if match := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'", text):
        return f"{match[1]}: several values; add -m to run one job for each, or write a list as [a,b]"
    if match := re.search(r"You must specify '([^']*)'", text):
        return _unknown_choice(f"{match[1]}/???", words)
    if match := re.search(r"Could not override '([^']*)'\.\s+No match in the defaults list", text):
        return f"{match[1]}: no such group; groups are {', '.join(groups())}"
    key = getattr(error, "full_key", None)  # OmegaConf's errors have it, and repeat it with classes in further lines
    return f"{key}: {text.splitlines()[0]}" if key else " ".join(text.split())


def _explain_file(error: BaseException, command: str, words: list[str]) -> str:
    """Explain what a YAML file says that its command does not take."""
    key, text = getattr(error, "full_key", None) or "", str(error)
    if key in groups() and isinstance(error, ConfigKeyError):  # without the header, its keys are those of its group
        return "its keys are not at the top; let it begin with the line `# @package _global_`, followed by keys"
    group = re.search(r"not a subclass of (\w+?)Conf(?:ig)?\b", text)
    if group or re.search("merge DictConfig with ListConfig|to Dict", text):
        name = group[1].lower() if group else key or "analysis"
        return (
            f"{name}: is a group of keys; give these, as in {name}: {{<key>: <value>}}, or choose one in the file's "
            f"defaults, as in `- override /{name}: {'[residual]' if name == 'analysis' else '<choice>'}`"
        )
    if key in KEYS:
        if isinstance(error, ConfigKeyError):
            return (
                f"{key}: keys are nested in a YAML file, as in {key.replace('.', ': {')}: <value>{'}' * key.count('.')}"
            )
        return _wrong_value(error)
    return explain(error, command, words)


def _unknown_choice(path: str, words: list[str]) -> str:
    group, _, choice = path.rpartition("/")
    if group in ("hydra/launcher", "hydra/sweeper") and (extra := next(filter(choice.startswith, EXTRAS), None)):
        asking = [word for word in words if extra in word or word == "cluster=slurm"]
        return f"{asking[-1] if asking else extra}: needs the extra: pip install 'rankbench[{extra}]'"
    _name_plugins_of_run(words)
    allowed = list(plugins.choices(group))
    if not allowed:
        return f"{path}: no such config; groups are {', '.join(groups())}"
    if group == "experiment":
        near = difflib.get_close_matches(choice, allowed, n=5, cutoff=0.3)
        names = f"; similar names are {', '.join(near)}" if near else ""
        return (
            f"experiment={choice}: unknown{closest(choice, allowed)}{names}; `rankbench list` names all {len(allowed)}"
        )
    return unknown(group, choice, allowed)


def _name_plugins_of_run(words: list[str]) -> None:
    """Raise ConfigError if the words name a run that was made with plug-ins that they do not name."""
    from rankbench.runs.records import or_empty, read_yaml
    from rankbench.runs.run import find_run

    given = (word.removeprefix("run=") for word in words if word.startswith("run="))
    for name in (name.strip("'") for value in given for name in value.split(",")):
        run = find_run(name)
        named = or_empty(read_yaml, run.folder / "config.yaml").get("plugins")
        if isinstance(named, list) and not set(map(str, named)) <= plugins.FOUND.keys():
            plugins.require([*map(str, named)], run.folder)


def _unknown_key(key: str, command: str, words: list[str]) -> str:
    _name_plugins_of_run(words)
    prefix, _, name = key.rpartition(".")
    if command == "analyze" and prefix in ("trainer", "optimizer"):
        return f"{key}: analyze does not train; leave it out, or give it to `rankbench train`"
    allowed = _keys_under(prefix, command, words)
    if elsewhere := _keys_called(name, command):
        return f"{key}: unknown key, did you mean {' or '.join(elsewhere)}?"
    if prefix == "analysis" and name not in (analyses := plugins.choices("analysis")):
        allowed = list(analyses)
    elif prefix == "analysis":
        return f"{key}: this analysis is not chosen; add it to the command's list, as in analysis=[{name}]"
    return f"{key}: unknown key" + (f"{closest(name, allowed)}; allowed are {listed(allowed)}" if allowed else "")


def _keys_called(name: str, command: str) -> list[str]:
    """The command's keys in other groups that end in this name."""
    return [entry.name for entry in entries(SCHEMAS[command]) if entry.name.rpartition(".")[2] == name]


def not_an_option(word: str, command: str) -> str:
    """The refusal of an option that does not exist: keys are typed without dashes."""
    keys = _keys_called(word.lstrip("-").partition("=")[0].replace("-", "_"), command)
    meant = f"did you mean {keys[0]}=<value>?" if keys else "options are -m, --cfg job, --info defaults, --help"
    return f"{word}: unknown option; {meant}"


def wanted(message: str) -> str:
    """The demand in OmegaConf's complaint about a value: `wants an integer`."""
    for type_, words in WANTED.items():
        if re.search(rf"(to|not a valid) {type_.__name__}", message, re.IGNORECASE):
            return f"wants {words}"
    if "List" in message or "list" in message:
        return f"wants {WANTED[list]}"
    if "not Optional" in message or "non-optional" in message.lower() or "value 'None'" in message:
        return "null is not allowed here"
    return message.split("\n")[0]


def _wrong_value(error: Any) -> str:
    key, text = error.full_key, str(error)
    got = f"{key}={as_typed(error.value) if error.value != '' else ''}"
    if "NoneType is not a subclass" in text:  # in a list
        return f"{got}: null is not allowed here"
    if "is not a subclass" in text:
        return f"{got}: is a group of keys; set one of them, as in {key}.<key>=<value>"
    allowed = f"; allowed are {', '.join(KEYS[key].choices)}" if key in KEYS and KEYS[key].choices else ""
    return f"{got}: {wanted(text)}{allowed}"


def groups() -> list[str]:
    """The config groups: model, task, analysis, ..."""
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir())


def _keys_under(prefix: str, command: str, words: list[str]) -> list[str]:
    """The keys that a config may have under this prefix: from the schemas or, for a group without a schema, from the
    YAML file that the command line chooses."""
    schemas = {"": SCHEMAS[command], "model": ModelConfig, "optimizer": OptimizerConfig, "trainer": TrainerConfig}
    if prefix in schemas:
        return [field.name for field in dataclasses.fields(schemas[prefix])]
    group, _, name = prefix.partition(".")
    chosen = (word.partition("=")[2] for word in words if word.startswith(f"{group}="))
    choice = name or next(chosen, plugins.groups_of(command).get(group))
    path = plugins.choices(group).get(choice) if isinstance(choice, str) else None  # analyses are a list
    return plugins.keys_in(path) if path is not None else []
