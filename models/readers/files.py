"""Files as lines of text, and as numbers."""

from __future__ import annotations

import mmap
import pathlib
import sys
from collections.abc import Iterable, Iterator

import numpy as np
import tensorflow as tf

from dapple_tf.models.sources import ModelError


def mapped(path: pathlib.Path, dtype: np.dtype) -> tf.Tensor:
    """Maps a non-empty file as numbers, [file size // item size]: only what is used is read."""
    # Private pages may be written to, as tensors require, and take no memory until they are.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    numbers = np.frombuffer(memory, dtype, len(memory) // dtype.itemsize)
    return tf.experimental.dlpack.from_dlpack(numbers.__dlpack__())


def lines_of(path: pathlib.Path, text: str) -> Iterator[str]:
    """Yields the lines of a file in UTF-8, without their ends.

    Raises:
        ModelError: it isn't UTF-8. The error begins with ``text``.
    """
    number = 0
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                number += 1
                yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ModelError(f"{text}: {path} isn't UTF-8 text behind line {number}: {error.reason}") from error


def pairs_of(paths: tuple[pathlib.Path, ...], text: str) -> Iterator[tuple[str, str]]:
    """Yields pairs of lines of two files, or of the two columns of one.

    Raises:
        ModelError: the files have different numbers of lines, or a line hasn't two columns.
    """
    if len(paths) == 1:
        for number, line in enumerate(lines_of(paths[0], text), 1):
            source, tab, target = line.partition("\t")
            if not tab or "\t" in target:
                raise ModelError(
                    f"{text}: line {number} of {paths[0]} has {line.count(chr(9)) + 1} columns; write the source, one "
                    f"tabulator and the target"
                )
            yield source, target
        return
    first, second = (lines_of(path, text) for path in paths)
    count = 0
    for source in first:
        if (translation := next(second, None)) is None:
            raise _different(paths, text, count + 1 + _left(first), count)
        yield source, translation
        count += 1
    if left := _left(second):
        raise _different(paths, text, count, count + left)


def _left(lines: Iterable[str]) -> int:
    return sum(1 for _ in lines)


def _different(paths: tuple[pathlib.Path, ...], text: str, first: int, second: int) -> ModelError:
    return ModelError(
        f"{text}: {paths[0]} has {first} lines, {paths[1]} has {second}; they must be translations line by line"
    )
