"""Images decoded from a reader's files, or from a cache: encoded in memory, or decoded in a file."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from dapple_tf.models.readers.cache import digest, kept
from dapple_tf.models.readers.files import mapped
from dapple_tf.models.readers.order import Samples, by_number, in_parallel, plain
from dapple_tf.models.readers.pixels import ImageOptions, Shape, stored_image, stored_shape

_VERSION = 1

Image = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
"""(bytes of an image or its pixels, number of the draw) -> the model's input."""


def images_of(samples: Samples, image: Image, options: ImageOptions, shape: Shape, key: Callable[[], str]) -> Samples:
    """Returns decoded images with labels.

    Args:
        samples: samples ``(draw, bytes, label)``.
        image: decodes an image.
        options: options, which say how images are cached.
        shape: shape of the model's images.
        key: identifies the files' contents, and the part of them that is used.
    """
    if options.cache == "none":

        def read(numbers: tf.data.Dataset) -> tf.data.Dataset:
            return in_parallel(samples.read(numbers), lambda draw, data, label: (image(data, draw), label))

        return Samples(samples.count, read)
    numbers = tf.data.Dataset.range(samples.count).map(plain(lambda number: (number, number)))
    everything = samples.read(numbers)
    if options.cache == "memory":
        rows = list(everything.as_numpy_iterator())
        data = tf.constant(np.array([encoded for _, encoded, _ in rows], object))
        labels = tf.constant([label for *_, label in rows], tf.int32)
    else:
        data, labels = _kept_pixels(everything, shape, key())
    return by_number(samples.count, lambda draw, index: (image(data[index], draw), labels[index]))


def _kept_pixels(everything: tf.data.Dataset, shape: Shape, key: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns pixels uint8 [images, height, width, channels], mapped from a file, and labels int32 [images]."""

    def make(folder: pathlib.Path) -> None:
        decoded = in_parallel(everything, lambda draw, data, label: (stored_image(data, shape), label))
        labels = []
        with (folder / "pixels.bin").open("wb") as file:
            for pixels, label in decoded.prefetch(tf.data.AUTOTUNE).as_numpy_iterator():
                file.write(pixels.tobytes())
                labels.append(label)
        np.save(folder / "labels.npy", np.array(labels, "int32"))

    folder = kept(f"pixels_{digest([_VERSION, key, shape])}", make)
    pixels = tf.reshape(mapped(folder / "pixels.bin", np.dtype("uint8")), [-1, *stored_shape(shape)])
    return pixels, tf.constant(np.load(folder / "labels.npy", allow_pickle=False))
