"""Images: folders laid out as ImageNet's, and CIFAR.

A folder has ``train/<class>/*.jpeg`` and ``val/<class>/*.jpeg``, or the classes' folders themselves. Classes are
numbered in the order of their folders' names.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, order, samples
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError

VALIDATION = ("val", "validation")
"""Allowed names of the folder of images to evaluate on."""

_CENTRE = 0.875  # 224 of 256, as images of ImageNet are evaluated.
_PADDING = 4  # Around images of CIFAR, as in the ResNet paper, section 4.2.
_FIRST_BYTES = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM")
_SCALES = {
    "imagenet": ([123.675, 116.28, 103.53], [58.395, 57.12, 57.375]),  # mean and deviation of red, green and blue
    "unit": ([0.0], [255.0]),
    "signed": ([127.5], [127.5]),
    "bytes": ([0.0], [1.0]),
}

Shape = tuple[int, int, int]
"""Height, width and channels."""

Window = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
"""An image's shape -> position and size of a crop, int32 [2] each."""

IMAGE_OPTIONS = {"augment": True, "scale": tuple(_SCALES)}
"""Options of images: whether training crops and mirrors them at random, and the range of pixels."""

Listing = tuple[np.ndarray, np.ndarray]
"""Paths of images, in order, and their labels, int32."""


