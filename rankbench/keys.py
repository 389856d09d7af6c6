"""Keys of the config. Each is stated once; its check, its help and its row of docs/CONFIG.md follow from that.

This module knows neither Hydra nor torch, so that a wrong value is refused before anything heavy is loaded. Tab
completion reads it at every key press, so it does not load OmegaConf before there are values to check.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

Keys = TypeVar("Keys")
LONGEST = 300  # characters of what was given, in a message
NOUNS = {int: "integer", float: "number", str: "text"}
LIMITS = {  # attribute of Key: its word, and the comparison that every allowed number satisfies
    "at_least": ("from", operator.ge),
    "above": ("above", operator.gt),
    "at_most": ("to", operator.le),
    "below": ("and below", operator.lt),
}


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
        members = [member for member in typing.get_args(type_) if member is not types.NoneType]
        if isinstance(type_, types.UnionType):
            return f"{self.allowed(members[0])}, or null"
        if typing.get_origin(type_) is list:
            return f"list{plural} of {self.allowed(members[0], 's')}"
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


def key(meaning: str, *, choices: Iterable[str] = (), between: tuple[float, float] | None = None, **others: Any) -> Any:
    """A field of a dataclass of keys. between: at_least and at_most. others: attributes of Key by their names.

    A list or a dict of choices stays that object, so that choices can be added later.
    """
    if between is not None:
        others["at_least"], others["at_most"] = between
    kept = choices if isinstance(choices, list | Mapping) else tuple(choices)
    return dataclasses.field(metadata={"key": Key(meaning, choices=kept, **others)})


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


def typed(cls: Any, values: dict[str, Any], prefix: str) -> Any:
    """An instance of dataclass `cls` from plain values; ConfigError for a key or a value that does not fit."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(values, dict):
        raise ConfigError(f"{prefix}={as_typed(values)}: is a group of keys; set one of them, as in {prefix}.<key>=...")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    refuse_unknown(values, fields, f"{prefix}.")
    schema = OmegaConf.structured(cls)
    OmegaConf.set_readonly(schema, False)  # a frozen dataclass gives a read-only schema
    for name in fields:
        if name not in values:
            raise ConfigError(f"{prefix}.{name}: missing; conf/{prefix.replace('.', '/')} sets it")
        try:
            schema[name] = values[name]
        except OmegaConfBaseException as error:
            null = ", or null" if types.NoneType in typing.get_args(fields[name].type) else ""
            raise ConfigError(f"{prefix}.{name}={as_typed(values[name])}: {wanted(str(error))}{null}") from None
    # before the dataclass is built, because its own checks may rely on the ranges
    plain: Any = OmegaConf.to_container(schema)
    for name, value in plain.items():
        if "key" in fields[name].metadata:
            fields[name].metadata["key"].check(f"{prefix}.{name}", value)
    return OmegaConf.to_object(schema)


def of_schema(schema: Any, plain: dict[str, Any]) -> Any:
    """An instance of a config's dataclass from plain values, each as its field's type; raises the errors of OmegaConf.

    OmegaConf takes some 15 ms for a whole config, and the configs of a sweep's jobs differ in few groups. So each group
    is read on its own, and the last ones are kept, pickled in memory: a copy is quick, and a caller may change it.
    """
    import pickle

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups = {field.name: field.type for field in dataclasses.fields(schema) if dataclasses.is_dataclass(field.type)}
    try:
        if all(isinstance(plain.get(name), dict) for name in groups):
            parts = {name: of_schema(group, plain[name]) for name, group in groups.items()}
            rest = {name: value for name, value in plain.items() if name not in groups}
            return schema(**pickle.loads(_without_groups(schema, pickle.dumps(rest))), **parts)
    except OmegaConfBaseException:
        pass  # raised once more below, with the whole name of the key
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))


@functools.lru_cache(maxsize=256)
def _without_groups(schema: type, plain: bytes) -> bytes:
    """The pickled values of a schema's fields that are no groups, from the pickled plain ones."""
    import pickle

    from omegaconf import OmegaConf

    values = OmegaConf.merge(_fields_of(schema), pickle.loads(plain))
    return pickle.dumps(OmegaConf.to_container(values, resolve=True, throw_on_missing=True))


@functools.cache
def _fields_of(schema: type) -> Any:
    """The fields of a schema that are no groups, as OmegaConf has them."""
    from omegaconf import OmegaConf, open_dict

    fields = OmegaConf.structured(schema)
    OmegaConf.set_readonly(fields, False)
    with open_dict(fields):
        for field in dataclasses.fields(schema):
            if dataclasses.is_dataclass(field.type):
                del fields[field.name]
    return fields


def refuse_unknown(names: Iterable[str], allowed: Iterable[str], prefix: str) -> None:
    """Raise ConfigError for the first of these keys that is not among the allowed ones."""
    allowed = list(allowed)
    for name in names:
        if name not in allowed:
            raise ConfigError(f"{prefix}{name}: unknown key{closest(name, allowed)}; allowed are {listed(allowed)}")


def wanted(message: str) -> str:
    """The demand in OmegaConf's complaint about a value: `wants an integer`."""
    names = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}
    for word, meaning in names.items():
        if re.search(rf"(to|not a valid) {word}", message, re.IGNORECASE):
            return f"wants {meaning}"
    if "List" in message or "list" in message:
        return "wants a list, as [a,b]"
    if "not Optional" in message or "non-optional" in message.lower():
        return "null is not allowed here"
    return message.split("\n")[0]


def shortened(message: str) -> str:
    """Put a message on one line, and cut the middle out of the given value (up to the first colon) and of each later
    word where these have more than 300 characters."""

    def cut(text: str) -> str:
        return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}"

    given, colon, rest = printable(re.sub(r"\s*[\n\r]\s*", " ", message)).partition(": ")
    return cut(given) + colon + re.sub(rf"\S{{{LONGEST},}}", lambda match: cut(match[0]), rest)


def printable(text: str) -> str:
    """The text with its control characters, and the bytes of file names that are no UTF-8, as escapes."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]", lambda match: ascii(match[0])[1:-1], text)


def unknown(name: str, got: Any, allowed: Iterable[str]) -> str:
    """The refusal of a value that is not among the allowed ones."""
    allowed = list(allowed)
    return f"{name}={got}: unknown{closest(got, allowed)}; allowed are {listed(allowed)}"


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


def escaped(plain: Any) -> Any:
    """Escape `${` in texts: plain values are data and must not reach OmegaConf's resolvers."""
    if isinstance(plain, dict):
        return {key: escaped(value) for key, value in plain.items()}
    if isinstance(plain, list):
        return [escaped(value) for value in plain]
    # backslashes before `${` escape one another, so each of them is doubled
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", plain) if isinstance(plain, str) else plain


def _short(limit: float) -> str:
    """A limit with as few characters as its exact value allows."""
    return f"{limit:g}" if float(f"{limit:g}") == limit else str(limit)
