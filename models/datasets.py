"""Data by name. To add data, add a `DataSource` to `DATASETS`; to add a file format, a `Reader` to `READERS`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dapple_tf.models.sources import DataSource, later

if TYPE_CHECKING:
    from dapple_tf.models.readers.options import Request


def generated(length: int | None = None) -> DataSource:
    """Returns random numbers in the shapes that a model declares.

    Args:
        length: length of axes that the model leaves open; None for one that it can be computed for.
    """
    batches = later("generated_data.random_numbers")
    return DataSource(
        "generated",
        "random numbers that fit the model's inputs and loss, few enough to be learnt",
        lambda model, batch_size, seed: batches(model, batch_size, seed, length),
    )


GENERATED = generated()

_DATASETS = (
    GENERATED,
    DataSource(
        "source_text",
        "bytes of Python's standard library, for language models",
        later("generated_data.source_text"),
        later("generated_data.held_out_text"),
    ),
    DataSource(
        "patterns", "a pattern for each class, in noise, for models of images", later("generated_data.patterns")
    ),
    DataSource(
        "sentences", "random tokens of several lengths, for bert and xlnet", later("generated_data.random_sentences")
    ),
    DataSource(
        "reversed_pairs",
        "sentences, and the same backwards as their translation, for gnmt",
        later("generated_data.reversed_pairs"),
    ),
)

DATASETS: Mapping[str, DataSource] = {source.name: source for source in _DATASETS}
"""Data by name."""


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of one file format.

    Attributes:
        kind: its name, as in ``kind:path?option=value``; ``kind`` alone reads a small sample, or CIFAR.
        about: description of the files, in a line.
        open: function that finds and checks the files.
    """

    kind: str
    about: str
    open: Callable[[Request], DataSource]


_READERS = (
    Reader("images", "a folder train/CLASS/*.jpeg, and val/CLASS/*.jpeg", later("readers.images.open_images")),
    Reader(
        "tfrecords", "a folder of train-00000-of-01024 and so on, with images", later("readers.tfrecords.open_records")
    ),
    Reader("cifar10", "CIFAR-10, by keras.datasets", later("readers.images.open_cifar")),
    Reader("cifar100", "CIFAR-100, by keras.datasets", later("readers.images.open_cifar")),
    Reader("text", "text files, or folders of *.txt, as bytes or tokens", later("readers.tokens.open_text")),
    Reader("tokens", "a file of tokens, *.bin or *.npy", later("readers.tokens.open_tokens")),
    Reader("squad", "a file of questions in SQuAD's JSON format", later("readers.sentences.open_squad")),
    Reader("mnli", "a folder of MNLI as GLUE has it: train.tsv, dev_matched.tsv", later("readers.sentences.open_mnli")),
    Reader(
        "pairs",
        "sentences and translations: FILE,FILE line by line, or one FILE.tsv",
        later("readers.pairs.open_pairs"),
    ),
)

READERS: Mapping[str, Reader] = {reader.kind: reader for reader in _READERS}
"""Readers of files, by kind."""
