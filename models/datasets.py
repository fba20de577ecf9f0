"""Data by name. To add some, add a `DataSource` to `DATASETS`; to add a format of files, a `Reader` to `READERS`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.measuring.example_batch import ExampleBatch
from dapple_tf.models import generated_data, text
from dapple_tf.models.readers import fit, images, order, pairs, predicted_tokens, squad, text_files, tfrecords, tokens
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError, untuned

_POOL_BATCHES = 4
"""Generated data are so many batches, which come again and again: losses fall, as they can be learnt by heart."""


def pooled(x: Any, y: Any, weights: Any, batch_size: int, seed: int) -> tf.data.Dataset:
    """Endless shuffled batches of arrays."""
    arrays = tuple(part for part in (x, y, weights) if part is not None)
    count = len(keras.tree.flatten(x)[0])
    dataset = tf.data.Dataset.from_tensor_slices(arrays)
    dataset = dataset.shuffle(count, seed=seed).repeat().batch(batch_size, drop_remainder=True)
    return untuned(dataset.prefetch(2))


def generated(length: int | None = None) -> DataSource:
    """Random numbers in the shapes that a model declares.

    Args:
        length: what axes are as long as that the model leaves open; None for one that it can be computed for.
    """

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        examples = ExampleBatch.of(model, length=length).trees(_POOL_BATCHES * batch_size)
        return pooled(*examples, batch_size, seed)

    about = "random numbers that fit the model's inputs and loss, few enough to be learnt"
    return DataSource("generated", about, batches)


def _source_text(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    return text.windows(text.standard_library().train, _sequence(model), batch_size, seed=seed, repeat=True)


def _held_out_text(model: keras.Model, batch_size: int) -> tf.data.Dataset:
    return text.windows(text.standard_library().held_out, _sequence(model), batch_size)


def _sequence(model: keras.Model) -> int:
    """Tokens per sample of a language model."""
    return fit.shapes("source_text", model, 2, 3)[0][1]


def _patterns(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Images of a pattern for each class, in noise."""
    images_shape, (_, classes) = fit.shapes("patterns", model, 4, 2)
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, classes, _POOL_BATCHES * batch_size)
    images = draw.standard_normal((len(labels), *images_shape[1:]), "float32")
    for label in np.unique(labels):  # Patterns of all thousand classes of large images would take gigabytes.
        images[labels == label] += np.random.default_rng((seed, label)).standard_normal(images_shape[1:], "float32")
    return pooled(images, labels.astype("int32"), None, batch_size, seed)


def _sentences(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    """Tokens of which some are padding; the labels are the tokens themselves, or the class of the first one.

    Of a model that takes a permutation of them, only those count that it isn't given.
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


def _reversed_pairs(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
    return pooled(*generated_data.reversed_pairs_for(model, _POOL_BATCHES * batch_size, seed), batch_size, seed)


GENERATED = generated()

_DATASETS = (
    GENERATED,
    DataSource("source_text", "bytes of Python's standard library, for language models", _source_text, _held_out_text),
    DataSource("patterns", "a pattern for each class, in noise, for models of images", _patterns),
    DataSource("sentences", "random tokens of several lengths, for bert and xlnet", _sentences),
    DataSource("reversed_pairs", "sentences, and the same backwards as their translation, for gnmt", _reversed_pairs),
)

DATASETS: Mapping[str, DataSource] = {source.name: source for source in _DATASETS}
"""Data by name."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """What reads files of one format.

    Attributes:
        kind: by which it is asked for, as in ``kind:path?option=value``; ``kind`` alone reads a small sample.
        about: what the files are, in a line.
        open: finds the files, and what is wrong with them.
    """

    kind: str
    about: str
    open: Callable[[Request], DataSource]


_READERS = (
    Reader("images", "a folder train/CLASS/*.jpeg, and val/CLASS/*.jpeg", images.open_images),
    Reader("tfrecords", "a folder of train-00000-of-01024 and so on, with images", tfrecords.open_records),
    Reader("text", "text files, or folders of *.txt, as bytes or tokens", text_files.open_text),
    Reader("tokens", "a file of tokens, *.bin or *.npy", tokens.open_tokens),
    Reader("squad", "a file of questions in SQuAD's JSON format", squad.open_squad),
    Reader("pairs", "sentences and translations: FILE,FILE line by line, or one FILE.tsv", pairs.open_pairs),
)

READERS: Mapping[str, Reader] = {reader.kind: reader for reader in _READERS}
"""Readers of files, by kind."""
