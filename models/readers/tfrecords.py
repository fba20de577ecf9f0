"""TFRecord files of images, as ImageNet's: ``train-00000-of-01024`` and ``validation-00000-of-00128``.

Records are ``tf.train.Example`` with ``image/encoded`` (bytes) and ``image/class/label`` (int64). Their positions
are found once and cached, so that records can be read in any order.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import mmap
import os
import pathlib
import re
import struct
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from dapple_tf.models.readers import fit, samples
from dapple_tf.models.readers.cache import digest, digest_of_times, kept
from dapple_tf.models.readers.image_cache import Image, images_of
from dapple_tf.models.readers.images import image_shape
from dapple_tf.models.readers.options import Request
from dapple_tf.models.readers.order import (
    Samples,
    chosen,
    evaluation_batches,
    in_parallel,
    parts,
    plain,
    training_batches,
)
from dapple_tf.models.readers.pixels import ImageOptions, Shape, checked, evaluation_image, training_image
from dapple_tf.models.sources import DataSource, ModelError

_SHARD = re.compile(r"(?P<part>[\w.]+)-(?P<number>\d+)-of-(?P<count>\d+)(\.\w+)?")
_TRAIN, _VALIDATION = "train", ("validation", "val")
FEATURES = {
    "image/encoded": tf.io.FixedLenFeature([], tf.string),
    "image/class/label": tf.io.FixedLenFeature([], tf.int64),
}
"""Features of a record."""

_AROUND = 16  # Bytes of a record that aren't data: its length, and two checksums.
_VERSION = 1
_THREADS = 8
_BUFFER = 2**18


@dataclasses.dataclass(frozen=True)
class RecordOptions(ImageOptions):
    """Options of TFRecord files: those of images, and one more.

    Attributes:
        first_label: the number of the first class: 1 in ImageNet's records.
    """

    first_label: int = 1


@dataclasses.dataclass(frozen=True)
class Records:
    """Positions of records.

    Attributes:
        paths: paths of files.
        files: int32, for each record the number of its file.
        offsets: int64, its position there.
    """

    paths: tuple[pathlib.Path, ...]
    files: np.ndarray
    offsets: np.ndarray

    def part(self, numbers: np.ndarray) -> Records:
        """Returns some of the records."""
        return Records(self.paths, self.files[numbers], self.offsets[numbers])


def open_records(request: Request) -> DataSource:
    """Returns the data in a folder of TFRecord files.

    Raises:
        ModelError: there are none, some are missing, or they have another format.
    """
    options = request.options(RecordOptions)
    if len(request.paths) > 1:
        raise ModelError(f"{request.text}: give one folder, not {len(request.paths)}")
    root = request.existing(request.paths[0], folder=True) if request.paths else samples.records()
    files = shards(root, request.text)
    if _TRAIN not in files:
        raise ModelError(
            f"{request.text}: {root} has no files {_TRAIN}-00000-of-00001 and so on; "
            f"python -m dapple_tf.tools.make_data writes them from a folder of images"
        )
    train = indexed(files[_TRAIN], request.text)
    held_out = None
    if validation_parts := [name for name in _VALIDATION if name in files]:
        held_out = indexed(files[validation_parts[0]], request.text)
    elif options.held_out:
        kept_ones, left = parts(len(train.files), options.held_out)
        train, held_out = train.part(kept_ones), train.part(left)

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        shape, classes = _checked_shape(model)

        def image(data: tf.Tensor, draw: tf.Tensor) -> tf.Tensor:
            return training_image(data, shape, options, draw, seed)

        return training_batches(_samples(train, image, options, shape, classes), batch_size, seed)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        assert held_out is not None
        shape, classes = _checked_shape(model)

        def image(data: tf.Tensor, draw: tf.Tensor) -> tf.Tensor:
            return evaluation_image(data, shape, options)

        return evaluation_batches(_samples(held_out, image, options, shape, classes), batch_size)

    def _checked_shape(model: keras.Model) -> tuple[Shape, int]:
        shape = image_shape(request.text, 1, model)
        classes = fit.shapes(request.text, model, 4, 2)[1][1]
        for records in (train, *([held_out] if held_out else [])):
            _check_first(records, options.first_label, classes, request.text)
        return shape, classes

    about = f"{len(train.files)} images in {len(train.paths)} TFRecord files in {root}"
    return DataSource(request.text, about, batches, None if held_out is None else evaluation, in_files=True)


def shards(root: pathlib.Path, text: str) -> dict[str, tuple[pathlib.Path, ...]]:
    """Returns the files of each part, in order.

    Raises:
        ModelError: some are missing.
    """
    paths: dict[str, dict[int, pathlib.Path]] = {}
    counts: dict[str, int] = {}
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if (match := _SHARD.fullmatch(entry.name)) and entry.is_file():
            part, number, count = match["part"], int(match["number"]), int(match["count"])
            paths.setdefault(part, {})[number] = pathlib.Path(entry.path)
            if counts.setdefault(part, count) != count:
                raise ModelError(f"{text}: {entry.path} is one of {count} files, but others are of {counts[part]}")
    for part, files in paths.items():
        if len(files) != counts[part]:
            missing = next(number for number in range(counts[part] + 1) if number not in files)
            raise ModelError(
                f"{text}: {root} has {len(files)} of {counts[part]} files {part}-...; number {missing} is missing"
            )
    return {part: tuple(files[number] for number in sorted(files)) for part, files in paths.items()}


def indexed(paths: Sequence[pathlib.Path], text: str) -> Records:
    """Finds the positions of files' records; cached.

    Raises:
        ModelError: a file isn't TFRecord, or is cut off; or there are no records.
    """

    def make(folder: pathlib.Path) -> None:
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            offsets = list(pool.map(lambda path: _offsets(path, text), paths))
        files = np.repeat(np.arange(len(paths), dtype="int32"), [len(starts) for starts in offsets])
        np.savez(folder / "index.npz", files=files, offsets=np.concatenate(offsets))

    folder = kept(f"records_{digest([_VERSION, digest_of_times(paths)])}", make)
    with np.load(folder / "index.npz", allow_pickle=False) as arrays:
        records = Records(tuple(paths), arrays["files"], arrays["offsets"])
    if not len(records.files):
        raise ModelError(f"{text}: there are no records in {paths[0].parent}")
    return records


def _offsets(path: pathlib.Path, text: str) -> np.ndarray:
    """Returns the positions of a file's records: int64."""
    size = path.stat().st_size
    offsets: list[int] = []
    if not size:
        return np.array(offsets, "int64")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = 0
        while start < size:
            length, check = struct.unpack("<QI", data[start : start + 12]) if start + _AROUND <= size else (0, -1)
            if check != masked_checksum(data[start : start + 8]) or start + length + _AROUND > size:
                raise ModelError(
                    f"{text}: {path} isn't an uncompressed TFRecord file, or is damaged or cut off at byte {start} of "
                    f"{size}; write or copy it again"
                )
            offsets.append(start)
            start += length + _AROUND
    return np.array(offsets, "int64")


