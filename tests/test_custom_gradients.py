"""Gradients that a model defines itself are those that it is trained with, in whichever stage or loop they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_training, pair, pipeline, use_float64
from models_for_tests import with_layer

import dapple_tf as dapple
from dapple_tf.describe.plan import Plan
from dapple_tf.operators.op_costs import OperatorCosts

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 3, 4)), rng.normal(size=(7, 2))
SCALES = np.linspace(0.5, 1.5, 4)


@tf.custom_gradient
def bent(x: Any, scale: Any) -> tuple[Any, Callable[..., Any]]:
    """Its gradients are not those of what it computes, and need what it has computed on the way."""
    root = tf.sqrt(tf.abs(x) + 1)
    return root * scale, lambda gradient: (gradient * tf.sin(root) * SCALES, tf.reduce_sum(gradient))


class Bent(keras.Layer):
    """Uses it, in a loop if told so."""

    def __init__(self, times: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.times = times

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        if not self.times:
            return bent(x, tf.convert_to_tensor(self.scale))
        scale = tf.convert_to_tensor(self.scale)
        return tf.while_loop(lambda i, _: i < self.times, lambda i, x: (i + 1, bent(x, scale) * 0.7), (0, x))[1]


LIMITS = tf.constant([0.01, 0.02, 0.01, 0.005], "float64")


def clipped(x: Any) -> Any:
    """A gradient that is clipped on its way back, by Keras' operations, to what a tensor outside says."""

    @keras.ops.custom_gradient
    def same(x: Any) -> Any:
        return x + 0.0, lambda gradient: keras.ops.clip(gradient, -LIMITS, LIMITS)

    return same(x)


MODELS: dict[str, Callable[[], keras.layers.Layer]] = {
    "swish": lambda: layers.Dense(4, activation="swish"),
    "swish in a loop": lambda: layers.LSTM(4, activation="swish", return_sequences=True),
    "own": Bent,
    "own in a loop": lambda: Bent(3),
    "clipped": lambda: layers.Lambda(clipped, output_shape=(3, 4)),
    "recomputed": lambda: layers.Lambda(tf.recompute_grad(lambda x: tf.nn.silu(tf.sin(x))), output_shape=(3, 4)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [name if name == "own" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_models_train_with_the_gradients_that_they_define(name: str) -> None:
    def build() -> keras.Model:
        features = keras.Input((3, 4))
        x = MODELS[name]()(layers.Dense(4, name="first")(features))
        x = layers.Dense(4, name="second")(x if "loop" in name else MODELS[name]()(x))  # Loops take long.
        model = keras.Model(features, layers.Dense(2, name="last")(layers.Flatten()(MODELS[name]()(x))))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    use_float64()
    model, plain = pair(build)
    assert_same_training(pipeline(model, ["second"], (2, 1), 2, 7), plain, [(X, Y, None)] * 2)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_step_of_placed_operators_has_them_too() -> None:
    def build() -> keras.Model:
        features = keras.Input((3, 4))
        x = Bent()(layers.Dense(4, activation="swish")(features))
        model = keras.Model(features, layers.Dense(2)(layers.Flatten()(x)))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    use_float64()
    model, plain = pair(build)
    cluster = dapple.Cluster.local(2, kind="cpu")
    pipelined = dapple.transform(model, cluster, Plan.by_operators(2, 7), operator_costs=OperatorCosts())
    assert_same_training(pipelined, plain, [(X, Y, None)] * 2)


def test_a_gradient_that_fails_is_named() -> None:
    @tf.custom_gradient
    def wrong(x: Any) -> Any:
        def gradient(arriving: Any) -> Any:
            raise ValueError("no gradient today")

        return tf.sin(x), gradient

    features = keras.Input((4,))
    model = keras.Model(features, layers.Lambda(wrong, output_shape=(4,))(layers.Dense(4)(features)))
    model.compile("sgd", "mse")
    pipelined = dapple.transform(model, dapple.Cluster.local(1, kind="cpu"), Plan.data_parallel(1, 4))
    with pytest.raises(dapple.CaptureError, match=r"custom gradient of '.*' can't be traced: no gradient today"):
        pipelined.train_on_batch(np.ones((4, 4)), np.ones((4, 4)))


class Recomputed(layers.Layer):
    """A part of it is computed again for its gradient."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.inner = [layers.Dense(4, activation="tanh"), layers.Dense(4)]

    def build(self, shape: Any) -> None:
        for layer in self.inner:
            layer.build(shape)

    def call(self, x: Any) -> Any:
        return tf.recompute_grad(lambda x: self.inner[1](self.inner[0](x)))(x)


class Doubled(Recomputed):
    """A gradient of its own, that of its weights included."""

    def call(self, x: Any) -> Any:
        @tf.custom_gradient
        def doubled(x: Any) -> Any:
            def gradient(arriving: Any, variables: Any = None) -> Any:
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    y = self.inner[0](x)
                of_x, *of_variables = tape.gradient(y, [x, *variables], output_gradients=2 * arriving)
                return of_x, of_variables

            return self.inner[0](x), gradient

        return doubled(self.inner[1](x))


@pytest.mark.few(1)
@pytest.mark.parametrize("layer", [Recomputed, pytest.param(Doubled, marks=pytest.mark.slow)])
def test_gradients_of_the_weights_that_such_a_function_reads_are_its_own_too(layer: type[Recomputed]) -> None:
    """They ended in "Cannot convert a Tensor of dtype resource to a NumPy array", or would have been 0."""
    use_float64()
    model, plain = pair(lambda: with_layer(layer, layer))
    assert_same_training(pipeline(model, ["second"], (2, 1), 2, 7), plain, [(X[:, 0], Y, None)] * 2)
