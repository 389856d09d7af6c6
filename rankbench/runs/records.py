"""Records of a run, JSON and YAML, read as plain data: whatever a damaged file holds is one line; and checksums."""

import hashlib
import json
from pathlib import Path
from typing import Any

import yaml

from rankbench.keys import ConfigError
from rankbench.runs.files import read_text

LARGEST_HASHED = 1 << 38  # bytes; the hash of a terabyte takes an hour


def read_json(path: Path, kind: type = dict) -> Any:
    """Content of a JSON file, whose outermost value is of this kind; ConfigError for any other file that is there."""
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
    """The same of a YAML file; ConfigError also for one that refers to parts of itself, which rankbench never writes
    and which can be endless."""
    try:
        content = yaml.load(read_text(path), _NoAliases)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, kind):
        raise ConfigError(f"{path}: not a run's config: it holds no {'keys' if kind is dict else 'list'}")
    return content


class _NoAliases(yaml.SafeLoader):
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"refers to another part of itself (*{self.peek_event().anchor})")
        return super().compose_node(parent, index)


def checksum(path: Path) -> str | None:
    """SHA-256 of a file; None if it is not there, no file, or larger than any of ours."""
    if not path.is_file() or path.stat().st_size > LARGEST_HASHED:
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
