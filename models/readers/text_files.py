"""Text files for language models: their bytes, or their tokens, which are cached as a token file."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, samples, vocabulary
from dapple_tf.models.readers.cache import digest, digest_of_files, kept
from dapple_tf.models.readers.options import Request, TokenizedOptions
from dapple_tf.models.readers.tokens import TokenFile, source
from dapple_tf.models.sources import DataSource, ModelError

_VERSION = 1
_AT_ONCE = 2**16
"""Number of characters that are tokenized at a time, up to the end of a line."""


class TextOptions(TokenizedOptions):
    """Options of text files: without ``tokenizer`` and ``vocabulary`` tokens are bytes; ``valid`` may be a folder."""


def open_text(request: Request) -> DataSource:
    """Returns the data in text files, or in the ``*.txt`` files of folders.

    Raises:
        ModelError: there are none, or they aren't text.
    """
    options = request.options(TextOptions)
    files = text_files(request.paths or (samples.text(),), request.text)
    valid = text_files((pathlib.Path(options.valid),), request.text) if options.valid else ()
    tokenizer: Any = None
    if options.tokenizer:
        tokenizer = vocabulary.load(pathlib.Path(options.tokenizer), request.text)
    elif options.vocabulary:
        try:
            tokenizer = vocabulary.trained("byte_bpe", options.vocabulary, files, lambda: pieces(files, request.text))
        except ModelError as error:
            raise ModelError(f"{request.text}: {error}") from error
    train = token_file(files, tokenizer, request.text)
    if valid:
        held_out: TokenFile | None = token_file(valid, tokenizer, request.text)
    else:
        train, rest = train.split(options.held_out)
        held_out = rest if rest.count else None
    data = source(request.text, train, held_out)
    kind = "bytes" if tokenizer is None else "tokens"
    about = f"{train.count:,} {kind} of {', '.join(str(path) for path in request.paths) or files[0]}"

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        if tokenizer is not None:
            fit.check_vocabulary(request.text, vocabulary.size_of(tokenizer), model)
        return data.batches(model, batch_size, seed)

    return DataSource(request.text, about, batches, data.held_out)


def text_files(paths: Sequence[pathlib.Path], text: str) -> tuple[pathlib.Path, ...]:
    """Returns the files, and the ``*.txt`` files of folders, in the order of their names.

    Raises:
        ModelError: there are none.
    """
    all_files: list[pathlib.Path] = []
    for path in paths:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*.txt") if file.is_file())
            if not files:
                raise ModelError(f"{text}: there are no files *.txt in {path}")
            all_files += files
        elif path.is_file():
            all_files.append(path)
        else:
            raise ModelError(f"{text}: there is no file or folder {path}")
    return tuple(all_files)


def pieces(files: Sequence[pathlib.Path], text: str) -> Iterator[str]:
    """Yields the text of files in pieces that end with a line, so that no word is cut.

    Raises:
        ModelError: a file isn't UTF-8.
    """
    for path in files:
        try:
            with path.open(encoding="utf-8", newline="") as file:
                while piece := file.read(_AT_ONCE):
                    yield piece + file.readline()
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{text}: {path} isn't UTF-8 text: {error.reason}; leave out the tokenizer to train on bytes"
            ) from error


def token_file(files: Sequence[pathlib.Path], tokenizer: Any, text: str) -> TokenFile:
    """Returns the tokens of files, each followed by a zero byte, or an end token if there is one; cached.

    A single file's bytes are read from the file itself.

    Raises:
        ModelError: a file isn't text, or all are empty.
    """
    if tokenizer is None and len(files) == 1:
        return TokenFile.of(files[0], "uint8", text)
    dtype = "uint8" if tokenizer is None else "uint16" if vocabulary.size_of(tokenizer) <= 2**16 else "uint32"

    def make(folder: pathlib.Path) -> None:
        with (folder / "tokens.bin").open("wb") as out:
            for path in files:
                if tokenizer is None:
                    out.write(path.read_bytes() + b"\0")
                    continue
                for ids in vocabulary.encoded(tokenizer, pieces([path], text)):
                    out.write(np.array(ids, dtype).tobytes())
                ends = [tokenizer.token_to_id(alias) for alias in vocabulary.ALIASES["<end>"]]
                out.write(np.array([end for end in ends if end is not None][:1], dtype).tobytes())

    key = digest([_VERSION, digest_of_files(files), "" if tokenizer is None else tokenizer.to_str()])
    return TokenFile.of(kept(f"text_{key}", make) / "tokens.bin", dtype, text)
