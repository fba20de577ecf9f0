"""Small data of every kind, made here, so that nothing has to be downloaded."""

from __future__ import annotations

import pathlib

import numpy as np
import tensorflow as tf

from models.readers.cache import kept

_CLASSES = 10
_IMAGES = {"train": 32, "val": 8}
_SIDE = 48


def images() -> pathlib.Path:
    """A folder of JPEG images in 10 classes: each a pattern of waves of its own, shifted, in noise."""
    return kept("images_1", _write_images)


def _write_images(folder: pathlib.Path) -> None:
    draw = np.random.default_rng(0)
    waves = draw.uniform(0.5, 3.0, (_CLASSES, 3, 2)) * draw.choice([-1, 1], (_CLASSES, 3, 2))
    rows, columns = np.mgrid[:_SIDE, :_SIDE] * (2 * np.pi / _SIDE)
    for part, count in _IMAGES.items():
        for label in range(_CLASSES):
            place = folder / part / f"pattern_{label}"
            place.mkdir(parents=True)
            for number in range(count):
                shift = draw.uniform(0, 2 * np.pi)
                pattern = np.stack([np.sin(a * rows + b * columns + shift) for a, b in waves[label]], -1)
                pixels = 128 + 80 * pattern + draw.normal(0, 20, pattern.shape)
                data = tf.io.encode_jpeg(np.clip(pixels, 0, 255).astype("uint8"), quality=90).numpy()
                (place / f"{part}_{label}_{number:03}.jpeg").write_bytes(data)


def records() -> pathlib.Path:
    """The same images in TFRecord files."""
    from models.readers import records_writer  # it reads folders of images, and these are some

    def make(folder: pathlib.Path) -> None:
        source = images()
        records_writer.write(source / "train", folder, "train", shards=4, seed=0)
        records_writer.write(source / "val", folder, "validation", shards=2, seed=None)

    return kept("records_of_images_1", make)


_PAIRS = {"train": 2000, "valid": 200}


def pairs() -> tuple[pathlib.Path, ...]:
    """Sums, and what they come to: two files to train on, and two to evaluate with."""
    folder = kept("pairs_1", _write_pairs)
    return tuple(folder / f"{part}.{side}" for part in _PAIRS for side in ("sums", "totals"))


def _write_pairs(folder: pathlib.Path) -> None:
    draw = np.random.default_rng(0)
    sums = [(first, second) for first in range(100) for second in range(100 - first)]
    order = draw.permutation(len(sums))
    start = 0
    for part, count in _PAIRS.items():
        taken = [sums[number] for number in order[start : start + count]]
        start += count
        texts = {"sums": [f"{a}+{b}" for a, b in taken], "totals": [str(a + b) for a, b in taken]}
        for side, lines in texts.items():
            (folder / f"{part}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
