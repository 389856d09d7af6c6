"""Errors of Hydra and OmegaConf in one line: what, got, allowed, next step."""

import dataclasses
import re

from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from rankbench.config import KEYS, SCHEMAS, ModelConfig, OptimizerConfig, TrainerConfig, conf_dir
from rankbench.keys import ConfigError, closest, unknown, wanted


def explain(error: Exception, command: str, words: list[str]) -> str:
    """Explain in one line an error in the words of a command line, or in a config file that they name."""
    if isinstance(error, ConfigError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: not understood; give key=value, in quotes where the value holds brackets or commas"
    chain = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    text = "\n".join(map(str, chain))
    for pattern, message in PATTERNS:
        if match := re.search(pattern, text, re.DOTALL):
            return message(match, text, command, words)
    return " ".join(str(chain[-1]).split())


def _unknown_choice(match: re.Match, text: str, command: str, words: list[str]) -> str:
    group, _, choice = match[1].rpartition("/")
    allowed = sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
    if not allowed:
        return f"{match[1]}: no such config; groups are {', '.join(_groups())}"
    return unknown(group, choice, allowed)


def _unknown_key(match: re.Match, text: str, command: str, words: list[str]) -> str:
    full = re.search(r"full_key: (\S+)", text)
    key = full[1] if full else match[1]
    prefix, _, name = key.rpartition(".")
    if command == "analyze" and prefix in ("trainer", "optimizer"):
        return f"{key}: analyze does not train; leave it out, or give it to `rankbench train`"
    allowed = _keys_beside(prefix, command, words)
    if prefix == "analysis" and (conf_dir() / "analysis" / f"{name}.yaml").exists():
        return f"{key}: this analysis is not chosen; add it to the command's list, as in analysis=[{name}]"
    return (
        f"{key}: unknown key{closest(name, allowed)}; allowed are {', '.join(allowed)}"
        if allowed
        else f"{key}: unknown key"
    )


def _wrong_type(match: re.Match, text: str, command: str, words: list[str]) -> str:
    full = re.search(r"full_key: (\S+)", text)
    key = full[1] if full else "config"
    allowed = f"; allowed are {', '.join(KEYS[key].choices)}" if key in KEYS and KEYS[key].choices else ""
    got = "null" if match[0].startswith("field") else match[1]
    return f"{key}={got}: {wanted(text[match.start() :])}{allowed}"


def _wrong_kind(match: re.Match, text: str, command: str, words: list[str]) -> str:
    """A list, a text or a group of keys where another kind belongs; the value comes from the words, not the error."""
    full = re.search(r"full_key: (\S+)", text)
    key = full[1] if full else "config"
    got = next((word.partition("=")[2] for word in reversed(words) if word.lstrip("+").startswith(f"{key}=")), match[1])
    if "is not a subclass" in match[0]:
        return f"{key}={got}: is a group of keys; set one of them, as in {key}.<key>=<value>"
    return f"{key}={got}: {wanted(match[0])}"


def _not_a_default(match: re.Match, text: str, command: str, words: list[str]) -> str:
    return f"{match[1]}: no such group; groups are {', '.join(_groups())}"


def _sweep_without_m(match: re.Match, text: str, command: str, words: list[str]) -> str:
    return f"{match[1]}: several values; add -m to run one job for each, or write a list as [a,b]"


def _no_choice(match: re.Match, text: str, command: str, words: list[str]) -> str:
    culprit = next((word for word in words if word.partition("=")[0] in ("", *_groups())), match[0])
    return f"{culprit}: a group needs one of its choices, as in model=san; groups are {', '.join(_groups())}"


PATTERNS = [
    (r"Config group override must be", _no_choice),
    (r"Ambiguous value for argument '([^']*)'", _sweep_without_m),
    (r"Sweep parameters '(.*)' requires --multirun", _sweep_without_m),
    (r"Could not (?:find|load) '([^']*)'", _unknown_choice),
    (r"Could not override '([^']*)'\.\s+No match in the defaults list", _not_a_default),
    (r"Key '([^']*)' is not in struct", _unknown_key),
    (r"Key '([^']*)' not in '", _unknown_key),
    (r"Value '([^']*)' of type '[^']*' could not be converted", _wrong_type),
    (r"Value '([^']*)' is not a valid", _wrong_type),
    (r"field '([^']*)' is not Optional", _wrong_type),
    (r"(\w+) is not a ListConfig", _wrong_kind),
    (r"Cannot convert '(\w+)' to string", _wrong_kind),
    (r"(\w+) is not a subclass of", _wrong_kind),
]


def _groups() -> list[str]:
    return sorted(path.name for path in conf_dir().iterdir() if path.is_dir() and path.name != "schema")


def _keys_beside(prefix: str, command: str, words: list[str]) -> list[str]:
    """The keys that a config may have under this prefix: from the schemas, or for a group without a schema from the
    YAML file that the command line chooses."""
    schemas = {"": SCHEMAS[command], "model": ModelConfig, "optimizer": OptimizerConfig, "trainer": TrainerConfig}
    if prefix in schemas:
        return [field.name for field in dataclasses.fields(schemas[prefix])]
    group, _, name = prefix.partition(".")
    if not name:
        defaults = OmegaConf.load(conf_dir() / f"{command}.yaml").defaults
        name = next((entry[group] for entry in defaults if not isinstance(entry, str) and group in entry), None)
        name = next((word.partition("=")[2] for word in words if word.startswith(f"{group}=")), name)
    path = conf_dir() / group / f"{name}.yaml"
    return [str(key) for key in OmegaConf.load(path) if key != "defaults"] if path.exists() else []
