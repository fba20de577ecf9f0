"""BatchNormalization(synchronized=True) takes its moments over all replicas of a micro-batch.

It was ignored without a word: each replica normalised its own slice, as without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    TOLERANCE,
    assert_same_variables,
    assert_same_variables_after,
    device_lists,
    largest_difference,
    pair,
    pipeline,
    use_float64,
)
from workers import LocalWorkers

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
    h = keras.layers.LSTM(3, name="middle")(h)
    h = norm("renormed", renorm=True, renorm_clipping={"rmax": 1.5, "rmin": 0.5, "dmax": 1.0})(h)
    return compiled(x, keras.layers.Dense(1)(h))


def assert_replicas_train_as_one(
    build: Build,
    replicas: Sequence[int],
    micro_batches: int,
    sizes: Sequence[int],
    cluster: dapple.Cluster | None = None,
    **options: Any,
) -> None:
    """Trains on batches of these sizes by two plans: with replicas, and with one for each stage."""
    cuts = ["middle"][: len(replicas) - 1]
    own, other = pair(build)
    plan = dapple.Plan.manual(cuts, device_lists(replicas), micro_batches, sizes[0], **options)
    several = dapple.transform(own, cluster or dapple.Cluster.local(sum(replicas), kind="cpu"), plan)
    one = pipeline(other, cuts, [1] * len(replicas), micro_batches, sizes[0])
    for size in sizes:
        x, y = batch(size)
        losses = [float(np.ravel(pipelined.train_on_batch(x, y))[0]) for pipelined in (several, one)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # Keras' metrics are float32
    several.close()
    one.close()
    assert_same_variables(own, other, TOLERANCE["float64"])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("build", "replicas", "micro_batches", "options"),
    [
        (normalised, (2,), 2, {"backward_cuts": ("middle",)}),
        pytest.param(normalised, (2,), 2, {}, marks=pytest.mark.slow),
        pytest.param(normalised, (2, 1), 3, {"recompute": "min_cut"}, marks=pytest.mark.slow),
        pytest.param(normalised, (3, 2), 2, {"schedule": "zb_h1", "recompute": "boundary"}, marks=pytest.mark.slow),
        pytest.param(masked, (2, 3), 2, {"schedule": "gpipe"}, marks=pytest.mark.slow),
    ],
)
def test_replicas_of_a_micro_batch_train_as_one(
    build: Build, replicas: Sequence[int], micro_batches: int, options: dict[str, Any]
) -> None:
    """Slices are uneven, and the last batch so small that some replicas have no samples."""
    use_float64()
    samples = 5 * micro_batches + 1
    assert_replicas_train_as_one(build, replicas, micro_batches, [samples, micro_batches + 1], **options)


@pytest.mark.thorough
@pytest.mark.slow
def test_replicas_that_take_turns_on_devices_meet() -> None:
    """Two stages on the same two devices."""
    use_float64()
    own, other = pair(normalised)
    plan = dapple.Plan.manual(["middle"], [[0, 1], [0, 1]], 3, 12, schedule="modulo")
    several = dapple.transform(own, dapple.Cluster.local(2, kind="cpu"), plan)
    one = pipeline(other, ["middle"], [1, 1], 3, 12)
    for pipelined in (several, one):
        for _ in range(2):
            pipelined.train_on_batch(np.ones((12, 4, 3)) * np.arange(12.0)[:, None, None], np.ones((12, 1)))
        pipelined.close()
    assert_same_variables(own, other, TOLERANCE["float64"])


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("build", [normalised, masked])
def test_with_one_micro_batch_it_is_plain_keras(build: Build) -> None:
    use_float64()
    own, plain = pair(build)
    pipelined = pipeline(own, ["middle"], [3, 2], 1, 7)
    checked = pipelined.verify(*batch(7), steps=0)
    assert checked.training and checked.worst[1] < TOLERANCE["float64"]
    assert_same_variables_after(3, pipelined, plain, *batch(7))
    pipelined.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_two_workers_train_as_one_device(workers: LocalWorkers) -> None:
    use_float64()
    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    assert_replicas_train_as_one(normalised, (2,), 2, [7, 7], cluster)


class Centred(keras.layers.Layer):
    """Asks for means and sums over replicas as layers for ``tf.distribute`` do."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        mean = context.all_reduce("mean", tf.reduce_mean(x, 0))
        parts = {"squares": tf.reduce_sum(tf.square(x - mean), 0), "samples": tf.shape(x)[0]}
        total = context.all_reduce(tf.distribute.ReduceOp.SUM, parts)
        return (x - mean) / (1.0 + total["squares"] / tf.cast(total["samples"], x.dtype))