def open_images(request: Request) -> DataSource:
    """Returns the data in a folder of images.

    Raises:
        ModelError: there are none, or the folder isn't laid out like ImageNet.
    """
    options = request.options(**IMAGE_OPTIONS, held_out=0.0)
    root = request.folder(samples.images)
    classes, parts = listings(root, request.text)

    def samples_for(model: keras.Model, listing: Listing, seed: int | None) -> order.Samples:
        shape = image_shape(request.text, model, len(classes))
        paths, labels = map(tf.constant, listing)

        def read(draw: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            data = checked(tf.io.read_file(paths[number]), paths[number])
            return model_input(data, shape, options, draw, seed), labels[number]

        return order.Samples(len(paths), read)

    about = f"{len(parts[0][0])} images of {len(classes)} classes in {root}"
    return order.source(request.text, about, parts, samples_for, held_out=options.held_out, in_files=True)


def listings(root: pathlib.Path, text: str) -> tuple[Sequence[str], list[Listing]]:
    """Returns the classes' names, the images to train on, and the images to evaluate on if there are any.

    Raises:
        ModelError: there are no images, or they aren't in folders of classes. The error begins with ``text``.
    """
    folders = [root / "train", *(root / name for name in VALIDATION if (root / name).is_dir())][:2]
    if not folders[0].is_dir():
        folders = [root]
    classes: Sequence[str] = ()
    made: list[Listing] = []
    for folder in folders:
        try:
            found = keras.utils.image_dataset_from_directory(folder, batch_size=None, shuffle=False, verbose=False)
        except ValueError as error:
            raise ModelError(
                f"{text}: {folder} has no images in folders ({error}); put the images of each class into a folder there"
            ) from error
        classes = classes or found.class_names
        if unknown := set(found.class_names).difference(classes):
            raise ModelError(f"{text}: {folder / min(unknown)} is no class: train has no folder {min(unknown)}")
        numbers = {name: index for index, name in enumerate(classes)}
        labels = [numbers[pathlib.Path(path).relative_to(folder).parts[0]] for path in found.file_paths]
        made.append((np.array(found.file_paths), np.array(labels, "int32")))
    return classes, made


def open_cifar(request: Request) -> DataSource:
    """Returns CIFAR-10 or CIFAR-100, by ``keras.datasets``, which keeps the file in its own cache.

    Raises:
        ModelError: they can't be loaded, or a path was given.
    """
    options = request.options(**IMAGE_OPTIONS)
    if request.paths:
        raise ModelError(f"{request.text}: {request.kind} takes no path; keras.datasets has a folder of its own")
    try:
        parts = getattr(keras.datasets, request.kind).load_data()
    except Exception as error:  # Keras raises Exception itself where it can't download.
        raise ModelError(f"{request.text}: keras.datasets.{request.kind} can't be loaded: {error}") from error
    classes = int(parts[0][1].max()) + 1

    def samples_for(model: keras.Model, part: Listing, seed: int | None) -> order.Samples:
        shape = image_shape(request.text, model, classes)
        images, labels = tf.constant(part[0]), tf.constant(part[1][:, 0], tf.int32)

        def read(draw: tf.Tensor, number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            image = images[number]
            if options.augment and seed is not None:
                seeds = order.seeds_of(draw, seed)
                around = [[_PADDING] * 2, [_PADDING] * 2, [0, 0]]
                image = tf.image.stateless_random_crop(tf.pad(image, around), images.shape[1:], seeds)
                image = tf.image.stateless_random_flip_left_right(image, seeds + 1)
            return _scaled(image, shape, options), labels[number]

        return order.Samples(len(images), read)

    return order.source(request.text, f"{len(parts[0][0])} images of {classes} classes", parts, samples_for)


def image_shape(text: str, model: keras.Model, classes: int) -> Shape:
    """Returns height, width and channels of a model's images.

    Raises:
        ModelError: the model doesn't take images, or has fewer classes.
    """
    (_, height, width, channels), (_, known) = fit.shapes(text, model, 4, 2)
    if channels not in (1, 3):
        raise ModelError(f"{text}: {model.name!r} takes images of {channels} channels; images from files have 1 or 3")
    if classes > known:
        raise ModelError(
            f"{text}: the data have {classes} classes, but {model.name!r} tells {known} apart; build the model with "
            f"classes={classes}, or use other data"
        )
    return height, width, channels


def checked(data: tf.Tensor, *where: tf.Tensor | str) -> tf.Tensor:
    """Returns the bytes of an image if they begin like one; raises an error that names their source otherwise."""
    known = tf.reduce_any([tf.strings.substr(data, 0, len(first)) == first for first in _FIRST_BYTES])
    with tf.control_dependencies([tf.debugging.Assert(known, ["not a JPEG, PNG, GIF or BMP image:", *where])]):
        return tf.identity(data)


def model_input(
    data: tf.Tensor, shape: Shape, options: SimpleNamespace, draw: tf.Tensor, seed: int | None
) -> tf.Tensor:
    """Returns an encoded image as a model's input: float32 of the shape.

    In training that is a random crop (8% to 100% of the area, sides 0.75 to 1.33), half of them mirrored; without a
    seed, or augmentation, the centre, 7/8 of the shorter side.
    """
    seeds = order.seeds_of(draw, seed)

    def random_window(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        start, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            size, tf.zeros([1, 0, 4]), seeds, 0.0, area_range=(0.08, 1.0), use_image_if_no_bounding_boxes=True
        )
        return start[:2], extent[:2]

    def centre(size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        sides, wanted = tf.cast(size[:2], tf.float32), tf.constant(shape[:2], tf.float32)
        extent = tf.maximum(tf.cast(tf.round(_CENTRE * tf.reduce_min(sides / wanted) * wanted), tf.int32), 1)
        return (size[:2] - extent) // 2, extent

    if seed is None or not options.augment:
        return _scaled(_crop(data, shape[2], centre), shape, options)
    image = _crop(data, shape[2], random_window)
    return _scaled(tf.image.stateless_random_flip_left_right(image, seeds + 1), shape, options)


def _crop(data: tf.Tensor, channels: int, window: Window) -> tf.Tensor:
    """Returns part of an encoded image; of a JPEG, only that is decoded."""

    def of_jpeg() -> tf.Tensor:
        start, extent = window(tf.io.extract_jpeg_shape(data))
        return tf.image.decode_and_crop_jpeg(data, tf.concat([start, extent], 0), channels=channels)

    def of_others() -> tf.Tensor:
        image = tf.io.decode_image(data, channels=channels, expand_animations=False)
        start, extent = window(tf.shape(image))
        return image[start[0] : start[0] + extent[0], start[1] : start[1] + extent[1]]

    return tf.ensure_shape(tf.cond(tf.io.is_jpeg(data), of_jpeg, of_others), [None, None, channels])


def _scaled(image: tf.Tensor, shape: Shape, options: SimpleNamespace) -> tf.Tensor:
    """Returns an image of a model's size and range of pixels."""
    image = tf.image.resize(tf.cast(image, tf.float32), shape[:2], method="bilinear", antialias=True)
    mean, deviation = (np.array(values, "float32") for values in _SCALES[options.scale])
    if shape[2] == 1:
        mean, deviation = mean.mean(), deviation.mean()
    return (tf.ensure_shape(image, shape) - mean) / deviation
