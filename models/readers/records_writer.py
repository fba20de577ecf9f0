"""Writes folders of images as TFRecord files that `models.readers.tfrecords` reads."""

from __future__ import annotations

import pathlib

import numpy as np
import tensorflow as tf

from dapple_tf.models.readers.images import Folder, listed

FIRST_LABEL = 1
"""The label of the first class, as in ImageNet's records."""


def write(
    images: pathlib.Path,
    folder: pathlib.Path,
    part: str,
    *,
    shards: int,
    seed: int | None,
    classes: tuple[str, ...] | None = None,
) -> Folder:
    """Writes the images of a folder with a subfolder for each class.

    Args:
        images: folder of the images.
        folder: folder to write to.
        part: start of the files' names: ``train`` or ``validation``.
        shards: number of files.
        seed: seed that shuffles the images; None keeps the order of their names.
        classes: allowed subfolders; by default all.

    Returns:
        The written images.

    Raises:
        ModelError: there are no images.
        OSError: a file can't be read or written.
    """
    listing = listed(images, str(images), classes)
    order = np.arange(len(listing.paths))
    if seed is not None:
        np.random.default_rng(seed).shuffle(order)
    for shard, numbers in enumerate(np.array_split(order, shards)):
        with tf.io.TFRecordWriter(str(folder / f"{part}-{shard:05}-of-{shards:05}")) as writer:
            for number in numbers:
                label = int(listing.labels[number])
                path = pathlib.Path(listing.paths[number])
                example = _example(path, label + FIRST_LABEL, listing.classes[label])
                writer.write(example.SerializeToString(deterministic=True))
    return listing


def _example(path: pathlib.Path, label: int, name: str) -> tf.train.Example:
    def text(value: bytes) -> tf.train.Feature:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    features = {
        "image/encoded": text(path.read_bytes()),
        "image/class/label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
        "image/class/synset": text(name.encode()),
        "image/filename": text(path.name.encode()),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))
