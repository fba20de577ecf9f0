"""BatchNormalization(synchronized=True) takes its moments over all replicas of a micro-batch.

It was ignored without a word: each replica normalised its own slice, as without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    TOLERANCE,
    assert_same_variables,
    assert_same_variables_after,
    largest_difference,
    pair,
    pipeline,
    use_float64,
)

import dapple_tf as dapple

Build = Callable[[], keras.Model]


def batch(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences of 4 steps of 3 features, of which the last steps of some are masked."""
    draw = np.random.default_rng(samples)
    x = draw.normal(2.0, 3.0, size=(samples, 4, 3))
    for sample in range(samples):
        x[sample, 4 - sample % 3 :] = 0.0
    return x, draw.normal(size=(samples, 1))


def norm(name: str, **options: Any) -> keras.layers.BatchNormalization:
    return keras.layers.BatchNormalization(name=name, momentum=0.7, synchronized=True, **options)


def compiled(inputs: Any, outputs: Any) -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def normalised() -> keras.Model:
    """Both stages normalise, the second twice; cut at ``middle``.

    What one normalization adds the next must not remove: gradients that are zero but for rounding are as large as any
    others after Adam's division.
    """
    x = keras.Input((4, 3))
    h = norm("sequence")(keras.layers.Dense(4, name="first")(x))
    h = keras.layers.Activation("tanh", name="middle")(h)
    h = norm("steps", axis=1)(keras.layers.Dense(3, activation="gelu")(h))
    h = keras.layers.Activation("tanh")(h)
    return compiled(x, keras.layers.Dense(1)(norm("flat", center=False)(keras.layers.Flatten()(h))))


def masked() -> keras.Model:
    """Moments of what a mask leaves, and those of batch renormalization."""
    x = keras.Input((4, 3))
    h = norm("masked")(keras.layers.Dense(4, name="first")(keras.layers.Masking()(x)))
    h = keras.layers.GlobalAveragePooling1D(name="middle")(h)
    h = norm("renormed", renorm=True, renorm_clipping={"rmax": 1.5, "rmin": 0.5, "dmax": 1.0})(h)
    return compiled(x, keras.layers.Dense(1)(h))


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        ([[0, 1]], {"backward_cuts": ("middle",)}),
        ([[0, 1], [0, 1]], {"schedule": "modulo"}),  # Replicas that take turns on devices meet.
    ],
)
def test_replicas_of_a_micro_batch_train_as_one(devices: list[list[int]], options: dict[str, Any]) -> None:
    """Slices are uneven, and the last batch so small that some replicas have no samples."""
    use_float64()
    cuts = ["middle"][: len(devices) - 1]
    own, other = pair(normalised)
    plan = dapple.Plan.manual(cuts, devices, 2, 11, **options)
    several = dapple.transform(own, dapple.Cluster.local(2, kind="cpu"), plan)
    one = pipeline(other, cuts, [1] * len(devices), 2, 11)
    for size in (11, 3):
        losses = [float(np.ravel(pipelined.train_on_batch(*batch(size)))[0]) for pipelined in (several, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # Keras' metrics are float32
    several.close()
    one.close()
    assert_same_variables(own, other, TOLERANCE["float64"])


def test_with_one_micro_batch_it_is_plain_keras() -> None:
    use_float64()
    own, plain = pair(masked)
    pipelined = pipeline(own, ["middle"], [3, 2], 1, 7)
    assert_same_variables_after(2, pipelined, plain, *batch(7))
    pipelined.close()


class Centred(keras.layers.Layer):
    """Asks for means and sums over replicas as layers for ``tf.distribute`` do."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce("mean", tf.reduce_mean(x, 0))
        parts = {"squares": tf.reduce_sum(tf.square(x - mean), 0), "samples": tf.shape(x)[0]}
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
        return (x - mean) / (1.0 + total["squares"] / tf.cast(total["samples"], x.dtype))


def test_layers_add_up_over_replicas_as_under_tf_distribute() -> None:
    """In evaluation and prediction, too, where nothing else in the step is a collective operation."""
    use_float64()

    def build() -> keras.Model:
        x = keras.Input((4, 3))
        h = Centred(name="middle")(keras.layers.Dense(4)(x))
        return compiled(x, keras.layers.Dense(1)(Centred()(keras.layers.Flatten()(h))))

    own, plain = pair(build)
    pipelined = pipeline(own, ["middle"], [2, 1], 1, 7)
    x, y = batch(7)
    expected = plain.predict(x, verbose=0)
    assert largest_difference(pipelined.predict(x, batch_size=7, verbose=0), expected) < TOLERANCE["float64"]
    assert pipelined.evaluate(x, y, batch_size=7, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0))
    assert_same_variables_after(1, pipelined, plain, x, y)
    pipelined.close()


def test_a_stage_that_adds_up_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> keras.Model:
        x = keras.Input((4, 3))
        return compiled(x, keras.layers.Dense(1)(norm("norm")(keras.layers.Flatten(name="middle")(x))))

    x, y = (array.astype("float32") for array in batch(4))
    with caplog.at_level(logging.WARNING, logger="graph_passes"):
        pipeline(build(), ["middle"], [1, 2], 1, 4, jit_compile=True).train_on_batch(x, y)
    texts = {record.getMessage() for record in caplog.records}
    (text,) = (text for text in texts if "isn't compiled" in text)
    assert text.startswith("stage 1 isn't compiled with XLA: it adds up over its replicas, ")


def in_a_loop(x: tf.Tensor) -> tf.Tensor:
    """Replicas couldn't tell the sums of different rounds apart."""
    context = tf.distribute.get_replica_context()
    return keras.ops.fori_loop(0, 3, lambda _, y: y / context.all_reduce("sum", tf.reduce_sum(y)), x)


def slope(x: tf.Tensor) -> tf.Tensor:
    """It was a LookupError out of TensorFlow's registry."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x * x))
    return tape.gradient(total, x)


@pytest.mark.parametrize(("function", "text"), [(in_a_loop, "inside a loop"), (slope, "takes a gradient")])
def test_sums_in_loops_and_their_gradients_within_the_model_are_refused(function: Any, text: str) -> None:
    x = keras.Input((3,))
    model = compiled(x, keras.layers.Dense(1)(keras.layers.Lambda(function, output_shape=(3,))(x)))
    with pytest.raises(dapple.DappleError, match=rf"(?s){text}.*synchronized=False"):
        pipeline(model, [], [2], 1, 4).train_on_batch(np.ones((4, 3)), np.ones((4, 1)))
