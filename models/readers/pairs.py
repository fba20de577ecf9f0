"""Sentences and their translations, as of WMT: two files line by line, or one with two columns, for ``gnmt``.

A batch is ``({"source", "target"}, labels, weights)``: the sentence; the translation after a token ``<start>``; the
translation followed by ``<end>``; and 1.0 where there is a label, 0.0 at padding, which is token 0.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, order, samples, vocabulary
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError


def open_pairs(request: Request) -> DataSource:
    """Returns the data in parallel files, tokenized by one tokenizer for both languages.

    Raises:
        ModelError: there are no such files, or they don't match.
    """
    options = request.options(**vocabulary.OPTIONS)
    parts = samples.pairs()
    if request.paths:
        parts = [request.paths, *([tuple(map(pathlib.Path, options.valid.split(",")))] if options.valid else [])]
    train = parts[0]
    count = sum(1 for _ in _lines(request, train))

    @functools.cache
    def tokenizer_for(known: int) -> Any:
        return vocabulary.chosen(request, options, itertools.chain.from_iterable(_lines(request, train)), known)

    def samples_for(model: keras.Model, paths: Sequence[pathlib.Path], seed: int | None) -> order.Samples:
        inputs = fit.named_inputs(request.text, model, ("source", "target"))
        source, target = inputs["source"][1], inputs["target"][1]
        tokenizer = tokenizer_for(fit.vocabulary_of(model))
        padding, start, end = (vocabulary.token(tokenizer, role, request.text) for role in ("padding", "start", "end"))
        if padding:
            raise ModelError(f"{request.text}: the tokenizer's padding is token {padding}; models take token 0 for it")
        sentences, translations = (
            vocabulary.ragged(vocabulary.encoded(tokenizer, (pair[side] for pair in _lines(request, paths))))
            for side in range(2)
        )
        reads, writes = (lists.row_lengths().numpy() for lists in (sentences, translations))
        fits = np.flatnonzero((reads > 0) & (writes > 0) & (reads <= source) & (writes < target))
        if not len(fits):
            raise ModelError(
                f"{request.text}: none of {len(reads)} pairs has 1 to {source} tokens and 1 to {target - 1} in its "
                f"translation, as the model takes them; use a larger vocabulary, or a model of longer sequences"
            )
        sentences, translations = tf.gather(sentences, fits), tf.gather(translations, fits)

        def read(draw: tf.Tensor, number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor, tf.Tensor]:
            translation = translations[number]
            x = {
                "source": vocabulary.padded(sentences[number], source),
                "target": vocabulary.padded(tf.concat([[start], translation], 0), target),
            }
            labels = vocabulary.padded(tf.concat([translation, [end]], 0), target)
            return x, labels, tf.cast(tf.range(target) <= tf.shape(translation)[0], tf.float32)

        return order.Samples(len(fits), read)

    about = f"{count} pairs of {' and '.join(map(str, train))}"
    return order.source(request.text, about, parts, samples_for, held_out=options.held_out)


def _lines(request: Request, paths: Sequence[pathlib.Path]) -> Iterator[tuple[str, str]]:
    """Yields pairs of lines of two files, or of the two columns of one.

    Raises:
        ModelError: the files have different numbers of lines, or a line hasn't two columns.
    """
    if len(paths) > 2:
        raise ModelError(f"{request.text}: give one file with two columns, or two files, not {len(paths)}")
    lines = [(line.rstrip("\r\n") for line in request.lines(request.existing(path))) for path in paths]
    rows = itertools.zip_longest(*lines) if len(paths) == 2 else (line.split("\t") for line in lines[0])
    for number, row in enumerate(rows, 1):
        if None in row:
            raise ModelError(
                f"{request.text}: {paths[row.index(None)]} ends before line {number}, which the other file has; they "
                f"must be translations line by line"
            )
        if len(row) != 2:
            raise ModelError(
                f"{request.text}: line {number} of {paths[0]} has {len(row)} columns; write the source, one tabulator "
                f"and the target"
            )
        yield row[0], row[1]
