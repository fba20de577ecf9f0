"""Replicas with unequal shares of each micro-batch train as plain Keras does."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import assert_same_training, assert_same_variables, pair, pipeline, use_float64
from keras import layers
from selection import thorough

import dapple_tf as dapple
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.profile import Tensor
from dapple_tf.execution.step_passes import StepPasses
from dapple_tf.frontend.capture import Mode

LENGTH = 3
EXACT = 1e-12


def dense() -> keras.Model:
    features = keras.Input((4,))
    x = layers.Dense(6, "tanh", name="first")(features)
    x = layers.Dense(5, "tanh", name="second")(x)
    model = keras.Model(features, layers.Dense(3, name="last")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, weighted_metrics=["accuracy"])
    return model


def masked() -> keras.Model:
    """Keras divides its loss by the valid entries of the whole batch."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(7, 4, mask_zero=True, name="first")(tokens)
    x = layers.SimpleRNN(5, return_sequences=True, name="second")(x)
    model = keras.Model(tokens, layers.Dense(3, name="last")(x))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def batch(kind: str, samples: int, seed: int) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(seed)
    weights = draw.uniform(0.5, 2, samples)
    if kind == "masked":
        x = draw.integers(0, 4, (samples, LENGTH)).astype("int32")
        return x, draw.integers(0, 3, (samples, LENGTH)), None
    return draw.normal(size=(samples, 4)), draw.integers(0, 3, samples), weights


MODELS = {"dense": dense, "masked": masked}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "cuts", "replicas", "micro_batches", "options"),
    [
        ("dense", ["first"], (2, 3), 2, {"shares": [[3, 2], [1, 2, 2]]}),
        thorough(("dense", [], (3,), 1, {"shares": [[1, 4, 2]]})),
        ("dense", ["first", "second"], (2, 1, 2), 3, {"shares": [[2, 1], [1], [1, 2]], "schedule": "zb_h1"}),
        ("masked", ["first"], (2, 2), 2, {"shares": [[2, 3], [3, 2]], "recompute": "boundary"}),
    ],
)
def test_unequal_shares_train_as_plain_keras(
    kind: str, cuts: list[str], replicas: tuple[int, ...], micro_batches: int, options: dict[str, Any]
) -> None:
    use_float64()
    model, plain = pair(MODELS[kind])
    pipelined = pipeline(model, cuts, replicas, micro_batches, 15, **options)
    # A last batch of two samples leaves replicas without any.
    batches = [batch(kind, samples, seed) for seed, samples in enumerate((15, 15, 2))]
    assert_same_training(pipelined, plain, batches, tolerance=EXACT)


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
    x, y, weights = batch("dense", samples, 5)
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
    assert_same_training(pipelined, plain, [batch("dense", 16, 0), batch("dense", 5, 1)], tolerance=EXACT)
