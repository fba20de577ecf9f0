"""Converts data into the files that --dataset reads, checks data, and writes samples.

    python -m dapple_tf.tools.make_data --images=photos --output=records --shards=16
    python -m dapple_tf.tools.make_data --text=book.txt --vocabulary=8192 --output=book
    python -m dapple_tf.tools.make_data --check=images:photos
    python -m dapple_tf.tools.make_data --sample=images --output=photos

--images takes a folder of ImageNet's layout, train/CLASS/*.jpeg and val/CLASS/*.jpeg, or a folder of classes, and
writes TFRecord files for --dataset=tfrecords:records.

--text takes a text file, or a folder of *.txt, and writes tokenizer.json, train.bin and valid.bin (the end of the
text), for --dataset=tokens:book/train.bin?valid=book/valid.bin.

--check reads all of the data once, named as for --dataset, and reports the first error.

--sample writes the files that a reader without a path reads: images, tfrecords, text, tokens, squad, mnli or pairs.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from absl import flags

from dapple_tf.errors import reason
from dapple_tf.models.readers import images, samples, tfrecords, tokens, vocabulary
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import ModelError
from dapple_tf.tools import command

FLAGS = flags.FlagValues()

_SAMPLES: dict[str, Callable[[], pathlib.Path]] = {
    "images": samples.images,
    "tfrecords": tfrecords.sample,
    "text": lambda: samples.text().parent,
    "tokens": lambda: samples.tokens().parent,
    "squad": lambda: samples.questions()[0].parent,
    "mnli": samples.sentences,
    "pairs": lambda: samples.pairs()[0][0].parent,
}
"""Kind of a reader -> function that makes its sample and returns the folder."""

_IMAGES = flags.DEFINE_string("images", None, "Folder of images to write as TFRecord files.", flag_values=FLAGS)
_TEXT = flags.DEFINE_string("text", None, "Text file or folder of *.txt to write as tokens.", flag_values=FLAGS)
_CHECK = flags.DEFINE_string("check", None, "Data to read once: images:PATH or tfrecords:PATH.", flag_values=FLAGS)
_SAMPLE = flags.DEFINE_enum("sample", None, list(_SAMPLES), "Sample to write.", flag_values=FLAGS)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write to; it must be new or empty.", flag_values=FLAGS)
_SHARDS = flags.DEFINE_integer("shards", 16, "Number of TFRecord files to train on.", lower_bound=1, flag_values=FLAGS)
_SEED = flags.DEFINE_integer("seed", 0, "Seed that shuffles the images to train on.", flag_values=FLAGS)
_VOCABULARY = flags.DEFINE_integer(
    "vocabulary", 8192, "Maximum tokens of the tokenizer that is trained on the text.", lower_bound=1, flag_values=FLAGS
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "A tokenizer's JSON file, instead of training one.", flag_values=FLAGS
)
_HELD_OUT = flags.DEFINE_float(
    "held_out", 0.05, "Fraction of the text, at its end, for valid.bin.", 0.0, 0.9, flag_values=FLAGS
)


def main() -> None:
    """Runs the job that the flags describe."""
    jobs = {"--images": _IMAGES.value, "--text": _TEXT.value, "--check": _CHECK.value, "--sample": _SAMPLE.value}
    given = [f"{name}={value}" for name, value in jobs.items() if value is not None]
    command.check(len(given) == 1, f"give one of {', '.join(jobs)}" + (f", not {' and '.join(given)}" if given else ""))
    with command.blamed(given[0]):
        if _CHECK.value is not None:
            say(check_images(_CHECK.value))
            return
        folder = output_folder()
        if _SAMPLE.value is not None:
            shutil.copytree(_SAMPLES[_SAMPLE.value](), folder, dirs_exist_ok=True)
            say(f"Wrote {' and '.join(sorted(path.name for path in folder.iterdir()))} to {folder}")
        elif _IMAGES.value is not None:
            write_images(pathlib.Path(_IMAGES.value), folder)
        else:
            write_text(pathlib.Path(_TEXT.value), folder)


def output_folder() -> pathlib.Path:
    """Creates and returns the folder to write to.

    Raises:
        app.UsageError: it isn't given, or isn't empty.
    """
    command.check(_OUTPUT.value is not None, "--output isn't given; name a folder")
    folder = pathlib.Path(_OUTPUT.value)
    command.check(not folder.is_file(), f"--output={folder} is a file; name a folder")
    command.check(not folder.is_dir() or not any(folder.iterdir()), f"--output={folder} isn't empty; name another")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_images(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes TFRecord files, and ``classes.json``: the names of the classes, the first of which is label 1.

    Raises:
        ModelError: there are no images.
    """
    command.check(root.is_dir(), f"--images={root} isn't a folder")
    classes, counts = tfrecords.write(root, folder, shards=_SHARDS.value, seed=_SEED.value)
    (folder / "classes.json").write_text(json.dumps(classes, indent=1) + "\n", encoding="utf-8")
    images_of = " and ".join(f"{count} images for {part}" for part, count in counts.items())
    say(f"Wrote {images_of}, of {len(classes)} classes. Train on them with --dataset=tfrecords:{folder}")


