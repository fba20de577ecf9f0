"""The order of samples, which follows from a seed and the number of samples read so far.

Sample ``n`` of training is sample ``permutation(n mod count)`` of the data. The permutation differs in each pass, and
is computed, not stored (`tf.raw_ops.RandomIndexShuffle`). So data are shuffled as a whole, a
position is one number, and a checkpoint contains neither a shuffle buffer nor a generator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from dapple_tf.models.sources import DataSource, ModelError

Part = TypeVar("Part")

_BITS = 2**62 - 1
"""Mask of seeds, which may be negative or long."""


class Samples(NamedTuple):
    """Samples that can be read by number.

    Attributes:
        size: number of samples.
        read: TensorFlow function (draw, number), both int64 scalars, to a sample. ``draw`` counts all samples read so
            far; random changes of a sample take it as a seed.
    """

    size: int
    read: Callable[[tf.Tensor, tf.Tensor], Any]


def source(
    text: str,
    about: str,
    parts: Sequence[Part],
    samples: Callable[[keras.Model, Part, int | None], Samples],
    *,
    held_out: float = 0.0,
    in_files: bool = False,
) -> DataSource:
    """Returns data whose samples can be read by number.

    Args:
        text: name of the data.
        about: description in a line.
        parts: files or arrays to train on and, if there are any, to evaluate on.
        samples: function (model, part, seed) to the samples of a part; in evaluation, the seed is None.
        held_out: fraction of the samples to evaluate on if there is one part: the same ones on every machine.
        in_files: see `DataSource`.
    """
    separate = len(parts) > 1

    def part(model: keras.Model, seed: int | None) -> Samples:
        whole = samples(model, parts[0 if seed is not None else -1], seed)
        if whole.size < 2:
            raise ModelError(f"{text}: there are {whole.size} samples; need at least 2")
        if separate or not held_out:
            return whole
        out = min(whole.size - 1, max(1, round(whole.size * held_out)))
        first, size = (0, whole.size - out) if seed is not None else (whole.size - out, out)
        return Samples(size, lambda draw, number: whole.read(draw, shuffled(first + number, whole.size, 0)))

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        train = part(model, seed)
        draws = tf.data.Dataset.counter()
        made = batched(draws, lambda draw: train.read(draw, shuffled(draw, train.size, seed)), batch_size, full=True)
        options = tf.data.Options()
        options.experimental_symbolic_checkpoint = True  # Batches read ahead are read again, rather than saved.
        return made.with_options(options)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        every = part(model, None)
        numbers = tf.data.Dataset.range(every.size)
        return batched(numbers, lambda number: every.read(number, number), batch_size, full=False)

    return DataSource(text, about, batches, evaluation if separate or held_out else None, in_files)


def batched(dataset: tf.data.Dataset, read: Callable[..., Any], batch_size: int, *, full: bool) -> tf.data.Dataset:
    """Returns batches of ``read``'s results, in order; with ``full``, the last one isn't smaller."""
    # Autograph would look for Python's ``if`` and ``while``, which takes longer than all else.
    read = tf.autograph.experimental.do_not_convert(read)
    dataset = dataset.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return dataset.batch(batch_size, drop_remainder=full).prefetch(2)


def shuffled(draw: tf.Tensor, count: int, seed: int) -> tf.Tensor:
    """Returns the number of the sample in a draw: each sample once in ``count`` draws."""
    size = tf.constant(count, tf.int64)
    # Drawn, since keys of zeros leave almost all samples where they are.
    keys = tf.random.stateless_uniform([3], seeds_of(draw // size, seed), None, None, tf.int64)
    return tf.raw_ops.RandomIndexShuffle(index=draw % size, seed=keys, max_index=size - 1, rounds=4)


def seeds_of(draw: tf.Tensor, seed: int | None) -> tf.Tensor:
    """Returns the seeds [2] of random changes in a draw; in evaluation, ``seed`` is None."""
    return tf.stack([(seed or 0) & _BITS, draw])
