"""Small samples of every kind, made here, so that nothing has to be downloaded."""

from __future__ import annotations

import importlib
import inspect
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.models.readers.cache import kept

_PYTHON = f"{sys.version_info[0]}_{sys.version_info[1]}_{sys.version_info[2]}_1"
"""Version in names of folders: samples taken from Python differ between versions."""

_CLASSES = 10
_IMAGES = {"train": 32, "val": 8}
_SIDE = 48


def images() -> pathlib.Path:
    """Makes a folder of JPEG images in 10 classes: each a pattern of waves of its own, shifted, in noise."""
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
    """Makes the same images as TFRecord files."""
    from dapple_tf.models.readers import records_writer  # it reads folders of images, and these are some

    def make(folder: pathlib.Path) -> None:
        source = images()
        records_writer.write(source / "train", folder, "train", shards=4, seed=0)
        records_writer.write(source / "val", folder, "validation", shards=2, seed=None)

    return kept("records_of_images_1", make)


_PAIRS = {"train": 2000, "valid": 200}


def pairs() -> tuple[pathlib.Path, ...]:
    """Makes sums and their results: two files to train on, and two to evaluate with."""
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


def text() -> pathlib.Path:
    """Makes a file of English text: the reference of the Python language, as shown by Python's ``help``."""
    return kept(f"text_{_PYTHON}", _write_text) / "reference.txt"


def tokens() -> pathlib.Path:
    """Makes a file of that text's bytes as 16-bit numbers."""

    def make(folder: pathlib.Path) -> None:
        np.frombuffer(text().read_bytes(), "uint8").astype("<u2").tofile(folder / "reference.bin")

    return kept(f"tokens_{_PYTHON}", make) / "reference.bin"


def _write_text(folder: pathlib.Path) -> None:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    (folder / "reference.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")


# fmt: off
_MODULES = (
    "argparse", "bisect", "calendar", "collections", "configparser", "copy", "csv", "datetime", "decimal", "difflib",
    "email.utils", "fractions", "functools", "gettext", "glob", "heapq", "html", "inspect", "io", "ipaddress",
    "itertools", "json", "keyword", "linecache", "locale", "logging", "math", "mimetypes", "numbers", "operator",
    "os", "os.path", "pathlib", "platform", "pprint", "queue", "random", "re", "sched", "shlex", "shutil", "socket",
    "statistics", "string", "struct", "subprocess", "tempfile", "textwrap", "threading", "timeit", "tokenize",
    "traceback", "unicodedata", "urllib.parse", "uuid", "warnings", "weakref", "zipfile",
)
# fmt: on
_HELD_OUT = 0.1


def questions() -> tuple[pathlib.Path, pathlib.Path]:
    """Makes questions on docstrings of Python's library, in SQuAD's format: to train on, and to evaluate with.

    "What does textwrap.dedent do?" is answered by the first sentence of its docstring. A third of the questions are
    about something else than the text, and so have no answer.
    """
    folder = kept(f"questions_{_PYTHON}", _write_questions)
    return folder / "train.json", folder / "valid.json"


def _write_questions(folder: pathlib.Path) -> None:
    documented = [entry for name in _MODULES for entry in _docstrings(name)]
    draw = np.random.default_rng(0)
    articles: dict[str, list[Any]] = {"train": [], "valid": []}
    for number, (name, context, answer) in enumerate(documented):
        other = documented[int(draw.integers(len(documented)))][0]
        unanswered = number % 3 == 2 and other != name
        asked: dict[str, Any] = {
            "id": str(number),
            "question": f"What does {other if unanswered else name} do?",
            "is_impossible": unanswered,
            "answers": [] if unanswered else [{"text": answer, "answer_start": context.index(answer)}],
        }
        part = "valid" if draw.random() < _HELD_OUT else "train"
        articles[part].append({"title": name, "paragraphs": [{"context": context, "qas": [asked]}]})
    for part, data in articles.items():
        written = json.dumps({"version": "v2.0", "data": data}, indent=1)
        (folder / f"{part}.json").write_text(written, encoding="utf-8")


def _docstrings(module: str) -> list[tuple[str, str, str]]:
    """Returns names of a module's functions and classes, their docstrings and the first sentences of these."""
    documented = []
    for name, value in sorted(vars(importlib.import_module(module)).items()):
        if name.startswith("_") or not callable(value) or getattr(value, "__module__", None) != module:
            continue
        context = " ".join((inspect.getdoc(value) or "").split())
        answer = context.partition(". ")[0].rstrip(".")
        if 10 < len(answer) < len(context):
            documented.append((f"{module}.{name}", context, answer))
    return documented


FOLDERS: Mapping[str, Callable[[], pathlib.Path]] = {
    "images": images,
    "tfrecords": records,
    "text": lambda: text().parent,
    "tokens": lambda: tokens().parent,
    "squad": lambda: questions()[0].parent,
    "pairs": lambda: pairs()[0].parent,
}
"""Kind of a reader -> function that makes its sample and returns the folder."""
