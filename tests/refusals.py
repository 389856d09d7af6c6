"""What a call refuses, in one line, and what nothing may unpickle."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankbench.config.keys import ConfigError


class Bomb:
    """Unpickled, it makes a file, as is tried out when it is made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        pickle.loads(pickle.dumps(self))
        path.unlink()

    def __reduce__(self) -> tuple[Callable, tuple[Path]]:
        return Path.touch, (self.path,)


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The message of the ConfigError that this call raises: a single line."""
    with pytest.raises(ConfigError) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert message and "\n" not in message
    return message
