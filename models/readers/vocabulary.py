"""Tokenizers of Hugging Face's library ``tokenizers``: files in its JSON format, or trained on the data themselves."""

from __future__ import annotations

import array
import collections
import importlib
import itertools
import pathlib
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import ModelError

OPTIONS = {"tokenizer": "", "vocabulary": 0, "valid": "", "held_out": 0.05}
"""Options of text: a tokenizer's file, or tokens to train one of; files to evaluate on, or a fraction."""

_MOST_LEARNT = 32_000
"""Default number of tokens of a trained tokenizer, if the model knows as many."""

SPECIAL = {
    "padding": ("<pad>", "[PAD]"),
    "unknown": ("<unk>", "[UNK]"),
    "start": ("<start>", "<s>", "[CLS]", "<bos>"),
    "end": ("<end>", "</s>", "[SEP]", "<eos>", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]"),
}
"""Names of special tokens, by role. Tokenizers trained here begin with the first of each."""

_FIRST = [names[0] for names in SPECIAL.values()]
_AT_ONCE = 1000


def library() -> Any:
    """Returns the package ``tokenizers``.

    Raises:
        ModelError: it isn't installed.
    """
    try:
        return importlib.import_module("tokenizers")
    except ModuleNotFoundError as error:
        raise ModelError("these data need the package tokenizers: pip install 'dapple_tf[data]'") from error


def load(path: pathlib.Path, text: str) -> Any:
    """Loads a tokenizer from a file.

    Raises:
        ModelError: it isn't a tokenizer. The error begins with ``text``.
    """
    try:
        tokenizer = library().Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises Exception itself.
        raise ModelError(f"{text}: {path} isn't a tokenizer's JSON file: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def chosen(request: Request, options: SimpleNamespace, lines: Iterable[str], known: int | None = None) -> Any:
    """Returns the tokenizer of a file, or one trained on lines, for a model that knows this many tokens.

    Raises:
        ModelError: the file isn't a tokenizer, or the model knows too few tokens.
    """
    if options.tokenizer and options.vocabulary:
        raise ModelError(f"{request.text}: tokenizer and vocabulary are both given; leave one out")
    if options.tokenizer:
        tokenizer = load(pathlib.Path(options.tokenizer), request.text)
    else:
        tokenizer = trained(lines, options.vocabulary or min(known or _MOST_LEARNT, _MOST_LEARNT), request.text)
    if known is not None and (size := size_of(tokenizer)) > known:
        raise ModelError(
            f"{request.text}: the data have {size} tokens, but the model knows {known}; use a tokenizer of at most "
            f"{known} tokens, or build the model with vocabulary={size}"
        )
    return tokenizer


def trained(lines: Iterable[str], size: int, text: str) -> Any:
    """Returns a tokenizer (byte-level BPE) trained on lines; equal lines give equal tokenizers.

    If ``size`` leaves no room for all bytes, the rarest ones are unknown.

    Raises:
        ModelError: there is no room for two bytes. The error begins with ``text``.
    """
    room = size - len(_FIRST)
    if room < 2:
        raise ModelError(f"{text}: a vocabulary of {size} is too small for a tokenizer; use at least {len(_FIRST) + 2}")
    package = library()
    split = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = package.Tokenizer(package.models.BPE(unk_token=_FIRST[1]))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, package.decoders.ByteLevel()
    alphabet = split.alphabet()
    if room < len(alphabet):
        lines = list(lines)
        words = (word for line in lines for word, _ in split.pre_tokenize_str(line))
        counts = collections.Counter(itertools.chain.from_iterable(words))
        alphabet = sorted(counts, key=lambda byte: (-counts[byte], byte))[:room]
    trainer = package.trainers.BpeTrainer(
        vocab_size=size, special_tokens=_FIRST, initial_alphabet=alphabet, limit_alphabet=room, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def token(tokenizer: Any, role: str, text: str) -> int:
    """Returns the number of a special token, by its role in `SPECIAL`.

    Raises:
        ModelError: the tokenizer has none.
    """
    for name in SPECIAL[role]:
        if (number := tokenizer.token_to_id(name)) is not None:
            return int(number)
    raise ModelError(f"{text}: the tokenizer has none of the tokens {', '.join(SPECIAL[role])}; add one to it")


def size_of(tokenizer: Any) -> int:
    """One more than the largest token."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def encodings(tokenizer: Any, lines: Iterable[Any], *, special: bool = False) -> Iterator[Any]:
    """Yields the library's ``Encoding`` of each line, or pair of lines, with or without special tokens."""
    remaining = iter(lines)
    while some := list(itertools.islice(remaining, _AT_ONCE)):
        yield from tokenizer.encode_batch(some, add_special_tokens=special)


def encoded(tokenizer: Any, lines: Iterable[str]) -> Iterator[list[int]]:
    """Yields the tokens of each line, without special ones."""
    return (encoding.ids for encoding in encodings(tokenizer, lines))


def ragged(lists: Iterable[Iterable[int]]) -> tf.RaggedTensor:
    """Returns lists of tokens as int32 [lists, None]."""
    tokens, ends = array.array("i"), array.array("q", [0])
    for each in lists:
        tokens.extend(each)
        ends.append(len(tokens))
    return tf.RaggedTensor.from_row_splits(np.array(tokens, "int32"), np.array(ends, "int64"))


def padded(tokens: tf.Tensor, length: int, value: int = 0) -> tf.Tensor:
    """Returns tokens followed by ``value``: [length]."""
    filled = tf.pad(tokens, [[0, length - tf.shape(tokens)[0]]], constant_values=value)
    return tf.ensure_shape(filled, [length])
