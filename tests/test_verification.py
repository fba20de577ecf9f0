"""``verify``: a right model differs by rounding, a wrong gradient shows, and nothing changes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import keras
import numpy as np
import pytest
from models_for_tests import Pair, classifier, layers, plan, samples, transform, values, variables

import dapple_tf as dapple
from dapple_tf.execution.engine import Engine
from dapple_tf.verification import not_comparable

X, Y, W = samples(7)


@pytest.fixture(scope="module")
def pipelined() -> dapple.PipelinedModel:
    return transform(classifier(metrics=["accuracy"]))


@pytest.mark.slow
def test_a_right_model_differs_by_rounding(pipelined: dapple.PipelinedModel) -> None:
    for weights in (None, W):
        result = pipelined.verify(X, Y, weights)
        assert result.training
        assert result.loss[0] == pytest.approx(result.loss[1], rel=1e-6)
        assert set(result.differences) == {f"{layer}/{name}" for layer in LAYERS for name in ("kernel", "bias")}
        assert max(result.differences.values()) < 1e-5
        assert min(result.largest.values()) > 1e-3
        assert result.worst[1] == max(result.differences.values())


LAYERS = ("first", "second", "logits")


def test_table() -> None:
    """Layers in the order of their differences, and how the model was called."""
    differences = {"a/kernel": 2e-7, "a/bias": 5e-3, "outer/bb/kernel": 1e-6, "scale": math.inf}
    result = dapple.Verification(
        loss=(1.25, 1.0),
        differences=differences,
        largest=dict.fromkeys(differences, 1.0),
        layers={"a/kernel": "a", "a/bias": "a", "outer/bb/kernel": "outer/bb", "scale": "scale"},
        training=True,
    )
    assert result.worst == ("scale", math.inf)
    assert result.by_layer() == {"a": 5e-3, "outer/bb": 1e-6, "scale": math.inf}
    assert str(result) == (
        "loss: pipelined 1.25, plain 1 (training)\n"
        "layer     largest relative difference of a gradient\n"
        "scale     inf\n"
        "a         5.00e-03\n"
        "outer/bb  1.00e-06"
    )
    inference = dataclasses.replace(result, training=False, reason="layer 'drop' draws random numbers")
    assert "plain 1 (inference behaviour: layer 'drop' draws random numbers)\n" in str(inference)
    nothing = dapple.Verification((0.0, 0.0), {}, {}, {}, True)
    assert nothing.worst == ("(no variable)", 0.0)
    assert str(nothing).count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "difference"),
    [
        (lambda gradient: 2 * gradient, 1.0),
        (lambda gradient: gradient + 1e-3 * np.max(np.abs(gradient)), 1e-3),
        (lambda gradient: gradient * np.nan, math.inf),
        (None, 1.0),
    ],
    ids=["doubled", "a little off", "not a number", "missing"],
)
def test_a_wrong_gradient_shows(
    pipelined: dapple.PipelinedModel, monkeypatch: pytest.MonkeyPatch, wrong: Any, difference: float
) -> None:
    original = Engine.run

    def run(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        gradients = dict(result.gradients)
        gradient = gradients.pop("second/kernel")
        if wrong is not None:
            gradients["second/kernel"] = wrong(gradient)
        return dataclasses.replace(result, gradients=gradients)

    monkeypatch.setattr(Engine, "run", run)
    result = pipelined.verify(X, Y)
    assert result.worst[0] == "second/kernel"
    assert result.by_layer()["second"] == pytest.approx(difference, rel=0.05)
    assert result.by_layer()["first"] < 1e-5
    assert str(result).splitlines()[2].startswith("second")


def model_of(*own: layers.Layer) -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(6, name="first"), *own, layers.Dense(3, name="last")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.slow
def test_layers_that_a_slice_cannot_repeat_are_compared_in_inference() -> None:
    """Verification changes nothing: values, seeds, moving averages, optimizer and metrics; nor what training does."""
    pair = Pair(lambda: model_of(layers.Dropout(0.5, seed=3, name="drop"), layers.BatchNormalization(name="norm")))
    first = pair.pipelined.train_on_batch(X, Y)
    pair.plain.set_weights(pair.pipelined.sync().get_weights())
    everything = [*variables(pair.model), *pair.model.metrics_variables]
    before = [variable.numpy() for variable in everything]
    result = pair.pipelined.verify(X, Y)
    assert not result.training
    assert result.reason == "layer 'drop' draws random numbers"
    assert max(result.differences.values()) < 1e-5
    expected = pair.plain.test_on_batch(X, Y)[0]
    assert result.loss == (pytest.approx(expected, rel=1e-5), pytest.approx(expected, rel=1e-5))
    for variable, value in zip(everything, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value, err_msg=variable.path)
    pair.reset()
    pair.pipelined.verify(X, Y)
    assert pair.pipelined.train_on_batch(X, Y) == first


def test_values_that_are_newer_on_the_devices_are_compared(pipelined: dapple.PipelinedModel) -> None:
    pipelined.train_on_batch(X, Y)
    old = values(pipelined.model)
    result = pipelined.verify(X, Y)
    assert result.loss[0] == pytest.approx(result.loss[1], rel=1e-6)
    assert not np.array_equal(values(pipelined.model)[0], old[0])  # It syncs.


@pytest.mark.slow
def test_outputs_losses_and_shared_names() -> None:
    """Several outputs, losses that layers add, a frozen layer, and two variables of one path."""

    class Pairs(layers.Layer):
        def build(self, shape: Any) -> None:
            self.weights_of_mine = [self.add_weight((shape[-1],), "ones", name="scale") for _ in range(2)]

        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(x * x))
            return self.weights_of_mine[0] * x + self.weights_of_mine[1] * keras.ops.tanh(x)

    features = keras.Input((4,))
    frozen = layers.Dense(6, name="first", trainable=False)(features)
    x = Pairs(name="pairs")(layers.Dense(5, name="second")(frozen))
    model = keras.Model(features, [layers.Dense(3, name="logits")(x), layers.Dense(1, name="number")(x)])
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    model.compile(keras.optimizers.SGD(0.1), losses, loss_weights=[1.0, 0.5])
    result = transform(model, plan(cuts=["second"])).verify(X, [Y, W[:, None]])
    assert result.loss[0] == pytest.approx(result.loss[1], rel=1e-6)
    assert max(result.differences.values()) < 1e-5
    assert set(result.by_layer()) == {"pairs", "second", "logits", "number"}
    assert len(result.differences) == 8


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (layers.Dropout(0.5, name="it"), "layer 'it' draws random numbers"),
        (layers.Dropout(0.0, name="it"), ""),
        (layers.GaussianNoise(0.1, name="it"), "layer 'it' draws random numbers"),
        (layers.BatchNormalization(name="it"), "layer 'it' normalises by the batch"),
        (layers.BatchNormalization(trainable=False, name="it"), ""),
        (layers.LayerNormalization(name="it"), ""),
    ],
)
def test_reasons(layer: layers.Layer, reason: str) -> None:
    assert not_comparable(model_of(layer)) == reason


def test_reasons_of_recurrent_layers() -> None:
    """Their cells have a generator whether they drop anything or not."""
    for dropout, reason in ((0.0, ""), (0.2, "draws random numbers")):
        model = keras.Sequential([keras.Input((3, 2)), layers.LSTM(2, dropout=dropout)])
        assert reason in not_comparable(model)
        assert bool(not_comparable(model)) == bool(reason)
