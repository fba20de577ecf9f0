"""TFRecord files of images, as ImageNet's: ``train-00000-of-01024`` and ``validation-00000-of-00128``.

Records are ``tf.train.Example`` with ``image/encoded`` (bytes) and ``image/class/label`` (int64). Each pass reads files
in another order, at most 16 at a time, and shuffles their records in chunks.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import images, order, samples
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError

_IMAGE, _LABEL = "image/encoded", "image/class/label"
_FILES = 16
"""Number of files read at a time in training."""
_CHUNK = 1024
"""Number of encoded images that are shuffled at a time; checkpoints contain two chunks, and batches read ahead."""


def open_records(request: Request) -> DataSource:
    """Returns the data in a folder of TFRecord files.

    Raises:
        ModelError: there are none, or some are missing.
    """
    options = request.options(**images.IMAGE_OPTIONS, first_label=1)
    root = request.folder(sample)
    files = shards(root, "train", request.text)
    validation = [found for part in images.VALIDATION if (found := shards(root, part, request.text))]
    if not files:
        raise ModelError(
            f"{request.text}: {root} has no files train-00000-of-00001 and so on; "
            f"python -m dapple_tf.tools.make_data writes them from a folder of images"
        )

    def decoded(model: keras.Model, records: tf.data.Dataset, batch_size: int, seed: int | None) -> tf.data.Dataset:
        shape = images.image_shape(request.text, model, 1)
        first, last = options.first_label, options.first_label + model.output_shape[-1] - 1

        def read(draw: tf.Tensor, found: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            path, (data, label) = found[0], parsed(found[1])
            message = [f"{_LABEL} isn't from {first} to {last}, but", label, "in", path, "(option first_label)"]
            with tf.control_dependencies([tf.debugging.Assert((label >= first) & (label <= last), message)]):
                label = tf.cast(label - first, tf.int32)
            return images.model_input(images.checked(data, "in", path), shape, options, draw, seed), label

        numbered = tf.data.Dataset.zip(tf.data.Dataset.counter(), records)
        return order.batched(numbered, read, batch_size, full=seed is not None)

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        def one_pass(number: tf.Tensor) -> tf.data.Dataset:
            def shuffled(*chunk: tf.Tensor) -> tuple[tf.Tensor, ...]:
                places = tf.argsort(tf.random.stateless_uniform(tf.shape(chunk[0]), order.seeds_of(number, seed)))
                return tuple(tf.gather(part, places) for part in chunk)

            draws = tf.data.Dataset.range(number * len(files), (number + 1) * len(files))
            opened = draws.map(lambda draw: tf.constant(files)[order.shuffled(draw, len(files), seed)])
            chunks = opened.interleave(records_of, cycle_length=_FILES).batch(_CHUNK)
            return chunks.map(shuffled).prefetch(1).unbatch()

        # Of `tf.data.Dataset.shuffle` within passes, TensorFlow saves no position.
        records = tf.data.Dataset.counter().flat_map(one_pass)
        return decoded(model, records, batch_size, seed)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        records = tf.data.Dataset.from_tensor_slices(validation[0]).flat_map(records_of)
        return decoded(model, records, batch_size, None)

    about = f"{len(files)} TFRecord files of images in {root}"
    return DataSource(request.text, about, batches, evaluation if validation else None, in_files=True)


def sample() -> pathlib.Path:
    """Makes the sample of images as TFRecord files."""
    return samples.kept("records_of_images_2", lambda folder: write(samples.images(), folder, shards=4))


def shards(root: pathlib.Path, part: str, text: str) -> list[str]:
    """Returns the files of a part, in order.

    Raises:
        ModelError: some are missing. The error begins with ``text``.
    """
    files = sorted(str(path) for path in root.glob(f"{part}-?????-of-?????*"))
    if files and len(files) != (count := int(pathlib.Path(files[0]).name.partition("-of-")[2][:5])):
        raise ModelError(f"{text}: {root} has {len(files)} of {count} files {part}-...; copy the missing ones")
    return files


def records_of(path: tf.Tensor) -> tf.data.Dataset:
    """Returns the records of a file, each with the file's path."""
    return tf.data.TFRecordDataset(path).map(lambda record: (path, record))


def parsed(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns an encoded image and its label; an empty string or -1 if the record has none."""
    features = {_IMAGE: tf.io.FixedLenFeature([], tf.string, ""), _LABEL: tf.io.FixedLenFeature([], tf.int64, -1)}
    example = tf.io.parse_single_example(record, features)
    return example[_IMAGE], example[_LABEL]


def write(
    root: pathlib.Path, folder: pathlib.Path, *, shards: int, seed: int = 0
) -> tuple[Sequence[str], dict[str, int]]:
    """Writes a folder of images, as `images.listings` takes it, as TFRecord files, shuffled by a seed.

    The first class has label 1, as in ImageNet's records. There are an eighth as many files to evaluate on.

    Returns:
        The classes' names, and the number of images of each part.

    Raises:
        ModelError: there are no images.
        OSError: a file can't be read or written.
    """
    classes, listings = images.listings(root, str(root))
    parts = dict(zip(("train", "validation"), listings, strict=False))
    for part, (paths, labels) in parts.items():
        count = shards if part == "train" else max(1, shards // 8)
        for shard, chosen in enumerate(np.array_split(np.random.default_rng(seed).permutation(len(paths)), count)):
            with tf.io.TFRecordWriter(str(folder / f"{part}-{shard:05}-of-{count:05}")) as writer:
                for number in chosen:
                    writer.write(_example(pathlib.Path(paths[number]), int(labels[number]) + 1))
    return classes, {part: len(paths) for part, (paths, _) in parts.items()}


def _example(path: pathlib.Path, label: int) -> bytes:
    features = {
        _IMAGE: tf.train.Feature(bytes_list=tf.train.BytesList(value=[path.read_bytes()])),
        _LABEL: tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "image/filename": tf.train.Feature(bytes_list=tf.train.BytesList(value=[path.name.encode()])),
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return example.SerializeToString(deterministic=True)