@pytest.mark.thorough
@pytest.mark.slow
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
    assert_same_variables_after(3, pipelined, plain, x, y)
    pipelined.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_setting_it_on_the_layers_of_a_model_is_enough() -> None:
    """The way out for a model that is loaded, and trained data-parallel."""
    use_float64()

    def build() -> keras.Model:
        x = keras.Input((16, 16, 3))
        h = keras.layers.Conv2D(4, 3)(x)
        h = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(h))
        h = keras.Sequential([keras.layers.SeparableConv2D(4, 3), keras.layers.BatchNormalization()])(h)
        return compiled(x, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(h)))

    own, plain = pair(build)
    for layer in own._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    pipelined = pipeline(own, [], [2], 1, 5)
    draw = np.random.default_rng(5)
    assert_same_variables_after(2, pipelined, plain, draw.normal(size=(5, 16, 16, 3)), draw.normal(size=(5, 1)))
    pipelined.close()


@pytest.mark.slow
def test_a_stage_that_adds_up_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    def build() -> keras.Model:
        x = keras.Input((4, 3))
        return compiled(x, keras.layers.Dense(1)(norm("norm")(keras.layers.Flatten(name="middle")(x))))

    own, other = pair(build)
    pipelined = pipeline(own, ["middle"], [1, 2], 1, 4, jit_compile=True)
    with caplog.at_level(logging.WARNING, logger="graph_passes"):
        assert_same_variables_within(1e-4, pipelined, other)
    texts = {record.getMessage() for record in caplog.records}
    (text,) = (text for text in texts if "isn't compiled" in text)
    assert text.startswith("stage 1 isn't compiled with XLA: it adds up over its replicas, ")


def assert_same_variables_within(tolerance: float, pipelined: dapple.PipelinedModel, plain: keras.Model) -> None:
    x, y = (array.astype("float32") for array in batch(4))
    for model in (pipelined, plain):
        model.train_on_batch(x, y)
    pipelined.close()
    assert_same_variables(pipelined.model, plain, tolerance)


def test_sums_within_loops_are_refused() -> None:
    """Replicas couldn't tell the sums of different rounds apart."""

    class Repeated(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            return keras.ops.fori_loop(0, 3, lambda _, y: y / context.all_reduce("sum", tf.reduce_sum(y)), x)

    x = keras.Input((3,))
    model = compiled(x, Repeated()(x))
    with pytest.raises(dapple.DappleError, match=r"(?s)inside a loop.*synchronized=False"):
        pipeline(model, [], [2], 1, 4).train_on_batch(np.ones((4, 3)), np.ones((4, 3)))


def test_gradients_of_sums_within_the_model_are_refused() -> None:
    """It was a LookupError out of TensorFlow's registry."""

    class Slope(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x * x))
            return tape.gradient(total, x)

        def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
            return shape

    x = keras.Input((3,))
    model = compiled(x, keras.layers.Dense(1)(Slope()(x)))
    with pytest.raises(dapple.DappleError, match=r"(?s)takes a gradient.*synchronized=False"):
        pipeline(model, [], [2], 1, 4).train_on_batch(np.ones((4, 3)), np.ones((4, 1)))


@pytest.mark.thorough
@pytest.mark.slow
def test_a_model_that_adds_up_is_profiled() -> None:
    """A profile measures one replica, which adds nothing up."""
    x = keras.Input((6,))
    h = norm("first")(keras.layers.Dense(4)(x))
    model = compiled(x, keras.layers.Dense(1)(norm("second")(keras.layers.Dense(3)(h))))
    assert len(dapple.profile(model, 4, repeats=1, cache=False).layers) >= 4
