"""Replicas with unequal shares of each micro-batch train as plain Keras does."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_training, assert_same_variables, pair, pipeline, use_float64
from keras import layers
from models_for_tests import Computed
from selection import thorough

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Tensor
from dapple_tf.errors import CaptureError
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.capture import Mode
from graph_passes.errors import PassError

EXACT = 1e-12


def dense() -> keras.Model:
    features = keras.Input((4,))
    x = layers.Dense(6, "tanh", name="first")(features)
    x = layers.Dense(5, "tanh", name="second")(x)
    model = keras.Model(features, layers.Dense(3, name="last")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, weighted_metrics=["accuracy"])
    return model


def batch(samples: int, seed: int) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    weights = draw.uniform(0.5, 2, samples)
    return draw.normal(size=(samples, 4)), draw.integers(0, 3, samples), weights


def test_slices_are_as_large_as_their_shares_say() -> None:
    plan = dapple.Plan.manual(["first"], [[0, 1], [2, 3]], 2, 10, shares=[[3, 2], [1, 4]])
    passes = StepPasses(plan, dapple.Cluster.local(4, kind="cpu"))
    slices = [[part.size for part in passes.layout(10).slices(stage, 0)] for stage in (0, 1)]
    assert slices == [[3, 2], [1, 4]]
    assert [part.size for part in passes.layout(4).slices(1, 0)] == [1, 3]
    assert passes.slice_samples(Mode.TRAIN, 10) == (None, None)


@pytest.mark.parametrize("samples", [10, 23, 1])
def test_evaluation_and_prediction_are_those_of_plain_keras(samples: int) -> None:
    use_float64()
    model, plain = pair(dense)
    pipelined = pipeline(model, ["first"], (2, 2), 2, 10, shares=[[3, 2], [1, 4]])
    x, y, weights = batch(samples, 5)
    np.testing.assert_allclose(pipelined.predict_on_batch(x), plain.predict_on_batch(x), rtol=EXACT)
    own = pipelined.test_on_batch(x, y, sample_weight=weights, return_dict=True)
    other = plain.test_on_batch(x, y, sample_weight=weights, return_dict=True)
    assert own == pytest.approx(other, rel=1e-5)


def test_moving_averages_are_means_weighted_by_samples() -> None:
    """Slices of 6 and 2 samples: the mean of means of slices would be another."""
    use_float64()

    def build() -> keras.Model:
        features = keras.Input((2,))
        x = layers.BatchNormalization(momentum=0.0, name="norm")(features)
        model = keras.Model(features, layers.Dense(1, name="last")(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model, _ = pair(build)
    pipelined = pipeline(model, [], (2,), 1, 8, shares=[[3, 1]])
    x = np.random.default_rng(0).normal(size=(8, 2)) + np.arange(8)[:, None]
    pipelined.train_on_batch(x, np.ones((8, 1)))
    pipelined.sync()
    norm = pipelined.model.get_layer("norm")
    np.testing.assert_allclose(norm.moving_mean, x.mean(0), rtol=EXACT)
    variance = (6 * x[:6].var(0) + 2 * x[6:].var(0)) / 8
    np.testing.assert_allclose(norm.moving_variance, variance, rtol=EXACT)


def test_synchronized_norms_see_the_whole_micro_batch() -> None:
    use_float64()

    def build() -> keras.Model:
        features = keras.Input((3,))
        x = layers.BatchNormalization(synchronized=True, name="norm")(layers.Dense(3, name="first")(features))
        model = keras.Model(features, layers.Dense(1, name="last")(x))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    model, plain = pair(build)
    pipelined = pipeline(model, [], (2,), 1, 8, shares=[[3, 1]])
    draw = np.random.default_rng(0)
    for _ in range(3):
        x, y = draw.normal(size=(8, 3)), draw.normal(size=(8, 1))
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(pipelined.model, plain, EXACT)


def test_the_planner_cuts_slices_by_speed_and_the_step_is_that_of_plain_keras() -> None:
    use_float64()
    model, plain = pair(dense)
    layers_of = [LayerProfile(name, Cost(0.0, 1e-3), Cost(0.0, 2e-3)) for name in ("first", "second", "last")]
    tensors = tuple(Tensor(index, (index + 1,), Cost(0.0, 1e6)) for index in range(2))
    profile = dapple.Profile(model.name, "by hand", (1,), tuple(layers_of), tensors)
    local = dapple.Cluster.local(3, kind="cpu")
    devices = [dataclasses.replace(own, speed=speed) for own, speed in zip(local.devices, (1.0, 0.5, 0.5), strict=True)]
    cluster = dataclasses.replace(local, devices=tuple(devices), intra_bandwidth=1e9, intra_latency=0.0)
    pipelined = dapple.transform(model, cluster, global_batch_size=16, profile=profile, micro_batches=1)
    assert pipelined.plan.shares == ((2, 1, 1),)
    assert pipelined.prediction is not None
    assert pipelined.prediction.predicted == dapple.simulate(pipelined.plan, profile, cluster).latency
    assert_same_training(pipelined, plain, [batch(16, 0), batch(5, 1)], tolerance=EXACT)


def swapped(x: Any) -> Any:
    """The first two axes in each other's place."""
    return tf.transpose(x, (1, 0, *range(2, len(x.shape))))


