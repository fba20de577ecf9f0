"""Tokens for language models: files of other tools, bare numbers ``train.bin`` or NumPy's ``train.npy``; and text.

A sample is a window of the model's length, labelled by the window one token later. A file of tokens, or of text as
bytes, is mapped into memory: only windows that are read are loaded.
"""

from __future__ import annotations

import array
import mmap
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, order, samples, vocabulary
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError

_CHECKED = 2**20
"""Number of tokens that are checked at once: a wrong type or tokenizer shows in them."""


class Tokens(NamedTuple):
    """Tokens of a file.

    Attributes:
        values: the tokens, behind the file's header.
        first: position of the first token.
        size: number of tokens.
    """

    values: tf.Tensor
    first: int
    size: int


def open_tokens(request: Request) -> DataSource:
    """Returns the data in a token file.

    Raises:
        ModelError: there is none.
    """
    options = request.options(dtype=("uint16", "uint8", "int32", "uint32", "int64"), valid="", held_out=0.05)
    files = request.files(options.valid, lambda: [samples.tokens()])
    parts = [mapped(path, options.dtype, request.text) for path in files]
    return _windows(request.text, f"{parts[0].size:,} tokens of {files[0]}", parts, options.held_out)


def open_text(request: Request) -> DataSource:
    """Returns the data in text files, or in the ``*.txt`` files of folders, as bytes or as a tokenizer's tokens.

    Raises:
        ModelError: there are none, or they aren't text.
    """
    options = request.options(**vocabulary.OPTIONS)
    files = [text_files(request, request.paths or (samples.text(),))]
    if options.valid:
        files.append(text_files(request, [pathlib.Path(options.valid)]))
    tokenizer = None
    if options.tokenizer or options.vocabulary:
        lines = (line for path in files[0] for line in request.lines(path))
        tokenizer = vocabulary.chosen(request, options, lines)
    parts = [tokens_of(request, some, tokenizer) for some in files]
    about = f"{parts[0].size:,} {'tokens' if tokenizer else 'bytes'} of {', '.join(map(str, files[0]))}"
    return _windows(request.text, about, parts, options.held_out)


def _windows(text: str, about: str, parts: Sequence[Tokens], held_out: float) -> DataSource:
    """Returns consecutive windows of tokens: to train on, and to evaluate on if there are two parts."""

    def samples_for(model: keras.Model, tokens: Tokens, seed: int | None) -> order.Samples:
        (_, sequence), _ = fit.shapes(text, model, 2, 3)
        known = fit.vocabulary_of(model)
        count = (tokens.size - 1) // sequence
        if count < 1:
            raise ModelError(f"{text}: {tokens.size} tokens make no window of {sequence} + 1; use more text")
        start = tf.cast(tokens.values[tokens.first : tokens.first + min(tokens.size, _CHECKED)], tf.int64)
        least, most = int(tf.reduce_min(start)), int(tf.reduce_max(start))
        if least < 0 or most >= known:
            raise ModelError(
                f"{text}: there is a token {least if least < 0 else most}, but {model.name!r} knows 0 to {known - 1}; "
                f"build it with a larger vocabulary, or check dtype or tokenizer"
            )

        def read(draw: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            start = tokens.first + number * sequence
            window = tf.cast(tokens.values[start : start + sequence + 1], tf.int64)
            most = tf.reduce_max(window)
            message = ["token", most, f"of {text}, but {model.name!r} knows {known}: build it with a larger vocabulary"]
            with tf.control_dependencies([tf.debugging.Assert((tf.reduce_min(window) >= 0) & (most < known), message)]):
                window = tf.ensure_shape(tf.cast(window, tf.int32), [sequence + 1])
            return window[:-1], window[1:]

        return order.Samples(count, read)

    return order.source(text, about, parts, samples_for, held_out=held_out, in_files=True)


def mapped(path: pathlib.Path, dtype: str, text: str) -> Tokens:
    """Returns a file's tokens, mapped into memory.

    Raises:
        ModelError: it isn't a token file. The error begins with ``text``.
    """
    size = path.stat().st_size
    kind, header = np.dtype(dtype).newbyteorder("<"), 0
    if path.suffix == ".npy":
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ModelError(f"{text}: {path} isn't a NumPy array: {error}") from error
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
            raise ModelError(
                f"{text}: {path} has {array.dtype} of shape {array.shape}; tokens are whole numbers of one axis"
            )
        kind, header = array.dtype, size - array.nbytes
    if not size:
        raise ModelError(f"{text}: {path} is empty; give a file with tokens or text")
    if size % kind.itemsize:
        raise ModelError(
            f"{text}: {path} has {size} bytes, which isn't a multiple of {kind.itemsize}, the bytes of a {dtype}; give "
            f"dtype=..."
        )
    # Private pages may be written to, as tensors require, and take no memory until they are.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    values = tf.experimental.dlpack.from_dlpack(np.frombuffer(memory, kind).__dlpack__())
    return Tokens(values, header // kind.itemsize, (size - header) // kind.itemsize)


def text_files(request: Request, paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Returns the files, and the ``*.txt`` files of folders, in the order of their names.

    Raises:
        ModelError: there are none.
    """
    files: list[pathlib.Path] = []
    for path in paths:
        inside = sorted(path.rglob("*.txt"))
        if path.is_dir() and not inside:
            raise ModelError(f"{request.text}: there are no files *.txt in {path}")
        files += inside or [request.existing(path)]
    return files


def tokens_of(request: Request, files: Sequence[pathlib.Path], tokenizer: Any) -> Tokens:
    """Returns the bytes or tokens of files, each followed by a zero byte, or an end token if there is one.

    A single file's bytes are mapped into memory.

    Raises:
        ModelError: a file isn't text.
    """
    if tokenizer is None and len(files) == 1:
        return mapped(files[0], "uint8", request.text)
    if tokenizer is None:
        values = np.frombuffer(b"".join(path.read_bytes() + b"\0" for path in files), "uint8")
    else:
        end = [number for name in vocabulary.SPECIAL["end"] if (number := tokenizer.token_to_id(name)) is not None]
        tokens = array.array("i")
        for path in files:
            for ids in vocabulary.encoded(tokenizer, request.lines(path)):
                tokens.extend(ids)
            tokens.extend(end[:1])
        values = np.array(tokens, "int32")
    return Tokens(tf.constant(values), 0, len(values))
