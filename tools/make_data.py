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

--sample writes the files that a reader without a path reads: images, tfrecords, text, tokens, squad or pairs.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import sys

import numpy as np
from absl import flags

from dapple_tf.models.readers import images, records_writer, samples, vocabulary
from dapple_tf.models.readers.check import check_all
from dapple_tf.models.readers.text_files import pieces, text_files, token_file
from dapple_tf.tools import command

FLAGS = flags.FlagValues()

_IMAGES = flags.DEFINE_string("images", None, "Folder of images to write as TFRecord files.", flag_values=FLAGS)
_TEXT = flags.DEFINE_string("text", None, "Text file or folder of *.txt to write as tokens.", flag_values=FLAGS)
_CHECK = flags.DEFINE_string("check", None, "Data to read once: images:PATH or tfrecords:PATH.", flag_values=FLAGS)
_SAMPLE = flags.DEFINE_enum("sample", None, list(samples.FOLDERS), "Sample to write.", flag_values=FLAGS)
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
            say(check_all(_CHECK.value))
            return
        folder = output_folder()
        if _SAMPLE.value is not None:
            shutil.copytree(samples.FOLDERS[_SAMPLE.value](), folder, dirs_exist_ok=True)
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
    shards = _SHARDS.value
    train = root / "train" if (root / "train").is_dir() else root
    written = records_writer.write(train, folder, "train", shards=shards, seed=_SEED.value)
    counts = {"train": len(written.paths)}
    for name in images.VALIDATION:
        if (root / name).is_dir() and train != root:
            left = records_writer.write(
                root / name, folder, "validation", shards=max(1, shards // 8), seed=None, classes=written.classes
            )
            counts["validation"] = len(left.paths)
            break
    (folder / "classes.json").write_text(json.dumps(written.classes, indent=1) + "\n", encoding="utf-8")
    images_of = " and ".join(f"{count} images for {part}" for part, count in counts.items())
    say(f"Wrote {images_of}, of {len(written.classes)} classes. Train on them with --dataset=tfrecords:{folder}")


def write_text(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Writes a tokenizer and the tokens of the text.

    Raises:
        ModelError: there is no text, or the tokenizer's file isn't valid.
    """
    files = text_files([root], str(root))
    if _TOKENIZER.value is not None:
        tokenizer = vocabulary.load(pathlib.Path(_TOKENIZER.value), f"--tokenizer={_TOKENIZER.value}")
    else:
        tokenizer = vocabulary.trained("byte_bpe", _VOCABULARY.value, files, lambda: pieces(files, str(root)))
    tokenizer.save(str(folder / "tokenizer.json"))
    size = vocabulary.size_of(tokenizer)
    parts = token_file(files, tokenizer, str(root)).split(_HELD_OUT.value)
    counts = []
    for name, part in zip(("train", "valid"), parts, strict=True):
        if part.count:
            np.asarray(part.array()).tofile(folder / f"{name}.bin")
            counts.append(f"{part.count:,} tokens in {folder / name}.bin")
    options = [] if parts[0].dtype == np.dtype("uint16") else [f"dtype={parts[0].dtype.name}"]
    options += [f"valid={folder / 'valid.bin'}"] if parts[1].count else ["held_out=0"]
    say(
        f"Wrote {' and '.join(counts)}, of {size:,} kinds. Train a model of vocabulary {size} or more with "
        f"--dataset='tokens:{folder / 'train.bin'}?{'&'.join(options)}'"
    )


def say(text: str) -> None:
    """Prints what was done."""
    sys.stdout.write(f"{text}\n")


if __name__ == "__main__":
    command.start(main, FLAGS)
