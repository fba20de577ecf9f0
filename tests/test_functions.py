"""Parts of a model that are a ``tf.function``: layers inside are cut and trained, and those for XLA stay compiled."""

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
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import COMPILED_ATTR, function_names
from graph_passes.passes.call_gradients import differentiable_calls

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 4)), rng.normal(size=(7, 2))
IDS = rng.integers(0, 5, size=(7, 3))
# Of slices of one size: for each size XLA compiles anew.
IMAGES, TARGETS = rng.normal(size=(8, 5, 5, 4)), rng.normal(size=(8, 2))


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


class Converted(layers.Layer):
    """Python's control flow over tensors, which AutoGraph converts."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(4, 4), name="scale")

    @tf.function
    def call(self, x: Any) -> Any:
        if tf.reduce_sum(self.scale) > 1e9:
            x = x * 2
        return tf.tanh(x @ self.scale)


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


slow = pytest.mark.slow
CASES = {
    "grouped": (grouped, "first", IMAGES, {}),
    "grouped, recomputed": (grouped, "first", IMAGES, {"recompute": "boundary"}),
    "grouped, all compiled": (grouped, "first", IMAGES, {"jit_compile": True}),
    "compiled": (lambda: with_layer(lambda: Compiled(name="own")), "own", X, {}),
    "compiled in a loop": (lambda: with_layer(lambda: InLoop(name="own")), "own", X, {}),
    "compiled lookup": (lookup, "flat", IDS, {}),
    "converted": (lambda: with_layer(lambda: Converted(name="own")), "own", X, {}),
    "methods": (subclassed, "first", X, {}),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "case", [case if case in ("grouped", "methods") else pytest.param(case, marks=slow) for case in CASES]
)
def test_functions_train_as_in_plain_keras(case: str) -> None:
    """They had no gradient (SymbolicGradient), or read variables by a graph that was traced before (refused)."""
    build, cut, x, options = CASES[case]
    use_float64()
    model, plain = pair(build)
    y = TARGETS if x is IMAGES else Y
    assert_same_training(pipeline(model, [cut], (2, 1), 2, len(x), **options), plain, [(x, y, None)] * 2)


@pytest.mark.thorough
@slow
@pytest.mark.parametrize("inner", [lambda: layers.Dropout(0.5, seed=3), layers.BatchNormalization])
def test_state_that_a_compiled_function_assigns_is_kept(inner: Callable[[], keras.layers.Layer]) -> None:
    class Stateful(layers.Layer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.inner = inner()

        def build(self, shape: Any) -> None:
            self.inner.build(shape)

        @tf.function(jit_compile=True)
        def compiled(self, x: Any, training: bool) -> Any:
            return 2 * self.inner(x, training=training)

        def call(self, x: Any, training: bool = False) -> Any:
            return self.compiled(x, training)

    use_float64()
    model, plain = pair(lambda: with_layer(lambda: Stateful(name="own")))
    assert_same_training(pipeline(model, ["second"], (1, 1), 1, 7), plain, [(X, Y, None)] * 2)


def test_a_grouped_convolution_is_one_compiled_call_forward_and_one_backward() -> None:
    model = grouped()
    pipelined = pipeline(model, ["first"], (1, 1), 1, 8)
    pipelined.train_on_batch(IMAGES, TARGETS)
    (source,) = pipelined._engine.builder.sources
    for stage in source.built.program.stages:
        assert stage.forward is not None and stage.backward is not None
        for function in (stage.forward, stage.backward):
            calls = [node for node in function.function.node_def if node.op in CALLS]
            assert [node.attr[COMPILED_ATTR].b for node in calls] == [True], function.name


@pytest.mark.thorough
def test_a_grouped_convolution_is_profiled() -> None:
    """The profiler ended with TensorFlow's own NotFoundError: no SymbolicGradient on this device."""
    profile = dapple.profile(grouped(), 4, repeats=1, cache=False, progress=False)
    assert all(layer.backward.per_sample >= 0 for layer in profile.layers)


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
