"""Reading files that anybody may have written: within bounds, and with errors that name the file.

Plans, profiles and clusters are data: reading one runs no code of its and takes no more time and memory than its size
warrants, whatever is in it.
"""

from __future__ import annotations

import json
import os
import reprlib
from pathlib import Path
from typing import Any

MOST_BYTES = 4 * 2**20
"""A file of JSON isn't larger. A layer takes less than 1 kB."""

_MOST_CONTAINERS = 200_000
"""Lists and objects in a file. Of all that JSON has they cost the most for a character: 64 bytes, and a second's time
for a million."""

_MOST_CHARACTERS = 1000
"""An error isn't longer, as part of it may come from the file."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


class _DuplicateKeyError(ValueError):
    """An object has a key twice."""


def read_text(
    path: str | os.PathLike[str], error: type[ValueError], *, encoding: str = "utf-8", most_bytes: int = MOST_BYTES
) -> str:
    """The text in a file.

    Args:
        path: the file.
        error: what to raise.
        encoding: "utf-8" or "utf-8-sig".
        most_bytes: a larger file, or one without an end, isn't read any further.

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


def parse_object(text: str, source: str, error: type[ValueError]) -> dict[str, Any]:
    """The JSON object that ``text`` is. What a key means twice, readers of JSON don't agree on: that is refused.

    Raises:
        ValueError: ``error``, naming ``source``, if it isn't one.
    """
    if len(text) > MOST_BYTES:
        raise error(f"{source} is longer than {MOST_BYTES:,} characters, the most that is read")
    if text.count("[") + text.count("{") > _MOST_CONTAINERS:
        raise error(f"{source} has more than {_MOST_CONTAINERS:,} lists and objects, the most that are read")
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as duplicate:
        raise error(f"{source}: {duplicate}") from duplicate
    except (ValueError, RecursionError) as wrong:  # Also for numbers and nesting beyond Python's limits.
        raise error(f"{source} isn't JSON: {wrong}") from wrong
    if not isinstance(data, dict):
        raise error(f"{source} has a JSON {type(data).__name__} where an object {{...}} is expected")
    return data


def short(value: object) -> str:
    """A value from a file for an error's text: in part, where it is long or nested deeply."""
    return clip(_REPR.repr(value), 120)


def clip(text: str, length: int = _MOST_CHARACTERS) -> str:
    """A text without its middle, where it is longer than that."""
    return text if len(text) <= length else f"{text[: length * 2 // 3]} ... {text[-length // 3 + 5 :]}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKeyError(f"key {short(key)} stands twice in one object; remove one of them")
            seen.add(key)
    return found
