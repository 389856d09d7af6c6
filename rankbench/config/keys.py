"""Keys of the config. Each is stated once, with its default; its check, its help and its row of docs/CONFIG.md follow.

This module knows neither Hydra nor OmegaConf nor torch, so that a wrong value is refused before anything heavy is
loaded, and Tab completion, which reads it at every key press, is quick.
"""

import contextlib
import dataclasses
import difflib
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LONGEST = 300  # characters of what was given, in a message
NOUNS = {int: "integer", float: "number", str: "text"}
WANTED = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list, as [a,b]",
    dict: "keys of its own, as {a:b}",
}
CONVERTED = {int: (int, str), float: (float, int, str), str: (str, bool, int, float)}  # types that become this one
BOOLEANS = dict.fromkeys(("true", "yes", "y", "on", "1"), True) | dict.fromkeys(("false", "no", "n", "off", "0"), False)
LIMITS = {  # attribute of Key: its word, and the comparison that every allowed number satisfies
    "at_least": ("from", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("to", operator.le),
    "below": ("and below", operator.lt),
}

# Ranges of several keys
SIZE, COUNT, STEPS, LENGTH = (1, 65536), (1, 10**9), (1, 10**12), (0, 10**12)
POSITIVE, FACTOR, GAIN = (1e-6, 1e6), (-1e6, 1e6), (0.0, 1e6)
SHARE, RATE, BETA = (0.0, 1.0), (0.0, 1e3), (0.0, 0.999999)


class ConfigError(ValueError):
    """A user's mistake in one line: what is wrong, what was given, what is allowed, what to do next."""

    frames = ""  # lines of a traceback, of a user's own code that led here

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


@dataclass(frozen=True)
class Key:
    """What a key means and which values it takes. Bounds and choices apply to the entries of lists, not to null."""

    meaning: str
    unit: str | None = None
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    choices: Collection[str] = ()
    nonempty: bool = False  # whether a list needs an entry
    why: str | None = None  # the reason for the bounds, or what else is allowed, given in a refusal

    def allowed(self, type_: Any, plural: str = "") -> str:
        """The allowed values in words, for a key of this type: `integer from 1 (steps), or null`."""
        if types.NoneType in typing.get_args(type_):
            return f"{self.allowed(_without_none(type_))}, or null"
        if typing.get_origin(type_) is list:
            return f"list{plural} of {self.allowed(typing.get_args(type_)[0], 's')}"
        if typing.get_origin(type_) is dict or type_ is bool:
            return "true, false" if type_ is bool else "keys of its own"
        return self._within(", ".join(self.choices) or f"{NOUNS[type_]}{plural}")

    def check(self, name: str, value: Any) -> None:
        """Raise ConfigError unless the key of this name may have this value."""
        if value == [] and self.nonempty:
            raise ConfigError(f"{name}=[]: name at least one{' of ' if self.choices else ''}{', '.join(self.choices)}")
        why = f"; {self.why}" if self.why else ""
        for entry in value if isinstance(value, list) else [value]:
            refuse_null_byte(name, entry)
            if self.choices and entry is not None and entry not in self.choices:
                raise ConfigError(f"{unknown(name, entry, self.choices)}{why}")
            if isinstance(entry, int) and abs(entry) >= 2**63:
                raise ConfigError(f"{name}={as_typed(value)}: out of range; integers are below 2^63")
            if isinstance(entry, int | float):
                finite = -math.inf < entry < math.inf  # nan is not
                if not finite or not all(holds(entry, limit) for _, holds, limit in self._limits()):
                    allowed = self._within("values" if finite else "finite values")
                    raise ConfigError(f"{name}={as_typed(value)}: out of range; allowed are {allowed}{why}")

    def _within(self, noun: str) -> str:
        """A noun with the range and the unit, as in `values from 1 to 8 (steps)`."""
        range_ = (f"{word} {_short(limit)}" for word, _, limit in self._limits())
        return " ".join([noun, *range_, *([f"({self.unit})"] if self.unit else [])])

    def _limits(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        limits = [(word, holds, getattr(self, name)) for name, (word, holds) in LIMITS.items()]
        return [limit for limit in limits if limit[-1] is not None]


def refuse_null_byte(name: str, value: Any) -> None:
    """Raise ConfigError for a text with a null byte, which no command line can hold and no file's name may have."""
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{name}={value!r}: holds a null byte; leave it out")


def key(
    meaning: str,
    *,
    default: Any = dataclasses.MISSING,
    choices: Iterable[str] = (),
    between: tuple[float, float] | None = None,
    **others: Any,
) -> Any:
    """A field of a dataclass of keys. between: at_least and at_most. others: attributes of Key by their names.

    A list or a dict of choices stays that object, so that choices can be added later. Without a default, the key has to
    be given.
    """
    if between is not None:
        others["at_least"], others["at_most"] = between
    kept = choices if isinstance(choices, list | Mapping) else tuple(choices)
    metadata = {"key": Key(meaning, choices=kept, **others)}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Entry(NamedTuple):
    """One key of a dataclass of keys, under the heading of the class that states it."""

    heading: str
    name: str  # as typed: model.heads
    key: Key
    type: Any


def entries(cls: Any, prefix: str = "") -> list[Entry]:
    """All keys of a dataclass and of the dataclasses in its fields, which come last."""
    own, nested = [], []
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            nested += entries(field.type, f"{name}.")
        else:
            stating = next(base for base in cls.__mro__ if field.name in inspect.get_annotations(base))
            heading = (inspect.getdoc(stating) or "").partition("\n")[0].rstrip(".")
            own.append(Entry(heading, name, field.metadata["key"], field.type))
    return own + nested


def check_fields(cls: Any, what: str) -> None:
    """Raise ConfigError unless this is a dataclass whose fields are keys of types that a command line can give."""
    if not dataclasses.is_dataclass(cls):
        raise ConfigError(f"{what}: is not a dataclass, whose fields are keys; put @dataclass(frozen=True) above it")
    for field in dataclasses.fields(cls):
        if isinstance(field.type, str):
            raise ConfigError(
                f"{what}.{field.name}: its type is a text; leave out `from __future__ import annotations`"
            )
        if not _can_be_typed(field.type):
            raise ConfigError(
                f"{what}.{field.name}: has the type {field.type}; allowed are int, float, bool, str, list[<type>] and "
                "dict[str, <type>], also with | None"
            )
        if "key" not in field.metadata:
            raise ConfigError(f"{what}.{field.name}: is no key; write {field.name}: <type> = key('<what it means>')")


def _can_be_typed(type_: Any) -> bool:
    """Whether a command line can give values of this type."""
    members = typing.get_args(type_)
    if types.NoneType in members:
        return len(members) == 2 and _can_be_typed(_without_none(type_))
    if typing.get_origin(type_) is dict:
        return members[0] is str and (members[1] is Any or _can_be_typed(members[1]))
    return type_ in (*NOUNS, bool) or (typing.get_origin(type_) is list and _can_be_typed(members[0]))


def _without_none(type_: Any) -> Any:
    """The type of the values beside null."""
    return next(member for member in typing.get_args(type_) if member is not types.NoneType)


def typed(cls: Any, values: Any, prefix: str) -> Any:
    """An instance of dataclass `cls` from plain values; ConfigError for a key or a value that does not fit."""
    converted = _converted(cls, values, prefix)
    # before the dataclass is built, because its own checks may rely on the ranges
    for field in dataclasses.fields(cls):
        if field.name in converted and "key" in field.metadata:
            field.metadata["key"].check(f"{prefix}.{field.name}", converted[field.name])
    return cls(**converted)


def typed_config(cls: Any, values: Any, name: str = "") -> Any:
    """An instance of a config's dataclass, groups included, from plain values; ConfigError for a key or a type that
    does not fit. Ranges are left to rankbench.config.compatibility."""
    return cls(**_converted(cls, values, name))


def _converted(cls: Any, values: Any, prefix: str) -> dict[str, Any]:
    """The values as the types of the dataclass's fields."""
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix}={as_typed(values)}: is a group of keys; set one of them, as in {prefix}.<key>=...")
    prefix = f"{prefix}." if prefix else ""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name in values:
        if name not in fields:
            raise ConfigError(f"{prefix}{name}: unknown key{closest(name, [*fields])}; allowed are {listed([*fields])}")
    converted = {name: _as_type(fields[name].type, value, f"{prefix}{name}") for name, value in values.items()}
    for name, field in fields.items():
        if name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{name}: missing; give it a value")
    return converted


def _as_type(type_: Any, value: Any, name: str) -> Any:
    """A plain value as this type; ConfigError if it is none. A number may be given as text."""
    if dataclasses.is_dataclass(type_):
        return typed_config(type_, value, name)
    if type_ is Any:
        return value
    null = ""
    if types.NoneType in typing.get_args(type_):
        if value is None:
            return None
        type_, null = _without_none(type_), ", or null"
    if value is None:
        raise ConfigError(f"{name}=null: null is not allowed here")
    kind, members = typing.get_origin(type_) or type_, typing.get_args(type_)
    if kind is list and type(value) in (list, tuple):
        return [_as_type(members[0], entry, name) for entry in value]
    if kind is dict and isinstance(value, dict) and all(isinstance(part, str) for part in value):
        return {part: _as_type(members[1], held, name) for part, held in value.items()}
    with contextlib.suppress(ValueError, OverflowError):
        if kind is bool and str(value).lower() in BOOLEANS:
            return BOOLEANS[str(value).lower()]
        if type(value) in CONVERTED.get(kind, ()):
            return kind(value)
    raise ConfigError(f"{name}={as_typed(value)}: wants {WANTED[kind]}{null}")


def shortened(message: str) -> str:
    """Put a message on one line, and cut the middle out of the given value (up to the first colon) and of each later
    word where these have more than 300 characters."""

    def cut(text: str) -> str:
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}"

    given, colon, rest = printable(re.sub(r"\s*[\n\r]\s*", " ", message)).partition(": ")
    return cut(given) + colon + re.sub(rf"\S{{{LONGEST},}}", lambda match: cut(match[0]), rest)


