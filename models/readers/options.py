"""Parses ``--dataset=kind:path?option=value&option=value``."""

from __future__ import annotations

import dataclasses
import pathlib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from dapple_tf.errors import meant
from dapple_tf.models.sources import ModelError

_Options = TypeVar("_Options")
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


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

    def options(self, kind: type[_Options]) -> _Options:
        """Returns the options as a dataclass with a default for every field: of type int, float, bool, str or Literal.

        Raises:
            ModelError: there is no such option, or a value has another type.
        """
        types = typing.get_type_hints(kind)
        values = {}
        for name, text in self.given.items():
            if name not in types:
                like = meant(name, types)
                raise ModelError(f"{self.text}: there is no option {name}{like}; {self.kind} takes {', '.join(types)}")
            values[name] = self._value(name, text, types[name])
        try:
            return kind(**values)
        except ValueError as error:
            raise ModelError(f"{self.text}: {error}") from error

    def _value(self, name: str, text: str, kind: Any) -> Any:
        choices = typing.get_args(kind)
        if kind is bool:
            if text.lower() not in _TRUTH:
                raise ModelError(f"{self.text}: {name} is {text!r}; use true or false")
            return _TRUTH[text.lower()]
        if choices:
            if text not in choices:
                raise ModelError(f"{self.text}: {name} is {text!r}; use one of {', '.join(choices)}")
            return text
        try:
            return kind(text)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise ModelError(f"{self.text}: {name} is {text!r}; it must be {what}") from error

    def existing(self, path: pathlib.Path, *, folder: bool = False) -> pathlib.Path:
        """Returns the path if there is such a file or folder.

        Raises:
            ModelError: there is none.
        """
        if folder and not path.is_dir():
            raise ModelError(f"{self.text}: {'that is a file' if path.is_file() else 'there is no folder'} {path}")
        if not folder and not path.is_file():
            raise ModelError(f"{self.text}: {'that is a folder' if path.is_dir() else 'there is no file'} {path}")
        return path


def check_fraction(name: str, value: float) -> None:
    """Checks that a fraction of data leaves something.

    Raises:
        ValueError: it isn't at least 0 and less than 1.
    """
    if not 0 <= value < 1:
        raise ValueError(f"{name} is {value}; need 0 <= {name} < 1")


@dataclasses.dataclass(frozen=True)
class TokenizedOptions:
    """Options of text files that are tokenized.

    Attributes:
        tokenizer: JSON file; by default one is trained on the text if the reader needs one.
        vocabulary: maximum tokens of a trained tokenizer; 0 leaves it to the reader.
        valid: files to evaluate on.
        held_out: fraction of the data to evaluate on, if there is no ``valid``.
    """

    tokenizer: str = ""
    vocabulary: int = 0
    valid: str = ""
    held_out: float = 0.05

    def __post_init__(self) -> None:
        check_fraction("held_out", self.held_out)
        if self.tokenizer and self.vocabulary:
            raise ValueError("tokenizer and vocabulary are both given; a tokenizer's file has a vocabulary")