def views(x: Any) -> Any:
    return tf.concat([x, 2 * x + 1], 0)


def together(x: Any, *parts: int) -> Any:
    """What belongs to one sample, in one row; ``parts`` before its place, -1 for the samples, and those after it."""
    place, shape = parts.index(-1), (*parts, *x.shape[1:])
    moved = tf.transpose(tf.reshape(x, shape), (place, *(axis for axis in range(len(shape)) if axis != place)))
    return tf.reshape(moved, (-1, int(np.prod(shape[:place] + shape[place + 1 :]))))


ORDERS: dict[str, tuple[Any, Any]] = {
    "views": (views, lambda x: together(x, 2, -1)),
    "views of views": (lambda x: views(views(x)), lambda x: together(x, 4, -1)),
    "tiled": (lambda x: tf.tile(x, (3, 1)), lambda x: together(x, 3, -1)),
    "repeated": (lambda x: tf.repeat(x, 3, 0), lambda x: together(x, -1, 3)),
    "repeated, in two views": (lambda x: views(tf.repeat(x, 2, 0)), lambda x: together(x, 2, -1, 2)),
    "beside each other": (lambda x: tf.reshape(tf.stack((x, -x), 1), (-1, 6)), lambda x: together(x, -1, 2)),
    "heads before samples": (
        lambda x: tf.reshape(swapped(tf.reshape(x, (-1, 3, 2))), (-1, 2)),
        lambda x: together(x, 3, -1),
    ),
    "heads after samples": (lambda x: tf.reshape(x, (-1, 2)), lambda x: together(x, -1, 3)),
    "steps of time": (
        lambda x: swapped(tf.reshape(views(x), (-1, 3, 2))),
        lambda x: together(swapped(x), 2, -1),
    ),
    "by places": (
        lambda x: tf.gather(x, tf.range(2 * tf.shape(x)[0]) % tf.shape(x)[0]),
        lambda x: together(x, 2, -1),
    ),
    "taken one by one": (lambda x: tf.map_fn(lambda row: row * row[0], views(x)), lambda x: together(x, 2, -1)),
    "by a function": (tf.function(views), lambda x: tf.multiply(*tf.split(x, 2))),
    "blocks": (
        lambda x: tf.reshape(tf.space_to_batch(x[..., None, None], (2, 1), ((0, 0), (0, 0))), (-1, 3)),
        lambda x: together(x, 2, -1),
    ),
}


def heads(x: Any) -> Any:
    """Two heads of sequences of any length, each before the samples."""
    length = tf.shape(x)[1]
    return tf.reshape(tf.transpose(tf.reshape(x, (-1, length, 2, 2)), (2, 0, 1, 3)), (-1, length, 2))


SEQUENCES = ((views, lambda x: tf.add(*tf.split(x, 2))), (heads, lambda x: tf.concat(tf.split(x, 2), -1)))


@keras.saving.register_keras_serializable("unlike_replicas")
class Part(layers.Layer):
    """One of three stages: it sends rows in every order, works on rows, or puts together what belongs to a sample."""

    def __init__(self, part: int, **options: Any) -> None:
        super().__init__(**options)
        self.part = part
        rows = [*ORDERS.values(), *SEQUENCES]
        self.dense = [layers.Dense((6 if order in ORDERS.values() else 4, 4, 3)[part], "tanh") for order in rows]
        self.built = True

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "part": self.part}

    def call(self, tensors: Any) -> Any:
        both = [*ORDERS.values(), *SEQUENCES]
        if self.part == 0:
            given = [tensors[0]] * len(ORDERS) + [tensors[1]] * len(SEQUENCES)
            return [send(dense(x)) for (send, _), dense, x in zip(both, self.dense, given, strict=True)]
        if self.part == 1:
            return [dense(x) for dense, x in zip(self.dense, tensors, strict=True)]
        joined = [back(x) for (_, back), x in zip(both, tensors, strict=True)]
        means = [x if len(x.shape) == 2 else tf.reduce_mean(x, 1) for x in joined]
        return sum(dense(x) for dense, x in zip(self.dense, means, strict=True))


