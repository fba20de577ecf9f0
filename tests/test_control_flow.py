"""State that layers assign in branches and loops: seeds, counters and moving means, as in plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables_after, largest_difference, pair, pipeline, use_float64
from models_for_tests import with_layer

import dapple_tf as dapple

layers, ops = keras.layers, keras.ops
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(12, 4)), rng.normal(size=(12, 2))


class Own(layers.Layer):
    """Calls a function with itself, a tensor and ``training``."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.function = function
        self.drop, self.norm = layers.Dropout(0.3, seed=5), layers.BatchNormalization(center=False, scale=False)

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")
        self.mean = self.add_weight(shape=(4,), initializer="zeros", trainable=False, name="mean")
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")
        self.norm.build((None, 4))

    def compute_output_spec(self, x: Any, training: bool | None = None) -> Any:
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.function(self, x, training)

    def counted(self, x: Any, training: bool | None) -> Any:
        """Passes it through layers with state, and counts."""
        self.count.assign_add(1)
        return self.drop(ops.tanh(self.norm(x, training=training) @ self.kernel), training=training)

    def averaged(self, x: Any) -> Any:
        """Moves the mean; returns the samples."""
        self.mean.assign(self.mean * 0.9 + ops.mean(x, 0) * 0.1)
        return x * 1.1


class Cell(Own):
    """A cell of an RNN with state."""

    state_size = 4

    def call(self, x: Any, states: Any, training: bool | None = None) -> Any:
        h = self.counted(x + states[0], training)
        return h, [h]


class Recurrent(layers.Layer):
    """Calls a cell by Keras' RNN."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rnn = layers.RNN(Cell(None, name="cell"))

    def build(self, shape: Any) -> None:
        self.rnn.build((None, 3, 4))

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.rnn(ops.stack([x, 2 * x, 3 * x], 1), training=training)


def branches(own: Own, x: Any, training: bool | None) -> Any:
    """Different variables in each branch, which others read afterwards."""
    own.count.assign_add(1)
    x = ops.cond(own.count % 2 == 0, lambda: own.drop(x, training=training), lambda: own.norm(x, training=training))
    x = ops.switch(own.count % 3, [lambda x: own.averaged(x), lambda x: own.counted(x, training), lambda x: x], x)
    return own.drop(x, training=training) + own.mean


def loops(own: Own, x: Any, training: bool | None) -> Any:
    """Loops in each other and in branches; the condition of one reads what its body assigns."""

    def inside(_: Any, x: Any) -> Any:
        x = ops.cond(own.count < 4, lambda: own.counted(x, training), lambda: own.drop(x, training=training))
        return ops.fori_loop(0, 2, lambda _, x: own.averaged(x), x)

    own.count.assign(own.count * 0)
    x = ops.while_loop(lambda x: ops.less(own.count, 3), lambda x: (own.counted(x, training),), (x,))[0]
    return ops.fori_loop(0, 2, inside, x)


def sequences(own: Own, x: Any, training: bool | None) -> Any:
    x = ops.map(lambda row: own.counted(row[None], training)[0], x)

    def step(carried: Any, element: Any) -> Any:
        carried = own.counted(carried + element, training)
        return carried, carried

    return ops.scan(step, x, ops.stack([x, 2 * x]))[0]


@tf.function
def converted(own: Own, x: Any, training: bool | None) -> Any:
    """Python's control flow, which AutoGraph converts, and TensorFlow's own."""
    for _ in tf.range(2):
        if own.count > 0:
            x = own.counted(x, training)
    x = tf.while_loop(lambda x: own.mean[0] > 9.0, lambda x: own.averaged(x), [x], [tf.TensorShape([None, 4])])[0]
    return tf.map_fn(lambda row: own.averaged(row[None])[0], x)


def state_of(model: keras.Model) -> list[Any]:
    return [np.asarray(variable.value) for variable in model.variables]


CASES: dict[str, Callable[[], layers.Layer]] = {
    "branches": lambda: Own(branches, name="own"),
    "loops": lambda: Own(loops, name="own"),
    "sequences": lambda: Own(sequences, name="own"),
    "converted": lambda: Own(converted, name="own"),
    "cell": lambda: Recurrent(name="own"),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("case", CASES)
def test_one_slice_is_plain_keras(case: str) -> None:
    """They were "out of scope", in training, evaluation and prediction."""
    use_float64()
    model, plain = pair(lambda: with_layer(CASES[case]))
    plain.run_eagerly = False  # Gradients of branches that aren't taken are zero, as here.
    pipelined = pipeline(model, ["own"], (1, 1), 1, 12)
    plain.test_on_batch(X, Y)
    pipelined.test_on_batch(X, Y)
    assert_same_variables_after(2, pipelined, plain, X, Y)
    assert largest_difference(pipelined.predict(X, verbose=0), plain.predict(X, verbose=0)) < 1e-10


def test_means_over_samples_are_those_of_the_whole_batch() -> None:
    def branching(own: Own, x: Any, training: bool | None) -> Any:
        return ops.cond(own.count < 5, lambda: own.averaged(x), lambda: x) @ own.kernel

    def looping(own: Own, x: Any, training: bool | None) -> Any:
        return ops.fori_loop(0, 2, lambda _, x: own.averaged(x), x) @ own.kernel

    use_float64()
    model, plain = pair(lambda: with_layer(lambda: Own(branching, name="own"), lambda: Own(looping, name="other")))
    pipelined = pipeline(model, ["own"], (2, 1), 3, 12)
    assert_same_variables_after(2, pipelined, plain, X, Y)
    assert not pipelined.notes


def test_a_count_of_samples_by_a_loop_is_noted() -> None:
    def counting(own: Own, x: Any, training: bool | None) -> Any:
        return ops.map(lambda row: (own.count.assign_add(1), row * 2)[1], x)

    pipelined = pipeline(with_layer(lambda: Own(counting, name="own")), ["own"], (1, 1), 3, 12)
    assert ["state" in str(note) for note in pipelined.notes] == [True]


def test_what_the_condition_of_a_loop_assigns_is_refused() -> None:
    def asking(own: Own, x: Any, training: bool | None) -> Any:
        return ops.while_loop(lambda x: own.count.assign_add(1) < 3, lambda x: (x * 2,), (x,))[0]

    pipelined = pipeline(with_layer(lambda: Own(asking, name="own")), ["own"], (1, 1), 1, 12)
    with pytest.raises(dapple.CaptureError, match=r"layer 'own' .* condition of a loop assigns variable 'own/count'"):
        pipelined.train_on_batch(X, Y)
