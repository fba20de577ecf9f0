"""Parses ``--dataset=kind:path?option=value&option=value``."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from dapple_tf.errors import meant
from dapple_tf.models.sources import ModelError

_TRUTH = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True)
class Request:
    """A request for data.

    Attributes:
        text: the whole text, with which errors begin.
        kind: kind of the reader.
        paths: files or folders, separated by commas in the text; none for the sample.
        given: options as written.
    """

    text: str
    kind: str
    paths: tuple[pathlib.Path, ...]
    given: Mapping[str, str]

    @classmethod
    def parse(cls, text: str) -> Request:
        """Parses ``kind``, ``kind:path`` or ``kind:path,path``, each with or without ``?option=value&option=value``.

        Raises:
            ModelError: an option has no value or is repeated, or a path is empty.
        """
        front, question, behind = text.partition("?")
        kind, colon, paths = front.partition(":")
        if colon and not all(paths.split(",")):
            raise ModelError(f"{text}: a path is empty; write {kind}:PATH, or {kind} alone for the sample")
        given: dict[str, str] = {}
        for part in behind.split("&") if question else ():
            name, equals, value = part.partition("=")
            if not (name and equals and value):
                raise ModelError(f"{text}: {part!r} isn't an option; write option=value, with & between two of them")
            if name in given:
                raise ModelError(f"{text}: option {name} is given twice; leave one out")
            given[name] = value
        return cls(text, kind, tuple(pathlib.Path(path) for path in paths.split(",")) if colon else (), given)

    def options(self, **defaults: Any) -> SimpleNamespace:
        """Returns the options.

        Args:
            defaults: default of each option, of type bool, int, float or str; or a tuple of choices, the first of which
                is the default.

        Raises:
            ModelError: there is no such option, or a value isn't possible.
        """
        values = {name: default[0] if isinstance(default, tuple) else default for name, default in defaults.items()}
        for name, text in self.given.items():
            if name not in defaults:
                like = meant(name, defaults)
                raise ModelError(
                    f"{self.text}: there is no option {name}{like}; {self.kind} takes {', '.join(defaults) or 'none'}"
                )
            values[name] = self._value(name, text, defaults[name])
        if not 0 <= values.get("held_out", 0) < 1:
            raise ModelError(f"{self.text}: held_out is {values['held_out']}; need 0 <= held_out < 1")
        return SimpleNamespace(**values)

    def _value(self, name: str, text: str, default: Any) -> Any:
        choices = tuple(_TRUTH) if isinstance(default, bool) else default
        if isinstance(choices, tuple):
            if text not in choices:
                raise ModelError(f"{self.text}: {name} is {text!r}; use one of {', '.join(choices)}")
            return _TRUTH.get(text, text)
        try:
            return type(default)(text)
        except ValueError as error:
            raise ModelError(f"{self.text}: {name} is {text!r}; need a {type(default).__name__}") from error

    def files(self, valid: str, sample: Callable[[], Sequence[pathlib.Path]]) -> Sequence[pathlib.Path]:
        """Returns the file to train on, and the file to evaluate on if there is one; without a path, the sample's.

        Raises:
            ModelError: there are several, or no such files.
        """
        if len(self.paths) > 1:
            raise ModelError(f"{self.text}: {self.kind} takes one file, not {len(self.paths)}")
        paths = self.paths or sample()
        return [self.existing(path) for path in (*paths[:1], *([pathlib.Path(valid)] if valid else paths[1:]))]

    def folder(self, sample: Callable[[], pathlib.Path]) -> pathlib.Path:
        """Returns the folder; without a path, the sample's.

        Raises:
            ModelError: there are several, or no such folder.
        """
        path, *others = self.paths or (sample(),)
        if others:
            raise ModelError(f"{self.text}: {self.kind} takes one folder, not {len(self.paths)}")
        if not path.is_dir():
            raise ModelError(f"{self.text}: there is no folder {path}")
        return path

    def existing(self, path: pathlib.Path) -> pathlib.Path:
        """Returns the path of a file.

        Raises:
            ModelError: there is none.
        """
        if not path.is_file():
            raise ModelError(f"{self.text}: there is no file {path}")
        return path

    def lines(self, path: pathlib.Path) -> Iterator[str]:
        """Yields the lines of a file in UTF-8, with their ends.

        Raises:
            ModelError: it isn't UTF-8.
        """
        number = 0
        try:
            with path.open(encoding="utf-8", newline="\n") as file:
                for line in file:
                    number += 1
                    yield line
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.text}: {path} isn't UTF-8 text behind line {number}: {error.reason}") from error
