"""Arguments of the Python API: each is checked against the type that the function's signature states."""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Sequence
from numbers import Integral
from os import PathLike
from typing import Any, ParamSpec, TypeVar

from rankbench.config.keys import ConfigError

P = ParamSpec("P")
R = TypeVar("R")
WORDS = {
    str: "a text",
    int: "a whole number",
    bool: "True or False",
    PathLike: "a path",
    Sequence: "a list of texts",
    types.NoneType: "None",
}


def typed_arguments(*but: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a function refuse an argument that is not of the type in its signature, by a ConfigError. Integers of NumPy
    become Python's. but: arguments that the function checks itself, as it does `*names` and `**options`."""

    def with_checks(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        checked = {
            name: typing.get_args(x.annotation) if isinstance(x.annotation, types.UnionType) else (x.annotation,)
            for name, x in signature.parameters.items()
            if name not in but and x.annotation not in (x.empty, Any)
            if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)  # *names and **options
        }

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            bound = signature.bind(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name not in checked:
                    continue
                if not any(_fits(value, kind) for kind in checked[name]):
                    raise ConfigError(f"{function.__name__}: {name}{_got(value)}; give {_words(checked[name])}")
                if isinstance(value, Integral) and not isinstance(value, bool):
                    bound.arguments[name] = int(value)
            return function(*bound.args, **bound.kwargs)

        return call

    return with_checks


def _fits(value: Any, kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)
    if origin is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, origin)


def _got(value: Any) -> str:
    """What was given: a plain value itself, and the type."""
    if value is None:
        return "=None"
    plain = f"={value!r}:" if isinstance(value, str | int | float | bytes | list | tuple) else ""
    return f"{plain} is of type {type(value).__name__}"


def _words(kinds: Sequence[Any]) -> str:
    """The types that are allowed, in words."""
    words = [WORDS.get(typing.get_origin(kind) or kind, f"a {getattr(kind, '__name__', kind)}") for kind in kinds]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
