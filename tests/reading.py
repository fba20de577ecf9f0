"""What tests of readers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.checkpoints.data_position import TrainingData


def image_model(classes: int = 3, side: int = 8, channels: int = 3) -> keras.Model:
    """A model of images."""
    layers = [keras.Input((side, side, channels)), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential(layers, name="small")


def taken(dataset: tf.data.Dataset, count: int) -> list[list[np.ndarray]]:
    """The first batches, as arrays."""
    return [flat(batch) for batch in itertools.islice(dataset.as_numpy_iterator(), count)]


def flat(batch: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in keras.tree.flatten(batch)]


def assert_equal(first: list[list[np.ndarray]], second: list[list[np.ndarray]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def assert_seeded(make: Callable[[int], tf.data.Dataset], count: int) -> None:
    """The same seed gives the same batches, another one others."""
    first = taken(make(1), count)
    assert_equal(first, taken(make(1), count))
    other = taken(make(2), count)
    assert any((a != b).any() for one, two in zip(first, other, strict=True) for a, b in zip(one, two, strict=True))


def assert_resumes(make: Callable[[], tf.data.Dataset], steps: int, done: int, state_bytes: int = 40_000) -> None:
    """A run that is stopped after ``done`` batches and resumed gives the batches of one that isn't, as `fit` reads."""

    def data() -> TrainingData:
        return TrainingData.of(make(), batch_size=1, steps_per_epoch=10**6)

    def read(given: TrainingData, count: int) -> list[list[np.ndarray]]:
        items = iter(given)
        return [flat(next(items)) for _ in range(count)]

    expected = read(data(), steps)
    stopped = data()
    begun = read(stopped, done)
    values, state = stopped.position(epoch_over=False)
    assert set(state) == {"iterator", "start"}  # No reading from the beginning.
    assert sum(len(tf.io.serialize_tensor(tensor).numpy()) for tensor in state.values()) < state_bytes
    resumed = data()
    resumed.resume(values, state, done)
    assert_equal(begun + read(resumed, steps - done), expected)