def in_one_line(error: BaseException) -> str:
    """The class and the message of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def printable(text: str) -> str:
    """The text with its control characters, and the bytes of file names that are no UTF-8, as escapes."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda match: ascii(match[0])[1:-1], text)


def unknown(name: str, got: Any, allowed: Iterable[str]) -> str:
    """The refusal of a value that is not among the allowed ones."""
    allowed = list(allowed)
    return f"{name}={got}: unknown{closest(got, allowed)}; allowed are {listed(allowed) or 'none'}"


def listed(names: list[str]) -> str:
    """Names with commas: all of them, or as many as fit into 600 characters and the number of all."""
    text = ", ".join(names)
    most = 2 * LONGEST
    return text if len(text) <= most else f"{text[:most].rpartition(',')[0]}, ... ({len(names)} in all)"


def check_known(name: str, values: Iterable[Any], allowed: Iterable[str]) -> None:
    """Raise ConfigError for the first of these values that is not among the allowed ones."""
    allowed = list(allowed)
    for value in values:
        if value not in allowed:
            raise ConfigError(unknown(name, value, allowed))


def closest(got: str, allowed: tuple[str, ...] | list[str]) -> str:
    """`, did you mean x?` if one of the allowed words is similar, else nothing."""
    near = difflib.get_close_matches(str(got), allowed, n=1)
    return f", did you mean {near[0]}?" if near else ""


def as_typed(value: Any) -> str:
    """A value as it is typed on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{as_typed(held)}' for name, held in value.items())}}}"
    if value is None or value == "":
        return '""' if value == "" else "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _short(limit: float) -> str:
    """A limit with as few characters as its exact value allows."""
    return f"{limit:g}" if float(f"{limit:g}") == limit else str(limit)
