"""Sentences and their translations, as of WMT: two files line by line, or one with two columns, for ``gnmt``.

A batch is ``({"source", "target"}, labels, weights)``: the sentence; the translation after a token ``<start>``; the
translation followed by ``<end>``; and 1.0 where there is a label, 0.0 at padding, which is token 0.
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, samples, vocabulary
from dapple_tf.models.readers.cache import digest, digest_of_files, kept
from dapple_tf.models.readers.files import pairs_of
from dapple_tf.models.readers.options import Request, TokenizedOptions
from dapple_tf.models.readers.order import Samples, by_number, chosen, evaluation_batches, parts, training_batches
from dapple_tf.models.readers.ragged import Ragged, padded
from dapple_tf.models.sources import DataSource, ModelError

_logger = logging.getLogger(__name__)
_VERSION = 1


class PairOptions(TokenizedOptions):
    """Options of pairs: one tokenizer for both languages.

    By default it is trained, with as many tokens as the model knows, at most 32000. ``valid`` are two files
    separated by a comma, or one with two columns.
    """


@dataclasses.dataclass(frozen=True)
class _Lengths:
    source: int
    target: int


def open_pairs(request: Request) -> DataSource:
    """Returns the data in parallel files.

    Raises:
        ModelError: there are no such files, or they don't match.
    """
    options = request.options(PairOptions)
    train, valid = request.paths, tuple(pathlib.Path(path) for path in options.valid.split(",") if path)
    if not train:
        train, valid = samples.pairs()[:2], valid or samples.pairs()[2:]
    for paths in (train, valid):
        if len(paths) > 2:
            raise ModelError(f"{request.text}: give one file with two columns, or two files, not {len(paths)}")
        for path in paths:
            request.existing(path)
    count = sum(1 for _ in pairs_of(train, request.text))
    if count < 2:
        raise ModelError(f"{request.text}: {train[0]} has {count} lines; need at least 2")
    evaluated = bool(valid or options.held_out)

    def part(model: keras.Model, held_out: bool) -> Samples:
        lengths = _Lengths(
            *(fit.named_inputs(request.text, model, ("source", "target"))[name][1] for name in ("source", "target"))
        )
        tokenizer = _tokenizer(request, options, train, model)
        fit.check_vocabulary(request.text, vocabulary.size_of(tokenizer), model)
        paths = valid if held_out and valid else train
        source, target = _tokens(tokenizer, paths, request.text)
        numbers = np.arange(len(source))
        if not valid and options.held_out:
            numbers = parts(len(source), options.held_out)[held_out]
        return _samples(tokenizer, source, target, numbers, lengths, request.text)

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        return training_batches(part(model, held_out=False), batch_size, seed)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        return evaluation_batches(part(model, held_out=True), batch_size)

    names = " and ".join(str(path) for path in train)
    return DataSource(request.text, f"{count} pairs of {names}", batches, evaluation if evaluated else None)


def _tokenizer(request: Request, options: PairOptions, train: tuple[pathlib.Path, ...], model: keras.Model) -> Any:
    if options.tokenizer:
        return vocabulary.load(pathlib.Path(options.tokenizer), request.text)
    size = options.vocabulary or min(fit.vocabulary_of(model), vocabulary.MOST_LEARNT)

    def lines() -> Iterator[str]:
        for pair in pairs_of(train, request.text):
            yield from pair

    try:
        return vocabulary.trained("bpe", size, train, lines)
    except ModelError as error:
        raise ModelError(f"{request.text}: {error}") from error


def _tokens(tokenizer: Any, paths: tuple[pathlib.Path, ...], text: str) -> tuple[Ragged, Ragged]:
    """Returns the tokens of sentences and of translations; kept in the cache."""

    def make(folder: pathlib.Path) -> None:
        for side, name in enumerate(("source", "target")):
            sentences = (pair[side] for pair in pairs_of(paths, text))
            Ragged.of(vocabulary.encoded(tokenizer, sentences)).save(folder, name)

    key = digest([_VERSION, digest_of_files(paths), len(paths), tokenizer.to_str()])
    folder = kept(f"pairs_{key}", make)
    return Ragged.load(folder, "source"), Ragged.load(folder, "target")


def _samples(
    tokenizer: Any, source: Ragged, target: Ragged, numbers: np.ndarray, lengths: _Lengths, text: str
) -> Samples:
    """Returns the pairs with these numbers that aren't empty or too long."""
    start, end = (vocabulary.token(tokenizer, name, text) for name in ("<start>", "<end>"))
    padding = vocabulary.token(tokenizer, "<pad>", text)
    if padding:
        raise ModelError(f"{text}: the tokenizer's padding is token {padding}; models take token 0 for that")
    reads, writes = source.lengths[numbers], target.lengths[numbers]
    fits = (reads > 0) & (writes > 0) & (reads <= lengths.source) & (writes < lengths.target)
    numbers = numbers[fits]
    if not len(numbers):
        raise ModelError(
            f"{text}: none of {len(fits)} pairs has 1 to {lengths.source} tokens and 1 to {lengths.target - 1} in its "
            f"translation, as the model takes them; use a larger vocabulary, or a model of longer sequences"
        )
    _logger.info("%s: %d of %d pairs are empty or too long, and left out", text, len(fits) - len(numbers), len(fits))
    sources, targets, known = source.lookup(), target.lookup(), chosen(numbers)

    def read(draw: tf.Tensor, index: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
        sentence, translation = sources[known[index]], targets[known[index]]
        x = {
            "source": padded(sentence, lengths.source),
            "target": padded(tf.concat([[start], translation], 0), lengths.target),
        }
        labels = padded(tf.concat([translation, [end]], 0), lengths.target)
        present = tf.range(lengths.target) <= tf.shape(translation)[0]
        return x, labels, tf.cast(present, tf.float32)

    return by_number(len(numbers), read)
