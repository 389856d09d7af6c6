"""What a call refuses, in one line."""

from collections.abc import Callable
from typing import Any

import pytest

from rankbench.config.keys import ConfigError


def refusal(call: Callable[..., object], *arguments: Any, **options: Any) -> str:
    """The message of the ConfigError that this call raises: a single line."""
    with pytest.raises(ConfigError) as error:
        call(*arguments, **options)
    message = str(error.value)
    assert message and "\n" not in message
    return message
