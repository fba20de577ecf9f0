"""Reads all of some data once, and reports the first error."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import tensorflow as tf

from dapple_tf.errors import reason
from dapple_tf.models.readers import images, tfrecords
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import ModelError


def check_all(text: str) -> str:
    """Decodes every image of ``images:PATH`` or ``tfrecords:PATH``.

    Returns:
        The number of images.

    Raises:
        ModelError: the data are others, or an image can't be read: the first one's file, and why.
    """
    request = Request.parse(text)
    kinds: dict[str, Callable[[Request], tuple[int, int]]] = {"images": _images, "tfrecords": _records}
    if request.kind not in kinds or len(request.paths) != 1:
        raise ModelError(f"{text}: what can be checked is {' and '.join(f'{kind}:PATH' for kind in kinds)}")
    request.existing(request.paths[0], folder=True)
    count, classes = kinds[request.kind](request)
    return f"{count} images of {classes} classes can be read"


def _images(request: Request) -> tuple[int, int]:
    folders = images.folders(request.paths[0], request.text)
    for folder in folders:
        paths = [str(path) for path in folder.paths]

        def decode(path: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return tf.constant(0), tf.size(tf.io.decode_image(tf.io.read_file(path), expand_animations=False))

        dataset = tf.data.Dataset.from_tensor_slices(paths)
        _decode(dataset, decode, paths, request.text)
    return sum(len(folder.paths) for folder in folders), len(folders[0].classes)


def _records(request: Request) -> tuple[int, int]:
    options = request.options(tfrecords.RecordOptions)
    count, most = 0, 0
    shards = tfrecords.shards(request.paths[0], request.text)
    if not shards:
        raise ModelError(f"{request.text}: {request.paths[0]} has no files train-00000-of-00001 and so on")
    for paths in shards.values():
        for path in paths:
            dataset = tf.data.TFRecordDataset(str(path))

            def decode(data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                example = tf.io.parse_single_example(data, tfrecords.FEATURES)
                image = tf.io.decode_image(example["image/encoded"], expand_animations=False)
                return example["image/class/label"] - options.first_label, tf.size(image)

            labels = _decode(dataset, decode, path, request.text)
            count, most = count + len(labels), max(most, *labels, 0)
            if labels and min(labels) < 0:
                raise ModelError(
                    f"{request.text}: record {labels.index(min(labels))} of {path} has label "
                    f"{min(labels) + options.first_label}, but first_label is {options.first_label}; give first_label=0"
                )
    return count, most + 1


def _decode(
    dataset: tf.data.Dataset,
    decode: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    where: list[str] | pathlib.Path,
    text: str,
) -> list[int]:
    """Returns the first result of ``decode`` per element; ``where`` has the file of each, or the file of all."""
    values: list[int] = []
    decoded = dataset.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    try:
        for value, _ in decoded.as_numpy_iterator():
            values.append(int(value))
    except tf.errors.OpError as error:
        place = where[len(values)] if isinstance(where, list) else f"record {len(values)} of {where}"
        raise ModelError(f"{text}: {place} can't be read: {reason(error)}") from error
    return values