class Rows(keras.Model):
    """Tensors with several rows for each sample, in all orders, between three stages."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [Part(part, name=name) for part, name in enumerate(("first", "second", "third"))]

    def call(self, tensors: Any) -> Any:
        for part in self.parts:
            tensors = part(tensors)
        return tensors


def rows() -> keras.Model:
    model = Rows()
    model((np.zeros((2, 6)), np.zeros((2, 5, 4))))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


@pytest.mark.parametrize(
    ("replicas", "micro_batches", "options"),
    [
        ((1, 2, 3), 1, {}),
        thorough(((2, 1, 1), 2, {"relays": [1]})),
        thorough(((2, 2, 2), 2, {"shares": [[2, 1], [1, 3], [1, 1]], "recompute": "boundary"})),
    ],
)
def test_rows_of_samples_in_every_order(replicas: tuple[int, ...], micro_batches: int, options: dict[str, Any]) -> None:
    use_float64()
    model, plain = pair(rows)
    pipelined = pipeline(model, ["first", "second"], replicas, micro_batches, 11, **options)
    draw = np.random.default_rng(1)
    for length in (5, 3):
        x, y = (draw.normal(size=(11, 6)), draw.normal(size=(11, length, 4))), draw.normal(size=(11, 3))
        assert pipelined.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=EXACT)
    assert pipelined.test_on_batch(x, y) == pytest.approx(plain.test_on_batch(x, y), rel=EXACT)
    np.testing.assert_allclose(pipelined.predict_on_batch(x), plain.predict_on_batch(x), atol=EXACT)
    pipelined.sync()
    assert_same_variables(model, plain, EXACT)
    assert not pipelined.notes


def test_rows_in_an_order_that_is_not_known_are_refused_where_stages_cut_them_differently() -> None:
    def sums(x: Any) -> Any:
        places = tf.reverse(tf.range(2 * tf.shape(x)[0]), [0])
        return tf.math.unsorted_segment_sum(tf.repeat(x, 2, 0), places, tf.size(places))

    features = keras.Input((4,))
    x = layers.Dense(3, name="a")(Computed(sums, name="sums")(features))
    model = keras.Model(features, Computed(lambda x: tf.reshape(x, (-1, 6)), name="back")(layers.Dense(3, name="b")(x)))
    model.compile("sgd", "mse")
    told = (
        r"tensor \S+ of layer 'a' has 2 rows for each sample in an order that isn't known, so that it can't be cut: "
        r"stage 0 makes it in slices of \[4\] samples, stage 1 reads it in slices of \[2, 2\]; give both stages the "
        r"same number of replicas and the same shares, or cut elsewhere"
    )
    with pytest.raises(PassError, match=told):
        pipeline(model, ["a"], (1, 2), 1, 4)
    given = np.random.default_rng(0).normal(size=(4, 4))
    expected = model.predict_on_batch(given)
    np.testing.assert_allclose(pipeline(model, ["a"], (1, 1), 1, 4).predict_on_batch(given), expected, rtol=1e-6)


OUTPUTS: dict[str, Any] = {
    "views": views,
    "repeated": lambda x: tf.repeat(x, 2, 0),
    "steps of time": lambda x: swapped(tf.reshape(tf.tile(x, (1, 3)), (-1, 3, 4))),
    "views on the last axis": lambda x: tf.transpose(views(x)),
    "classes of views": lambda x: tf.argmax(views(x), -1),
    "from Python": lambda x: tf.ensure_shape(tf.numpy_function(np.tanh, [x], x.dtype), (None, 4)),
    "constant": lambda x: tf.constant([[1.0, 2.0]]),
}


def test_predictions_have_their_rows_in_the_order_of_plain_keras() -> None:
    features = keras.Input((3,))
    x = layers.Dense(4, name="first")(features)

    def compiled(outputs: Any) -> keras.Model:
        model = keras.Model(features, outputs)
        model.compile("sgd")
        return model

    plain = compiled({name: Computed(function)(x) for name, function in OUTPUTS.items()})
    given = np.random.default_rng(0).normal(size=(12, 3))
    expected = plain.predict_on_batch(given)
    own = pipeline(plain, ["first"], (1, 2), 2, 12).predict_on_batch(given)
    for name, value in expected.items():
        np.testing.assert_array_equal(own[name], value, err_msg=name)
    mean = compiled(Computed(lambda x: tf.reduce_mean(x, 0, keepdims=True))(x))
    with pytest.raises(CaptureError, match=r"output 0 of the model has shape \[1, 4\] for a slice of 3 samples"):
        pipeline(mean, ["first"], (1, 2), 2, 12).predict_on_batch(given)
