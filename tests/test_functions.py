"""Parts of a model that are a ``tf.function``: layers inside are cut and trained, and those for XLA stay compiled."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_trains_as_keras
from models_for_tests import with_layer
from step_programs import of_model

import dapple_tf as dapple
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import COMPILED_ATTR, function_names
from graph_passes.passes.call_gradients import differentiable_calls

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 4)), rng.normal(size=(7, 2))
IDS = rng.integers(0, 5, size=(7, 3))


class Compiled(layers.Layer):
    """A function for XLA that reads a weight, calls a layer and another such function, all of several results."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(4, 4), name="scale")
        self.inner = layers.Dense(4)
        self.inner.build(shape)

    @tf.function(jit_compile=True)
    def parts(self, x: Any) -> Any:
        return tf.tanh(x @ self.scale), x, tf.cast(x > 0, "int32")

    @tf.function(jit_compile=True)
    def combined(self, x: Any) -> Any:
        a, b, c = self.parts(x)
        return a * tf.sin(self.inner(b)) + b * tf.cast(c, b.dtype)

    def call(self, x: Any) -> Any:
        return self.combined(x)


class InLoop(Compiled):
    """The same in each round of a loop."""

    def call(self, x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, self.combined(x)), (0, x), maximum_iterations=2)[
            1
        ]


class CompiledLookup(layers.Layer):
    """Rows of a table, for which Keras' optimizers have the gradients of single rows."""

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(5, 4), name="table", initializer="normal")

    @tf.function(jit_compile=True)
    def call(self, ids: Any) -> Any:
        return tf.tanh(tf.gather(self.table, ids) * 2)


class Methods(keras.Model):
    """A subclassed model whose methods are functions; `first` and `last` are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(4, name="first"), layers.Dense(2, name="last")

    @tf.function
    def encoded(self, x: Any) -> Any:
        return tf.tanh(self.first(x))

    @tf.function
    def call(self, x: Any) -> Any:
        return self.last(self.encoded(x))


def subclassed() -> keras.Model:
    model = Methods()
    model(np.zeros((1, 4)))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def lookup() -> keras.Model:
    ids = keras.Input((3,), dtype="int32")
    model = keras.Model(ids, layers.Dense(2)(layers.Flatten(name="flat")(CompiledLookup()(ids))))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def grouped() -> keras.Model:
    images = keras.Input((5, 5, 4))
    x = layers.Conv2D(4, 3, groups=2, activation="gelu", name="first")(images)
    x = layers.Conv2D(4, 3, groups=4, padding="same", name="second")(x)
    model = keras.Model(images, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


CASES = {
    "in a loop": (lambda: with_layer(lambda: InLoop(name="own")), "own", X),
    "lookup": (lookup, "flat", IDS),
    "methods": (subclassed, "first", X),
}


@pytest.mark.parametrize("case", CASES)
def test_functions_train_as_in_plain_keras(case: str) -> None:
    """They had no gradient (SymbolicGradient), or read variables by a graph that was traced before (refused)."""
    build, cut, x = CASES[case]
    assert_trains_as_keras(build, [cut], (2, 1), 2, [(x, Y, None)])


def test_a_grouped_convolution_is_one_compiled_call_forward_and_one_backward() -> None:
    program = of_model(grouped(), dapple.Plan.manual(["first"], [[0], [1]], 1, 8), dapple.Cluster.local(2, kind="cpu"))
    for stage in program.stages:
        for function in (stage.own_forward, stage.own_backward):
            calls = [node for node in function.function.node_def if node.op in CALLS]
            assert [node.attr[COMPILED_ATTR].b for node in calls] == [True], function.name


def test_the_gradient_of_a_loop_inside_a_function_brings_its_functions() -> None:
    @tf.function(autograph=False)
    def rounds(x: Any) -> Any:
        return tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, tf.sin(v)), (0, x))[1]

    with tf.Graph().as_default() as graph:
        rounds(tf.compat.v1.placeholder(tf.float32, [3]))
    library = differentiable_calls(graph.as_graph_def()).library
    known = {function.signature.name for function in library.function}
    assert any(name.endswith("_gradient") for name in known)
    assert {name for each in library.function for node in each.node_def for name in function_names(node)} <= known
