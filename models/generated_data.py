"""Generated data: few enough to be memorised, or with something to learn."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.models import text
from dapple_tf.models.readers import fit, order, predicted_tokens
from dapple_tf.models.sources import ModelError, untuned

PADDING, BEGIN, END = 0, 1, 2
"""Tokens that aren't words: padding of a sentence, and the beginning and end of a translation."""

_WORDS_FROM = 3

_POOL_BATCHES = 4
"""Number of batches of generated data, which are repeated: losses fall, as they can be memorised."""

Tokens = NDArray[np.int32]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Sentences of two languages, padded at the end.

    Attributes:
        source: int32 [pairs, source length], the sentences to translate.
        target: int32 [pairs, target length], the translation after a token `BEGIN`: the decoder's input.
        labels: int32 [pairs, target length], the translation and `END`: the decoder's output.
        weights: float32 [pairs, target length], 1 where there is a label, 0 at padding.
    """

    source: Tokens
    target: Tokens
    labels: Tokens
    weights: NDArray[np.float32]


def reversed_pairs(count: int, vocabulary: int, source: int, target: int, seed: int) -> Pairs:
    """Returns random sentences of several lengths, each with the same words backwards as its translation.

    Args:
        count: number of pairs.
        vocabulary: number of tokens, including those that aren't words.
        source: length that sentences are padded to.
        target: length that translations are padded to.
        seed: seed of the words and lengths.

    Raises:
        ValueError: there are no words, or no room for one and `END`.
    """
    if vocabulary <= _WORDS_FROM or source < 1 or target < 2:
        raise ValueError(
            f"pairs of {vocabulary} tokens, {source} read and {target} written; need at least {_WORDS_FROM + 1} tokens "
            f"(padding, begin and end are no words), 1 read and 2 written"
        )
    draw = np.random.default_rng(seed)
    longest = min(source, target - 1)
    lengths = draw.integers(math.ceil(longest / 2), longest + 1, count)
    words = draw.integers(_WORDS_FROM, vocabulary, (count, longest), dtype=np.int32)
    shape = (count, target)
    read, begun, labels = np.zeros((count, source), np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, length in enumerate(lengths):
        sentence = words[row, :length]
        read[row, :length] = sentence
        begun[row, : length + 1] = BEGIN, *sentence[::-1]
        labels[row, : length + 1] = *sentence[::-1], END
    return Pairs(read, begun, labels, (labels != PADDING).astype(np.float32))


def reversed_pairs_for(model: keras.Model, count: int, seed: int) -> tuple[dict[str, Tokens], Tokens, Any]:
    """Returns `reversed_pairs` as inputs, labels and weights of a model of ``{"source", "target"}``, such as GNMT.

    Raises:
        ModelError: the model has other inputs, or is too small.
    """
    lengths = {tensor.name: tensor.shape[1] for tensor in getattr(model, "inputs", None) or ()}
    if set(lengths) != {"source", "target"}:
        raise ModelError(
            f"the data 'reversed_pairs' are for gnmt, but {model.name!r} takes "
            f"{', '.join(lengths) or 'nothing declared'}; use other data"
        )
    try:
        pairs = reversed_pairs(count, model.output_shape[-1], lengths["source"], lengths["target"], seed)
    except ValueError as error:
        raise ModelError(f"the data 'reversed_pairs' don't fit {model.name!r}: {error}") from error
    return {"source": pairs.source, "target": pairs.target}, pairs.labels, pairs.weights


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


def sentences(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns tokens with some padding; the labels are the tokens themselves, or the class of the first one.

    If a model takes a permutation, only the tokens to be predicted count.
    """
    inputs = {tensor.name: tensor for tensor in fit.declared(model, "inputs")}
    if set(inputs) - {"permutation"} != {"tokens", "segments", "present"}:
        raise ModelError(
            f"the data 'sentences' are for bert and xlnet, but {model.name!r} takes "
            f"{', '.join(inputs) or 'nothing declared'}; use other data"
        )
    draw = np.random.default_rng(seed)
    count, sequence = _POOL_BATCHES * batch_size, inputs["tokens"].shape[1]
    kinds = model.get_layer("embedding").vocabulary
    tokens = draw.integers(0, kinds, (count, sequence), dtype="int32")
    lengths = draw.integers(math.ceil(sequence / 2), sequence + 1, (count, 1))
    present = (np.arange(sequence) < lengths).astype("int32")
    x = {"tokens": tokens, "segments": np.zeros_like(tokens), "present": present}
    y = tokens if len(model.output_shape) == 3 else tokens[:, 0] % model.output_shape[-1]
    if "permutation" not in inputs:
        return pooled(x, y, None, batch_size, seed)
    x["permutation"] = predicted_tokens.permutation(
        present == 0, order.seeds_of(tf.constant(0, tf.int64), seed)
    ).numpy()
    return pooled(x, y, (x["permutation"] > 0).astype("float32"), batch_size, seed)


def pairs(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns sentences, and the same backwards as their translation."""
    return pooled(*reversed_pairs_for(model, _POOL_BATCHES * batch_size, seed), batch_size, seed)
