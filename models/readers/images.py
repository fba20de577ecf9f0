"""Folders of images, as ImageNet's: ``train/<class>/*.jpeg`` and ``val/<class>/*.jpeg``.

Classes are numbered in the order of their folders' names. Without a folder ``train`` the folder itself has the classes.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, samples
from dapple_tf.models.readers.cache import digest_of_times
from dapple_tf.models.readers.image_cache import Image, images_of
from dapple_tf.models.readers.options import Request
from dapple_tf.models.readers.order import Samples, by_number, evaluation_batches, parts, training_batches
from dapple_tf.models.readers.pixels import SUFFIXES, ImageOptions, Shape, checked, evaluation_image, training_image
from dapple_tf.models.sources import DataSource, ModelError

VALIDATION = ("val", "validation")
"""Names that the folder of images to evaluate on may have."""


@dataclasses.dataclass(frozen=True)
class Folder:
    """Images and their classes.

    Attributes:
        paths: paths of the images.
        labels: int32, label of each image.
        classes: names of the classes' folders.
    """

    paths: np.ndarray
    labels: np.ndarray
    classes: tuple[str, ...]

    def part(self, numbers: np.ndarray) -> Folder:
        """Returns some of the images."""
        return Folder(self.paths[numbers], self.labels[numbers], self.classes)


def open_images(request: Request) -> DataSource:
    """Returns the data in a folder of images.

    Raises:
        ModelError: there are none, or the folder isn't laid out like ImageNet.
    """
    options = request.options(ImageOptions)
    if len(request.paths) > 1:
        raise ModelError(f"{request.text}: give one folder, not {len(request.paths)}")
    root = request.existing(request.paths[0], folder=True) if request.paths else samples.images()
    train, *rest = folders(root, request.text)
    held_out = rest[0] if rest else None
    if not rest and options.held_out:
        kept, left = parts(len(train.paths), options.held_out)
        train, held_out = train.part(kept), train.part(left)

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        shape = image_shape(request.text, len(train.classes), model)

        def image(data: tf.Tensor, draw: tf.Tensor) -> tf.Tensor:
            return training_image(data, shape, options, draw, seed)

        return training_batches(_samples(train, image, options, shape), batch_size, seed)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        assert held_out is not None
        shape = image_shape(request.text, len(train.classes), model)

        def image(data: tf.Tensor, draw: tf.Tensor) -> tf.Tensor:
            return evaluation_image(data, shape, options)

        return evaluation_batches(_samples(held_out, image, options, shape), batch_size)

    about = f"{len(train.paths)} images of {len(train.classes)} classes in {root}"
    return DataSource(request.text, about, batches, None if held_out is None else evaluation, in_files=True)


def folders(root: pathlib.Path, text: str) -> list[Folder]:
    """Returns the images to train on, and those to evaluate on if there are any.

    Raises:
        ModelError: there are no images, or they aren't in folders of classes. The error begins with ``text``.
    """
    if not (root / "train").is_dir():
        return [listed(root, text)]
    train = listed(root / "train", text)
    others = [root / name for name in VALIDATION if (root / name).is_dir()]
    return [train, *(listed(other, text, train.classes) for other in others[:1])]


def listed(root: pathlib.Path, text: str, classes: tuple[str, ...] | None = None) -> Folder:
    """Returns the images in the subfolders of a folder, in the order of their names.

    Args:
        root: the folder.
        text: beginning of errors.
        classes: allowed subfolders; by default all.

    Raises:
        ModelError: there are no images, a subfolder has none, or one isn't a class.
    """
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise ModelError(f"{text}: {root} has no folders; put the images of each class into a folder of its own there")
    names = folders if classes is None else classes
    if unknown := set(folders).difference(names):
        raise ModelError(f"{text}: {root / min(unknown)} is no class: train has no folder {min(unknown)}")
    paths: list[str] = []
    labels: list[int] = []
    for folder in folders:
        files = [e.path for e in os.scandir(root / folder) if pathlib.PurePath(e.name).suffix.lower() in SUFFIXES]
        if not files:
            raise ModelError(
                f"{text}: {root / folder} has no images ({', '.join(sorted(SUFFIXES))}); add some, or remove the folder"
            )
        paths += sorted(files)
        labels += [names.index(folder)] * len(files)
    return Folder(np.array(paths), np.array(labels, "int32"), tuple(names))


def image_shape(text: str, classes: int, model: keras.Model) -> Shape:
    """Returns height, width and channels of a model's images.

    Raises:
        ModelError: the model doesn't take images, or has fewer classes.
    """
    (_, height, width, channels), (_, known) = fit.shapes(text, model, 4, 2)
    if channels not in (1, 3):
        raise ModelError(f"{text}: {model.name!r} takes images of {channels} channels; images from files have 1 or 3")
    fit.check_classes(text, classes, known, model)
    return height, width, channels


def _samples(folder: Folder, image: Image, options: ImageOptions, shape: Shape) -> Samples:
    paths, labels = tf.constant(folder.paths), tf.constant(folder.labels)

    def read(draw: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return draw, checked(tf.io.read_file(paths[index]), paths[index]), labels[index]

    encoded = by_number(len(folder.paths), read)
    return images_of(encoded, image, options, shape, lambda: digest_of_times(map(pathlib.Path, folder.paths)))
