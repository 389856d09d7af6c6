"""The registry of the rules, and what several of them share."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from rankbench.config.keys import ConfigError
from rankbench.tape.recording import Seen
from rankbench.tape.tags import Tag

Rule = Callable[[Seen], Tag | Sequence[Tag] | None]
AnyRule = TypeVar("AnyRule", bound=Rule)
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[AnyRule], AnyRule]:
    """Register a function as the rule of the torch functions with these names."""

    def register(function: AnyRule) -> AnyRule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def refuse_dropout(seen: Seen, probability: float) -> None:
    """Raise ConfigError for dropout that is on."""
    if probability > 0:
        raise ConfigError(f"{seen.call}: dropout is on, and no two passes agree; call module.eval() first")


def unchanged(x: Tensor) -> Tensor:
    """Return x."""
    return x
