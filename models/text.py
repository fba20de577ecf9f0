"""Byte-level text that every machine has: the source of Python's standard library."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import pathlib
import sysconfig

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from dapple_tf.models.sources import untuned

Bytes = NDArray[np.uint8]

_logger = logging.getLogger(__name__)

# Installed packages, tests, and two packages of generated tables that are hardly source text.
_LEFT_OUT_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "encodings", "pydoc_data"}
)
_LEFT_OUT_PREFIX = "_sysconfigdata"  # Generated when Python is built, different on every machine.
_END_OF_FILE = b"\0"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, each file followed by a zero byte.

    Attributes:
        train: uint8 [bytes].
        held_out: uint8 [bytes], of files that aren't in ``train``.
    """

    train: Bytes
    held_out: Bytes


def is_held_out(name: str, fraction: float) -> bool:
    """Returns whether a file is held out, by its name only: the same on every machine and in every run."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def source_files(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the ``*.py`` files under ``root``, sorted, without tests, tables and installed packages."""
    files = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if not _LEFT_OUT_FOLDERS.intersection(folders) and not path.name.startswith(_LEFT_OUT_PREFIX):
            files.append(path)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def standard_library(held_out_fraction: float = 0.05, root: pathlib.Path | None = None) -> Corpus:
    """Reads the standard library of the running Python (about 10 MB).

    Args:
        held_out_fraction: Expected fraction of the files that are held out.
        root: Another folder to read.

    Raises:
        ValueError: The fraction isn't between 0 and 1, or one of the two parts would be empty.
    """
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction is {held_out_fraction}; need 0 < fraction < 1")
    root = root or pathlib.Path(sysconfig.get_paths()["stdlib"])
    train, held_out = bytearray(), bytearray()
    for path in source_files(root):
        part = held_out if is_held_out(path.relative_to(root).as_posix(), held_out_fraction) else train
        part += path.read_bytes() + _END_OF_FILE
    if not train or not held_out:
        raise ValueError(f"{root}: {len(train)} bytes to train on and {len(held_out)} held out; need both")
    _logger.info("%s: %d bytes to train on, %d held out", root, len(train), len(held_out))
    return Corpus(np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(held_out), np.uint8))


def windows(
    text: Bytes, sequence: int, batch_size: int, *, seed: int | None = None, repeat: bool = False
) -> tf.data.Dataset:
    """Returns consecutive windows of ``text`` as batches (x, y) of int32 [batch, sequence]; y is x one byte later.

    Args:
        text: uint8 [bytes].
        sequence: Bytes per window.
        batch_size: Windows per batch; the last batch is smaller, unless ``repeat``.
        seed: Seed that shuffles the windows, anew in each pass over the data; the same seed (and the same global seed
            of TensorFlow) gives the same batches. ``None`` keeps them in order.
        repeat: Whether to pass over the data again and again without end, in full batches only.

    Raises:
        ValueError: The text is too short for one window, or for one batch when ``repeat`` is set.
    """
    count = (len(text) - 1) // sequence
    needed = batch_size if repeat else 1
    if count < needed:
        raise ValueError(f"{len(text)} bytes make {max(count, 0)} windows of {sequence} + 1 bytes; need {needed}")
    # Each row also holds its window's last target: neighbouring rows share one byte.
    rows = np.lib.stride_tricks.sliding_window_view(text, sequence + 1)[::sequence]
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    if seed is not None:
        dataset = dataset.shuffle(count, seed=seed, reshuffle_each_iteration=True)
    if repeat:
        dataset = dataset.repeat()
    dataset = dataset.batch(batch_size, drop_remainder=repeat)
    return untuned(dataset.map(_inputs_and_targets, num_parallel_calls=1).prefetch(2))


def _inputs_and_targets(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    rows = tf.cast(rows, tf.int32)
    return rows[:, :-1], rows[:, 1:]


def unigram_bits_per_byte(train: Bytes, held_out: Bytes) -> float:
    """Returns the bits per byte of ``held_out`` under the byte frequencies of ``train`` (each count plus one)."""
    counts = np.bincount(train, minlength=256) + 1
    bits = -np.log2(counts / counts.sum())
    return float(bits[held_out].mean())


def bits_per_byte(loss: float) -> float:
    """Converts a mean cross-entropy from nats, as reported by Keras, to bits."""
    return loss / math.log(2)