@functools.cache
def _table() -> tuple[int, ...]:
    """Returns the table of CRC-32C (Castagnoli), for each byte."""
    entries = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


def masked_checksum(data: bytes) -> int:
    """Returns the checksum of TFRecord files: CRC-32C, rotated and added to a constant."""
    table, value = _table(), 0xFFFFFFFF
    for byte in data:
        value = value >> 8 ^ table[(value ^ byte) & 0xFF]
    value ^= 0xFFFFFFFF
    return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _check_first(records: Records, first_label: int, classes: int, text: str) -> None:
    """Checks the first record of at most 64 files.

    Raises:
        ModelError: it isn't an example of an image, or its label isn't one of the model's classes.
    """
    firsts = np.unique(records.files, return_index=True)[1]
    for number in firsts[:: -(-len(firsts) // 64)]:
        path, offset = records.paths[records.files[number]], int(records.offsets[number])
        with path.open("rb") as file:
            file.seek(offset)
            length = struct.unpack("<Q", file.read(8))[0]
            file.seek(offset + 12)
            data = file.read(length)
        try:
            features = tf.train.Example.FromString(data).features.feature
        except DecodeError as error:
            raise ModelError(f"{text}: the record at byte {offset} of {path} is no tf.train.Example") from error
        if len(features["image/encoded"].bytes_list.value) != 1:
            raise ModelError(f"{text}: the record at byte {offset} of {path} has no bytes image/encoded")
        if len(features["image/class/label"].int64_list.value) != 1:
            raise ModelError(f"{text}: the record at byte {offset} of {path} has no int64 image/class/label")
        label = features["image/class/label"].int64_list.value[0]
        if not first_label <= label < first_label + classes:
            raise ModelError(
                f"{text}: the record at byte {offset} of {path} has label {label}, but a model of {classes} classes "
                f"takes {first_label} to {first_label + classes - 1}; build it with more, or give first_label="
                f"{1 - first_label if first_label in (0, 1) else 0}"
            )


def _samples(records: Records, image: Image, options: RecordOptions, shape: Shape, classes: int) -> Samples:
    paths, files, offsets = (
        tf.constant([str(path) for path in records.paths]),
        tf.constant(records.files),
        chosen(records.offsets),
    )

    def record(draw: tf.Tensor, index: tf.Tensor) -> tf.data.Dataset:
        dataset = record_at(paths[files[index]], offsets[index])
        return dataset.map(plain(lambda data: (draw, index, data)))

    def parsed(draw: tf.Tensor, index: tf.Tensor, data: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        example = tf.io.parse_single_example(data, FEATURES)
        where = (paths[files[index]], "at byte", offsets[index])
        label = example["image/class/label"] - options.first_label
        known = tf.debugging.Assert(
            (label >= 0) & (label < classes),
            ["image/class/label", label + options.first_label, f"isn't one of {classes} classes:", *where],
        )
        with tf.control_dependencies([known]):
            label = tf.cast(label, tf.int32)
        return draw, checked(example["image/encoded"], *where), label

    encoded = Samples(len(records.files), lambda numbers: in_parallel(numbers.flat_map(plain(record)), parsed))

    def key() -> str:
        which = hashlib.sha256(records.files.tobytes() + records.offsets.tobytes()).hexdigest()
        return digest([digest_of_times(records.paths), which, options.first_label])

    return images_of(encoded, image, options, shape, key)


def record_at(path: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
    """Returns a dataset, for ``flat_map``, of the one record at a position, whose checksum is checked."""
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=tf.reshape(path, [1]),
        compression_type="",
        buffer_size=tf.constant(_BUFFER, tf.int64),
        byte_offsets=offset[None],
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).take(1)
