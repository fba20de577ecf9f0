"""Generated data: few enough to be memorised, or with something to learn."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.models import text
from dapple_tf.models.readers import fit, order, sentences
from dapple_tf.models.sources import ModelError, untuned

PADDING, BEGIN, END = 0, 1, 2
"""Tokens that aren't words: padding of a sentence, and the beginning and end of a translation."""

_WORDS_FROM = 3

_POOL_BATCHES = 4
"""Number of batches of generated data, which are repeated: losses fall, as they can be memorised."""


def pooled(x: Any, y: Any, weights: Any, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns endless shuffled batches of arrays."""
    arrays = tuple(part for part in (x, y, weights) if part is not None)
    count = len(keras.tree.flatten(x)[0])
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.shuffle(count, seed=seed).repeat().batch(batch_size, drop_remainder=True)
    return untuned(dataset.prefetch(2))


def random_numbers(model: keras.Model, batch_size: int, seed: int, length: int | None = None) -> tf.data.Dataset:
    """Returns random numbers for a model's inputs and loss; open axes have this length, or one that it accepts."""
    examples = ExampleBatch.of(model, length=length).trees(_POOL_BATCHES * batch_size)
    return pooled(*examples, batch_size, seed)


def source_text(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns windows of the standard library's source, as bytes."""
    return text.windows(text.standard_library().train, _sequence(model), batch_size, seed=seed, repeat=True)


def held_out_text(model: keras.Model, batch_size: int) -> tf.data.Dataset:
    """Returns windows of files that `source_text` leaves out."""
    return text.windows(text.standard_library().held_out, _sequence(model), batch_size)


def _sequence(model: keras.Model) -> int:
    """Returns the tokens per sample of a language model."""
    return fit.shapes("source_text", model, 2, 3)[0][1]


def patterns(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns images with a pattern for each class, in noise."""
    images_shape, (_, classes) = fit.shapes("patterns", model, 4, 2)
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, _POOL_BATCHES * batch_size)
    images = draw.standard_normal((len(labels), *images_shape[1:]), "float32")
    for label in np.unique(labels):  # Patterns of all thousand classes of large images would take gigabytes.
        images[labels == label] += np.random.default_rng((seed, label)).standard_normal(images_shape[1:], "float32")
    return pooled(images, labels.astype("int32"), None, batch_size, seed)


def random_sentences(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns tokens with some padding; the labels are the tokens themselves, or the class of the first one.

    If a model takes a permutation, only the tokens to be predicted count.
    """
    inputs = fit.named_inputs("sentences", model, sentences.inputs_of(model))
    draw = np.random.default_rng(seed)
    count, sequence = _POOL_BATCHES * batch_size, inputs["tokens"][1]
    tokens = draw.integers(0, fit.vocabulary_of(model, logits=False), (count, sequence), dtype="int32")
    lengths = draw.integers(math.ceil(sequence / 2), sequence + 1, (count, 1))
    present = (np.arange(sequence) < lengths).astype("int32")
    x = {"tokens": tokens, "segments": np.zeros_like(tokens), "present": present}
    y = tokens if len(model.output_shape) == 3 else tokens[:, 0] % model.output_shape[-1]
    if "permutation" not in inputs:
        return pooled(x, y, None, batch_size, seed)
    seeds = order.seeds_of(tf.constant(0, tf.int64), seed)
    x["permutation"] = sentences.permutation(present == 0, seeds).numpy()
    return pooled(x, y, (x["permutation"] > 0).astype("float32"), batch_size, seed)


def reversed_pairs(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns sentences of several lengths, each with the same words backwards as its translation.

    Batches are as `readers.pairs` has them.

    Raises:
        ModelError: the model has other inputs, knows no words, or has no room for one and `END`.
    """
    inputs = fit.named_inputs("reversed_pairs", model, ("source", "target"))
    source, target, vocabulary = inputs["source"][1], inputs["target"][1], fit.vocabulary_of(model)
    longest, count = min(source, target - 1), _POOL_BATCHES * batch_size
    if vocabulary <= _WORDS_FROM or longest < 1:
        raise ModelError(
            f"the data 'reversed_pairs' don't fit {model.name!r}, which knows {vocabulary} tokens, reads {source} and "
            f"writes {target}; need at least {_WORDS_FROM + 1} tokens (padding, begin and end are no words), 1 and 2"
        )
    draw = np.random.default_rng(seed)
    x = {name: np.zeros((count, length), "int32") for name, length in (("source", source), ("target", target))}
    labels = np.zeros((count, target), "int32")
    for row, length in enumerate(draw.integers(math.ceil(longest / 2), longest + 1, count)):
        words = draw.integers(_WORDS_FROM, vocabulary, length)
        x["source"][row, :length] = words
        x["target"][row, : length + 1] = BEGIN, *words[::-1]
        labels[row, : length + 1] = *words[::-1], END
    return pooled(x, labels, (labels != PADDING).astype("float32"), batch_size, seed)
