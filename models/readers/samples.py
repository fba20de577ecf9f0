"""Small samples of every kind, made here and kept in ``data`` of DAPPLE_CACHE: nothing has to be downloaded."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.models.sources import ModelError

_PYTHON = f"{sys.version_info[0]}_{sys.version_info[1]}_{sys.version_info[2]}_2"
"""Version in names of folders: samples taken from Python differ between versions."""

_CLASSES = 10
_IMAGES = {"train": 32, "val": 8}
_SIDE = 48


def kept(name: str, make: Callable[[pathlib.Path], Any]) -> pathlib.Path:
    """Returns a folder in the cache, which is made if it is missing: completely, or not at all.

    Args:
        name: name of the folder; another name for other contents.
        make: function that fills an empty folder.

    Raises:
        ModelError: the folder can't be written.
    """
    data = pathlib.Path(os.environ.get("DAPPLE_CACHE") or pathlib.Path.home() / ".cache" / "dapple_tf", "data")
    folder = data / name
    if folder.is_dir():
        return folder
    try:
        data.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=data) as made:
            (complete := pathlib.Path(made, name)).mkdir()
            make(complete)
            complete.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # Otherwise, another process was faster.
            raise ModelError(f"{data} can't be written ({error}); set DAPPLE_CACHE to a folder that can") from error
    return folder


def images() -> pathlib.Path:
    """Makes a folder of JPEG images in 10 classes: each a pattern of waves of its own, shifted, in noise."""

    def make(folder: pathlib.Path) -> None:
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

    return kept("images_1", make)


def pairs() -> list[tuple[pathlib.Path, ...]]:
    """Makes sums and their results: two files to train on, and two to evaluate with."""

    def make(folder: pathlib.Path) -> None:
        for part, lines in _sums().items():
            for side, texts in zip(("sums", "totals"), zip(*lines, strict=True), strict=True):
                (folder / f"{part}.{side}").write_text("\n".join(texts) + "\n", encoding="utf-8")

    folder = kept("pairs_2", make)
    return [(folder / f"{part}.sums", folder / f"{part}.totals") for part in ("train", "valid")]


def text() -> pathlib.Path:
    """Makes a file of English text: the reference of the Python language, as shown by Python's ``help``."""

    def make(folder: pathlib.Path) -> None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        (folder / "reference.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")

    return kept(f"text_{_PYTHON}", make) / "reference.txt"


def tokens() -> pathlib.Path:
    """Makes a file of that text's bytes as 16-bit numbers."""

    def make(folder: pathlib.Path) -> None:
        np.frombuffer(text().read_bytes(), "uint8").astype("<u2").tofile(folder / "reference.bin")

    return kept(f"tokens_{_PYTHON}", make) / "reference.bin"


def questions() -> tuple[pathlib.Path, pathlib.Path]:
    """Makes questions on lists of sums, in SQuAD's format: to train on, and to evaluate with.

    "3+4" is answered by "7" where the list has "3+4=7". A third of the questions have no answer.
    """

    def make(folder: pathlib.Path) -> None:
        for part, lines in _sums().items():
            paragraphs = []
            for number, (first, *others) in enumerate(zip(*[iter(lines)] * 10, strict=True)):
                context = ", ".join("=".join(line) for line in (*others, first))
                answer = {"text": first[1], "answer_start": len(context) - len(first[1])}
                asked = {"question": first[0], "answers": [answer]} if number % 3 else {"question": "0+100"}
                paragraphs.append({"context": context, "qas": [{"id": str(number), **asked}]})
            data = {"version": "v2.0", "data": [{"title": "sums", "paragraphs": paragraphs}]}
            (folder / f"{part}.json").write_text(json.dumps(data, indent=1), encoding="utf-8")

    folder = kept("questions_1", make)
    return folder / "train.json", folder / "valid.json"


def sentences() -> pathlib.Path:
    """Makes sums and totals in MNLI's format: entailment is the right one, contradiction another, neutral no number."""

    def make(folder: pathlib.Path) -> None:
        for part, lines in _sums().items():
            rows = ["sentence1\tsentence2\tgold_label"]
            for number, (asked, total) in enumerate(lines):
                second, label = [(total, "entailment"), (f"{total}0", "contradiction"), ("a", "neutral")][number % 3]
                rows.append(f"{asked}\t{second}\t{label}")
            name = "train" if part == "train" else "dev_matched"
            (folder / f"{name}.tsv").write_text("\n".join(rows), encoding="utf-8")

    return kept("sentences_1", make)


def _sums() -> dict[str, list[tuple[str, str]]]:
    """Returns the sums to train on and to evaluate with, and their totals."""
    sums = np.array([(first, second) for first in range(100) for second in range(100 - first)])
    drawn = [(f"{first}+{second}", f"{first + second}") for first, second in np.random.default_rng(0).permutation(sums)]
    return {"train": drawn[:2000], "valid": drawn[2000:2200]}
