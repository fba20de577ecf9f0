"""Files of tokens from other tools: bare numbers ``train.bin``, or NumPy's ``train.npy``.

Windows of a model's length are read in place; nothing else of the file is loaded.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, samples
from dapple_tf.models.readers.files import mapped
from dapple_tf.models.readers.options import Request, check_fraction
from dapple_tf.models.readers.order import Samples, by_number, evaluation_batches, training_batches
from dapple_tf.models.sources import DataSource, ModelError

_LOOKED_AT = 2**24
"""Number of tokens checked before training, spread over the file, for tokens that a model doesn't know."""
_AT_ONCE = 2**16


@dataclasses.dataclass(frozen=True)
class TokenOptions:
    """Options of token files.

    Attributes:
        dtype: dtype of the numbers in a .bin file, little-endian; a .npy file contains its own.
        valid: a file to evaluate on.
        held_out: fraction at the end of the file to evaluate on, if there is no ``valid``.
    """

    dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] = "uint16"
    valid: str = ""
    held_out: float = 0.05

    def __post_init__(self) -> None:
        check_fraction("held_out", self.held_out)


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """Tokens in a file, or a part of them.

    Attributes:
        path: the file.
        dtype: dtype of the numbers.
        header: number of bytes before the first token.
        first: number of the first token of the part.
        count: number of tokens in the part.
        size: bytes of the file.
    """

    path: pathlib.Path
    dtype: np.dtype
    header: int
    first: int
    count: int
    size: int

    @classmethod
    def of(cls, path: pathlib.Path, dtype: str, text: str) -> TokenFile:
        """Opens a whole file.

        Raises:
            ModelError: it isn't a token file. The error begins with ``text``.
        """
        size = path.stat().st_size
        if path.suffix == ".npy":
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                raise ModelError(f"{text}: {path} isn't a NumPy array: {error}") from error
            if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.byteorder == ">":
                raise ModelError(
                    f"{text}: {path} has {array.dtype} of shape {array.shape}; tokens are whole numbers of one axis"
                )
            return cls(path, array.dtype, size - array.nbytes, 0, len(array), size)
        kind = np.dtype(dtype).newbyteorder("<")
        if size % kind.itemsize:
            raise ModelError(
                f"{text}: {path} has {size} bytes, which isn't a multiple of {kind.itemsize}, the bytes of a {dtype}; "
                f"give dtype=..."
            )
        return cls(path, kind, 0, 0, size // kind.itemsize, size)

    def split(self, held_out: float) -> tuple[TokenFile, TokenFile]:
        """Returns the part before the last tokens, and the last tokens."""
        last = round(self.count * held_out)
        first = dataclasses.replace(self, count=self.count - last)
        return first, dataclasses.replace(self, first=self.first + self.count - last, count=last)

    def array(self) -> np.ndarray:
        """Returns the tokens, mapped from the file."""
        if not self.count:
            return np.zeros(0, self.dtype)
        offset = self.header + self.first * self.dtype.itemsize
        return np.memmap(self.path, self.dtype, "r", offset, (self.count,))

    def check(self, vocabulary: int, name: str, text: str) -> None:
        """Checks that a model knows the tokens.

        Raises:
            ModelError: it doesn't know one.
        """
        tokens = self.array()
        pieces = max(1, min(_LOOKED_AT, self.count) // _AT_ONCE)
        for start in np.linspace(0, max(0, self.count - _AT_ONCE), pieces, dtype="int64").tolist():
            piece = tokens[start : start + _AT_ONCE]
            wrong = (piece < 0) | (piece >= vocabulary)
            if wrong.any():
                place = int(wrong.argmax())
                raise ModelError(
                    f"{text}: token {self.first + start + place} of {self.path} is {int(piece[place])}, but {name!r} "
                    f"knows {vocabulary}; build the model with a larger vocabulary, or check the dtype ({self.dtype})"
                )

    def windows(self, sequence: int, vocabulary: int, text: str) -> Samples:
        """Returns consecutive windows of ``sequence`` tokens: x, and y one token later, int32 [batch, sequence].

        Raises:
            ModelError: there are too few tokens.
        """
        count = (self.count - 1) // sequence
        if count < 1:
            raise ModelError(
                f"{text}: {self.count} tokens of {self.path} make no window of {sequence} + 1; use more text"
            )
        path, tokens = str(self.path), mapped(self.path, self.dtype)
        start = self.header // self.dtype.itemsize + self.first

        def windows(draw: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            places = start + index[:, None] * sequence + tf.range(sequence + 1, dtype=tf.int64)
            gathered = tf.cast(tf.gather(tokens, places), tf.int64)
            known = tf.reduce_all((gathered >= 0) & (gathered < vocabulary))
            message = [f"{path} has a token that a vocabulary of", vocabulary, "lacks:", tf.reduce_max(gathered)]
            check = tf.debugging.Assert(known, message)
            with tf.control_dependencies([check]):
                gathered = tf.cast(gathered, tf.int32)
            return gathered[:, :-1], gathered[:, 1:]

        return by_number(count, windows, in_batches=True)


def open_tokens(request: Request) -> DataSource:
    """Returns the data in a token file.

    Raises:
        ModelError: there is none.
    """
    options = request.options(TokenOptions)
    if len(request.paths) > 1:
        raise ModelError(f"{request.text}: give one file, not {len(request.paths)}")
    path = request.existing(request.paths[0]) if request.paths else samples.tokens()
    valid = request.existing(pathlib.Path(options.valid)) if options.valid else None
    train = TokenFile.of(path, options.dtype, request.text)
    if valid is not None:
        held_out: TokenFile | None = TokenFile.of(valid, options.dtype, request.text)
    else:
        train, rest = train.split(options.held_out)
        held_out = rest if rest.count else None
    return source(request.text, train, held_out)


def source(text: str, train: TokenFile, held_out: TokenFile | None) -> DataSource:
    """Returns data for language models: windows of two files, or parts of one."""

    def part(model: keras.Model, tokens: TokenFile) -> Samples:
        (_, sequence), _ = fit.shapes(text, model, 2, 3)
        known = fit.vocabulary_of(model)
        tokens.check(known, model.name, text)
        return tokens.windows(sequence, known, text)

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        return training_batches(part(model, train), batch_size, seed)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        assert held_out is not None
        return evaluation_batches(part(model, held_out), batch_size)

    about = f"{train.count:,} tokens of {train.path}"
    return DataSource(text, about, batches, None if held_out is None else evaluation, in_files=True)
