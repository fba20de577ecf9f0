"""Encoded images to models' inputs: decoded, cropped, flipped, scaled and normalised, by TensorFlow functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import tensorflow as tf

from dapple_tf.models.readers.options import check_fraction
from dapple_tf.models.readers.order import seeds_of

SUFFIXES = frozenset({".jpeg", ".jpg", ".png", ".gif", ".bmp"})
"""Suffixes of image files."""

_CENTRE = 0.875  # 224 of 256, as images of ImageNet are evaluated.
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, of red, green and blue from 0 to 1.
Shape = tuple[int, int, int]
"""Height, width and channels."""

Window = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""An image's shape -> position and size of a crop, int32 [2] each."""

_FIRST_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")


@dataclasses.dataclass(frozen=True)
class ImageOptions:
    """Options of images.

    Attributes:
        augment: train on random crops (8% to 100% of the area, sides 3:4 to 4:3), half of them mirrored; otherwise on
            the centre, as in evaluation.
        scale: range of pixels: imagenet (its mean 0, its standard deviation 1), unit (0 to 1), signed (-1 to 1), bytes.
        cache: memory keeps the encoded images in memory; file keeps decoded ones in the cache folder, 8/7 of the
            model's size, from which random crops are taken.
        held_out: fraction of the training images to evaluate on, if there are no separate ones.
    """

    augment: bool = True
    scale: Literal["imagenet", "unit", "signed", "bytes"] = "imagenet"
    cache: Literal["none", "memory", "file"] = "none"
    held_out: float = 0.0

    def __post_init__(self) -> None:
        check_fraction("held_out", self.held_out)


def checked(data: tf.Tensor, *where: tf.Tensor | str) -> tf.Tensor:
    """Returns the bytes of an image if they begin like one; raises an error that names their source otherwise."""
    known = tf.reduce_any([tf.strings.substr(data, 0, len(first)) == first for first in _FIRST_BYTES])
    check = tf.debugging.Assert(known, ["not a JPEG, PNG, GIF or BMP image:", *where])
    with tf.control_dependencies([check]):
        return tf.identity(data)


def training_image(data: tf.Tensor, shape: Shape, options: ImageOptions, draw: tf.Tensor, seed: int) -> tf.Tensor:
    """Returns a random crop, by ``draw`` and ``seed``, of an encoded image or of pixels: float32 of the shape."""
    if not options.augment:
        return evaluation_image(data, shape, options)
    seeds = seeds_of(draw, seed)

    def window(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            size,
            tf.zeros([1, 0, 4]),
            seeds,
            min_object_covered=0.0,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        return start[:2], extent[:2]

    image = tf.image.stateless_random_flip_left_right(_resized(_crop(data, shape[2], window), shape), seeds + 1)
    return _normalised(image, shape, options)


def evaluation_image(data: tf.Tensor, shape: Shape, options: ImageOptions) -> tf.Tensor:
    """Returns the centre of an encoded image, or of pixels, 7/8 of its shorter side: float32 of the shape."""
    return _normalised(_resized(_crop(data, shape[2], _centre(shape, _CENTRE)), shape), shape, options)


def stored_shape(shape: Shape) -> Shape:
    """Returns the shape of images of which the centre, 7/8, has the given shape."""
    return math.ceil(shape[0] / _CENTRE), math.ceil(shape[1] / _CENTRE), shape[2]


def stored_image(data: tf.Tensor, shape: Shape) -> tf.Tensor:
    """Returns the centre of an encoded image, with its full shorter side: uint8 of `stored_shape`."""
    stored = stored_shape(shape)
    pixels = _resized(_crop(data, stored[2], _centre(stored, 1.0)), stored)
    return tf.ensure_shape(tf.cast(tf.round(pixels), tf.uint8), stored)


def _centre(shape: Shape, part: float) -> Window:
    """Returns the centred window in a shape's proportions that fills an image, scaled by ``part``."""

    def window(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        sides, wanted = tf.cast(size[:2], tf.float32), tf.constant(shape[:2], tf.float32)
        extent = tf.maximum(tf.cast(tf.round(part * tf.reduce_min(sides / wanted) * wanted), tf.int32), 1)
        return (size[:2] - extent) // 2, extent

    return window


def _crop(data: tf.Tensor, channels: int, window: Window) -> tf.Tensor:
    """Returns part of an encoded image or of pixels, uint8 [height, width, channels]; decodes only that of a JPEG."""
    if data.dtype != tf.string:
        return _part(data, window)

    def of_jpeg() -> tf.Tensor:
        start, extent = window(tf.io.extract_jpeg_shape(data))
        return tf.image.decode_and_crop_jpeg(data, tf.concat([start, extent], 0), channels=channels)

    def of_others() -> tf.Tensor:
        return _part(tf.io.decode_image(data, channels=channels, expand_animations=False), window)

    return tf.cond(tf.io.is_jpeg(data), of_jpeg, of_others)


def _part(image: tf.Tensor, window: Window) -> tf.Tensor:
    start, extent = window(tf.shape(image))
    return image[start[0] : start[0] + extent[0], start[1] : start[1] + extent[1]]


def _resized(image: tf.Tensor, shape: Shape) -> tf.Tensor:
    image = tf.ensure_shape(image, [None, None, shape[2]])
    return tf.image.resize(image, shape[:2], method="bilinear", antialias=True)


def _normalised(image: tf.Tensor, shape: Shape, options: ImageOptions) -> tf.Tensor:
    image = tf.ensure_shape(image, shape)
    if options.scale == "bytes":
        return image
    if options.scale == "unit":
        return image / 255.0
    if options.scale == "signed":
        return image / 127.5 - 1.0
    if shape[2] == 3:
        return (image / 255.0 - np.array(_MEAN, "float32")) / np.array(_DEVIATION, "float32")
    return (image / 255.0 - np.float32(np.mean(_MEAN))) / np.float32(np.mean(_DEVIATION))
