"""The order in which samples are read, which follows from a seed and the number of samples read so far.

Sample ``n`` of training is sample ``permutation(n mod count)`` of the data. The permutation differs in each pass, and
is computed, not stored (`tf.raw_ops.RandomIndexShuffle`). So data are shuffled as a whole, a
position is one number, and a checkpoint contains neither a shuffle buffer nor a generator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

_MOST_AHEAD = 2
"""Number of batches that are made in advance."""

_BITS = 2**62 - 1
"""Mask of seeds, which may be negative or long."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Samples that can be read by number.

    Attributes:
        count: number of samples.
        read: function from a dataset of ``(draw, index)``, both int64, to the samples, in that order. ``index`` is the
            number of the sample; ``draw`` counts all draws, and decides random changes of a sample.
        in_batches: whether these are batches of numbers, int64 [batch], and of samples.
    """

    count: int
    read: Callable[[tf.data.Dataset], tf.data.Dataset]
    in_batches: bool = False


def by_number(count: int, read: Callable[[tf.Tensor, tf.Tensor], Any], *, in_batches: bool = False) -> Samples:
    """Returns samples made by a TensorFlow function ``(draw, index) -> sample``, which runs for several at a time.

    With ``in_batches`` it is a function of batches, which is faster if a sample needs little work.
    """
    return Samples(count, lambda numbers: in_parallel(numbers, read), in_batches)


def in_parallel(dataset: tf.data.Dataset, function: Callable[..., Any]) -> tf.data.Dataset:
    """Returns the dataset with a function applied by several threads; the order stays."""
    return dataset.map(plain(function), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function as free of Python's ``if`` and ``while``: searching for them takes longer than all else."""
    return tf.autograph.experimental.do_not_convert(function)


def shuffled(draw: tf.Tensor, count: int, seed: int) -> tf.Tensor:
    """Returns the number of the sample in draw ``draw``, [] or [batch]: each sample once in ``count`` draws; int64."""
    size = tf.constant(count, tf.int64)
    seeds = tf.stack([tf.fill(tf.shape(draw), tf.constant(seed & _BITS, tf.int64)), draw // size, draw * 0], -1)
    return tf.raw_ops.RandomIndexShuffle(index=draw % size, seed=seeds, max_index=size - 1, rounds=4)


def seeds_of(draw: tf.Tensor, seed: int) -> tf.Tensor:
    """Returns the seeds [2] of random changes of the sample in draw ``draw``."""
    return tf.stack([tf.constant(seed & _BITS, tf.int64), draw])


def training_batches(samples: Samples, batch_size: int, seed: int) -> tf.data.Dataset:
    """Returns full batches without end; the same for the same seed."""

    def numbered(draw: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return draw, shuffled(draw, samples.count, seed)

    return _batched(samples, tf.data.Dataset.counter(), numbered, batch_size, full=True)


def evaluation_batches(samples: Samples, batch_size: int) -> tf.data.Dataset:
    """Returns all samples once, in their order; the last batch may be smaller."""
    return _batched(samples, tf.data.Dataset.range(samples.count), lambda n: (n, n), batch_size, full=False)


def _batched(
    samples: Samples, draws: tf.data.Dataset, numbered: Callable[[tf.Tensor], Any], batch_size: int, full: bool
) -> tf.data.Dataset:
    if samples.in_batches:
        dataset = samples.read(draws.batch(batch_size, drop_remainder=full).map(plain(numbered)))
    else:
        dataset = samples.read(draws.map(plain(numbered))).batch(batch_size, drop_remainder=full)
    dataset = dataset.prefetch(_MOST_AHEAD)
    options = tf.data.Options()
    options.deterministic = True
    options.experimental_symbolic_checkpoint = True  # What was read ahead is read again, rather than saved.
    if not full:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-samples.count // batch_size)))
    return dataset.with_options(options)


def parts(count: int, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the numbers of the samples to train on and of held-out ones, in order: the same on every machine.

    ``held_out`` is the latter's fraction; of two or more samples at least one is held out, unless it is 0.
    """
    out = min(count - 1, max(1, round(count * held_out))) if held_out else 0
    chosen = np.zeros(count, bool)
    chosen[np.random.default_rng(count).permutation(count)[:out]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)


def chosen(count_of: Sequence[int] | np.ndarray) -> tf.Tensor:
    """Returns numbers of samples as a tensor to look up in."""
    return tf.constant(np.asarray(count_of), tf.int64)