def write_text(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes a tokenizer and the tokens of the text.

    Raises:
        ModelError: there is no text, or the tokenizer's file isn't valid.
    """
    request = Request(str(root), "text", (root,), {})
    files = tokens.text_files(request, [root])
    if _TOKENIZER.value is not None:
        tokenizer = vocabulary.load(pathlib.Path(_TOKENIZER.value), f"--tokenizer={_TOKENIZER.value}")
    else:
        lines = (line for path in files for line in request.lines(path))
        tokenizer = vocabulary.trained(lines, _VOCABULARY.value, f"--vocabulary={_VOCABULARY.value}")
    tokenizer.save(str(folder / "tokenizer.json"))
    size = vocabulary.size_of(tokenizer)
    dtype = np.dtype("uint16" if size <= 2**16 else "uint32")
    values = tokens.tokens_of(request, files, tokenizer).values.numpy().astype(dtype)
    last = len(values) - round(len(values) * _HELD_OUT.value)
    counts = []
    for name, part in (("train", values[:last]), ("valid", values[last:])):
        if len(part):
            part.tofile(folder / f"{name}.bin")
            counts.append(f"{len(part):,} tokens in {folder / name}.bin")
    options = [f"valid={folder / 'valid.bin'}"] if last < len(values) else ["held_out=0"]
    options += [] if dtype == np.dtype("uint16") else [f"dtype={dtype.name}"]
    say(
        f"Wrote {' and '.join(counts)}, of {size:,} kinds. Train a model of vocabulary {size} or more with "
        f"--dataset='tokens:{folder / 'train.bin'}?{'&'.join(options)}'"
    )


def check_images(text: str) -> str:
    """Decodes every image of ``images:PATH`` or ``tfrecords:PATH``; returns the number of images, in a sentence.

    Raises:
        ModelError: the data are others, or an image can't be read: the first one's file, and why.
    """
    request = Request.parse(text)
    command.check(request.kind in ("images", "tfrecords"), f"--check={text}: only images:PATH and tfrecords:PATH")
    root = request.folder(_SAMPLES[request.kind])
    found: list[tuple[Callable[[int], str], tf.data.Dataset]] = []
    if request.kind == "images":
        for paths, _ in images.listings(root, text)[1]:
            found.append((paths.__getitem__, tf.data.Dataset.from_tensor_slices(paths).map(tf.io.read_file)))
    else:
        for part in ("train", *images.VALIDATION):
            for path in tfrecords.shards(root, part, text):
                encoded = tfrecords.records_of(path).map(lambda _, record: tfrecords.parsed(record)[0])
                found.append((f"record {{}} of {path}".format, encoded))
    total = 0
    for place, dataset in found:
        decoded = dataset.map(_size, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        count = 0
        try:
            for _ in decoded:
                count += 1
        except tf.errors.OpError as error:
            raise ModelError(f"{text}: {place(count)} can't be read: {reason(error)}") from error
        total += count
    return f"{total} images can be read"


def _size(data: tf.Tensor) -> tf.Tensor:
    return tf.size(tf.io.decode_image(data, expand_animations=False))


def say(text: str) -> None:
    """Prints what was done."""
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
