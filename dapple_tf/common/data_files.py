"""Reading files that anybody may have written: within bounds, and with errors that name the file and the key.

Plans, profiles and clusters are data: reading a file runs none of its code, and takes no more time and memory than its
size warrants, whatever it contains.
"""

from __future__ import annotations

import abc
import collections.abc
import dataclasses
import functools
import json
import os
import reprlib
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

MOST_BYTES = 4 * 2**20
"""Largest size of a JSON file. A layer takes less than 1 kB."""

_MOST_CONTAINERS = 200_000
"""Most lists and objects in a file. They cost more per character than anything else in JSON: 64 bytes, and a second for
a million."""

_MOST_CHARACTERS = 1000
"""Greatest length of an error, as part of it may come from the file."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class _DuplicateKeyError(ValueError):
    """An object has a key twice."""


def read_text(
    path: str | os.PathLike[str], error: type[Exception], *, encoding: str = "utf-8", most_bytes: int = MOST_BYTES
) -> str:
    """Returns the text in a file.

    Args:
        path: the file.
        error: the class of error to raise.
        encoding: "utf-8" or "utf-8-sig".
        most_bytes: the largest size; a larger or endless file isn't read any further.

    Raises:
        ValueError: ``error``, if the file is too large or isn't UTF-8.
        OSError: it can't be read.
    """
    with Path(path).open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise error(f"{os.fspath(path)} is larger than {most_bytes:,} bytes, the most that is read; is it the file?")
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as undecodable:
        raise error(f"{os.fspath(path)} isn't UTF-8 text: {clip(str(undecodable))}") from undecodable


def parse_object(
    text: str, source: str, error: type[Exception], *, most_bytes: int = MOST_BYTES, finite: bool = False
) -> dict[str, Any]:
    """Parses ``text`` as a JSON object. Duplicate keys are rejected: JSON readers disagree on their meaning.

    Args:
        text: the text, of a file for example.
        source: the text's name in errors.
        error: the class of error to raise.
        most_bytes: the greatest length; a longer text isn't read.
        finite: whether to refuse NaN and infinities, which aren't numbers in JSON.

    Raises:
        ValueError: ``error``, naming ``source``, if it isn't one.
    """
    if len(text) > most_bytes:
        raise error(f"{source} is longer than {most_bytes:,} characters, the most that is read")
    most_containers = _MOST_CONTAINERS * most_bytes // MOST_BYTES
    if text.count("[") + text.count("{") > most_containers:
        raise error(f"{source} has more than {most_containers:,} lists and objects, the most that are read")
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse if finite else float)
    except _DuplicateKeyError as duplicate:
        raise error(f"{source}: {duplicate}") from duplicate
    except (ValueError, RecursionError) as wrong:  # Also for numbers and nesting beyond Python's limits.
        raise error(f"{source} isn't JSON: {wrong}") from wrong
    if not isinstance(data, dict):
        raise error(f"{source} has a JSON {type(data).__name__} where an object {{...}} is expected")
    return data


class JsonFile(abc.ABC):
    """A value that can be written as JSON text, and kept in a file.

    Attributes:
        file_error: the error for a file that doesn't hold such a value.
        made_by: how to make such a value, for errors.
    """

    file_error: ClassVar[type[Exception]]
    made_by: ClassVar[str]

    @classmethod
    def check(cls, name: str, value: object) -> None:
        """Checks the class of an argument.

        Raises:
            TypeError: it has another class: a file's name, say, or two arguments are swapped.
        """
        if not isinstance(value, cls):
            shown = type(value).__name__ if isinstance(value, JsonFile) else f"{value!r:.60}"
            raise TypeError(f"{name} is {shown}; give a dapple_tf.{cls.__name__}, by {cls.made_by}")

    @classmethod
    @abc.abstractmethod
    def from_json(cls, text: str, *, source: str) -> Self:
        """Reads what `to_json` wrote; ``source`` is the text's name in errors."""

    @abc.abstractmethod
    def to_json(self) -> str:
        """Returns the value as JSON text."""

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads the value from a file that `save` wrote.

        Raises:
            Exception: `from_json`'s error (``file_error``), naming the file and what is wrong in it.
            OSError: the file can't be read.
        """
        return cls.from_json(read_text(path, cls.file_error), source=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `to_json` to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


class Scalar(typing.NamedTuple):
    """A type without parts: which JSON values it accepts, and its description in errors."""

    fits: Callable[[Any], bool]
    said: str


TEXTS: Mapping[Any, Scalar] = {
    str: Scalar(lambda value: type(value) is str, "a text"),
    bool: Scalar(lambda value: type(value) is bool, "true or false"),
}
AMOUNTS: Mapping[Any, Scalar] = {
    **TEXTS,
    float: Scalar(
        lambda value: type(value) in (int, float) and 0 <= value <= sys.float_info.max,
        "a finite number of at least 0",
    ),
    int: Scalar(
        lambda value: type(value) is int and 0 <= value < 2**63, "a whole number of at least 0 and below 2**63"
    ),
}
"""The types of times and sizes."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Turns JSON data into typed values; errors have the place and the expected type.

    Attributes:
        error: the class of error to raise.
        scalars: the types without parts.
        lists: dataclasses that are written as lists of their fields, not as objects.
    """

    error: type[Exception]
    scalars: Mapping[Any, Scalar] = dataclasses.field(default_factory=lambda: AMOUNTS)
    lists: frozenset[type] = frozenset()

    def read(self, kind: Any, data: Any, where: str = "") -> Any:
        """Returns a value of a type: a scalar, a dataclass, a tuple or mapping of these, one of them or None, or Any.

        Args:
            kind: the type.
            data: the data in the file.
            where: a path such as ``layers[3]``, for errors; empty for a whole file.

        Raises:
            ValueError: ``error``; the data isn't of the type.
        """
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return data
        if origin is tuple:
            if not isinstance(data, list):
                raise self._wrong(data, where, "a list")
            if arguments[0] in self.scalars and all(map(self.scalars[arguments[0]].fits, data)):
                return tuple(data)  # A shortcut that makes no path for each entry.
            return tuple(self.read(arguments[0], entry, f"{where}[{i}]") for i, entry in enumerate(data))
        if type(None) in arguments:
            return None if data is None else self.read(arguments[0], data, where)
        if origin is collections.abc.Mapping:
            entries = self.object(data, where)
            return {key: self.read(arguments[1], value, f"{where}.{short(key)}") for key, value in entries.items()}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            fields = dataclasses.fields(kind)
            if kind in self.lists:
                if not isinstance(data, list) or len(data) != len(fields):
                    raise self._wrong(data, where, f"[{', '.join(field.name for field in fields)}]")
                data = dict(zip((field.name for field in fields), data, strict=True))
                places = {name: f"{where}[{i}]" for i, name in enumerate(data)}
            else:
                data = self.object(data, where)
                needed = {field.name: field.default is dataclasses.MISSING for field in fields}
                required, optional = ([name for name in needed if needed[name] is one] for one in (True, False))
                self.check_keys(data, required, optional, where)
                places = {name: f"{where}.{name}" if where else name for name in data}
            types = _types(kind)
            return kind(**{name: self.read(types[name], value, places[name]) for name, value in data.items()})
        if not self.scalars[kind].fits(data):
            raise self._wrong(data, where, self.scalars[kind].said)
        return data

    def object(self, data: Any, where: str) -> dict[str, Any]:
        """Returns data that must be an object.

        Raises:
            ValueError: ``error``; it isn't one.
        """
        if not isinstance(data, dict):
            raise self._wrong(data, where, "an object {...}")
        return data

    def check_keys(self, data: Mapping[str, Any], required: Iterable[str], optional: Iterable[str], where: str) -> None:
        """Refuses an object with unknown or missing keys.

        Raises:
            ValueError: ``error``.
        """
        required = list(required)
        known = [*required, *optional]
        inside = f"{where}: " if where else ""
        for key in data:
            if key not in known:
                raise self.error(f"{inside}unknown key {short(key)}; the keys are {', '.join(known)}")
        for key in required:
            if key not in data:
                raise self.error(f"{inside}key {key!r} is missing")

    def check_format(self, data: Mapping[str, Any], wanted: str, source: str) -> None:
        """Refuses a file's object of another format.

        Raises:
            ValueError: ``error``.
        """
        file_format = data.get("format")
        if file_format != wanted:
            raise self.error(f"{source}: 'format' is {short(file_format)}; this version reads {wanted!r}")

    def _wrong(self, value: Any, where: str, wanted: str) -> Exception:
        return self.error(f"{where} is {short(value)}; it must be {wanted}")


@functools.cache
def _types(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)


def short(value: object) -> str:
    """Returns a value from a file for an error's text, shortened if it is long or deeply nested."""
    return clip(_REPR.repr(value), 120)


def clip(text: str, length: int = _MOST_CHARACTERS) -> str:
    """Returns a text without its middle if it has more than ``length`` characters."""
    return text if len(text) <= length else f"{text[: length * 2 // 3]} ... {text[-length // 3 + 5 :]}"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} isn't a number in JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"key {short(key)} stands twice in one object; remove one of them")
            seen.add(key)
    return entries
