"""Read the records of a run, JSON and YAML, as plain data, with an error of one line for any damage; checksums."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rankbench.config.keys import ConfigError
from rankbench.runs.files import read_text

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's reads seven times as fast
DEEPEST = 100  # levels of a YAML file; a config has a few
LARGEST_HASHED = 1 << 38  # bytes; the hash of a terabyte takes an hour


def read_json(path: Path, kind: type = dict) -> Any:
    """Content of a JSON file whose outermost value is of this kind; ConfigError if the file holds anything else."""
    try:
        content = json.loads(read_text(path))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8, or an integer of many digits
        raise ConfigError(f"{path}: not readable as JSON ({error}); put back the file that was there") from None
    if not isinstance(content, kind):
        raise ConfigError(f"{path}: holds no {'keys' if kind is dict else 'list'}; put back the file that was there")
    return content


def read_yaml(path: Path, kind: type = dict) -> Any:
    """The same for a YAML file; ConfigError also if it refers to parts of itself, which rankbench never writes and
    which can be endless."""
    try:
        content = _plain(read_text(path))
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, kind):
        raise ConfigError(f"{path}: not a run's config: it holds no {'keys' if kind is dict else 'list'}")
    return content


def or_empty(read: Callable[[Path, type], Any], path: Path, kind: type = dict) -> Any:
    """What `read_json` or `read_yaml` reads; empty if the file is missing or damaged."""
    try:
        return read(path, kind)
    except (OSError, ConfigError):
        return kind()


def _plain(text: str) -> Any:
    """Data of a YAML text that has no references and at most DEEPEST levels. libyaml itself sets no limit to levels."""
    level = 0
    for event in yaml.parse(text, LOADER):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"refers to another part of itself (*{event.anchor})")
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > DEEPEST:
            raise yaml.YAMLError(f"more than {DEEPEST} levels of lists and keys")
    return yaml.load(text, LOADER)


def checksum(path: Path) -> str | None:
    """SHA-256 of a file; None if it is missing, not a regular file, or larger than any file of ours."""
    if not path.is_file() or path.stat().st_size > LARGEST_HASHED:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """By dotted key, the old and the new value where two configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        parts = [differences(old.get(name), new.get(name), f"{key}.{name}" if key else name) for name in old | new]
        return dict(item for part in parts for item in part.items())
    return {} if old == new else {key: (old, new)}
